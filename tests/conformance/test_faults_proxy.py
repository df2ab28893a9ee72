"""The proxy that makes faults leaves nothing behind that a later test would be blamed for."""

import gc
import socket
import threading
import warnings

import pytest

from penstock.testing.proxy import FaultProxy, resp_request


@pytest.fixture
def silent_server():
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted = []

        def accept():
            while True:
                try:
                    accepted.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in accepted:
            each.close()


def use_and_close(server, clients):
    """Some connections are passed on, some are accepted just now, some wait to be accepted."""
    proxy = FaultProxy(server, resp_request)
    connections = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(clients)]
    connections[0].sendall(b"*1\r\n$4\r\nPING\r\n")
    proxy.close()
    for each in connections:
        each.close()


def test_a_closed_proxy_leaves_no_open_socket(silent_server):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(20):
            use_and_close(silent_server, clients=number % 5 + 1)
        gc.collect()
    assert [str(each.message) for each in said] == []
