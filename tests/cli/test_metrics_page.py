"""Rows 13 and 19: the metrics page of commands without a server, and malformed requests to it."""

import os
import random
import socket
import threading
import urllib.error
import urllib.request
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry, Gauge

from penstock.cli.metrics_page import CONNECTIONS_MAX, MetricsPage
from tests.measure import memory_bytes
from tests.server.conftest import until

TIMEOUT_S = 60


@pytest.fixture
def page():
    registry = CollectorRegistry()
    Gauge("penstock_test", "A figure.", registry=registry).set(7)
    served = MetricsPage(0, registry)
    yield served
    served.close()


def connect(page):
    return socket.create_connection(("127.0.0.1", page.port), TIMEOUT_S)


def read_all(wire):
    said = b""
    try:
        while piece := wire.recv(65_536):
            said += piece
    except ConnectionResetError:
        pass
    return said


def ask(page, request):
    with connect(page) as wire:
        # It may have been answered and closed before everything was sent.
        with suppress(OSError):
            wire.sendall(request)
            wire.shutdown(socket.SHUT_WR)
        return read_all(wire)


def test_the_figures_are_shown_at_metrics(page):
    with urllib.request.urlopen(f"http://localhost:{page.port}/metrics", timeout=TIMEOUT_S) as got:
        assert b"penstock_test 7.0" in got.read()
        assert got.headers["Content-Type"].startswith("text/plain; version=")
    assert b"penstock_test" not in ask(page, b"HEAD /metrics HTTP/1.0\r\n\r\n")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://localhost:{page.port}/other", timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.0\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1.evil.example:80\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nhOST: evil.example\r\n\r\n", b"403"),
        (b"GET /" + b"x" * 17_000 + b" HTTP/1.0\r\n\r\n", b"431"),
        (b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 3_000 + b"\r\n", b"431"),
        (b"GET / HTTP/9\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"", b"400"),
    ],
)
def test_a_request_for_anything_but_the_page_is_refused(page, request_, status, capfd):
    said = ask(page, request_)
    # The answer may be lost if the client still sends when the connection is closed.
    assert status in said.partition(b"\r\n")[0] or (said == b"" and status == b"431")
    assert capfd.readouterr() == ("", "")


def test_garbage_prints_no_traceback_and_the_page_is_still_served(page, capfd):
    random_bytes = random.Random(19).randbytes
    for size in (1, 10, 1_000, 100_000) * 10:
        ask(page, random_bytes(size))
    with connect(page) as wire:
        # Goes away amid the answer.
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wire.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert b"penstock_test 7.0" in ask(page, b"GET /metrics HTTP/1.0\r\n\r\n")
    assert capfd.readouterr() == ("", "")


def test_silent_connections_do_not_block_others_and_cost_little(page, record_property):
    """Row 13: each holds a thread, and only so many of them are held."""
    before_bytes = memory_bytes(os.getpid())
    before = threading.active_count()
    silent = []
    try:
        for _ in range(10 * CONNECTIONS_MAX):
            wire = connect(page)
            silent.append(wire)
            wire.sendall(b"GET /metr")
        assert b"penstock_test 7.0" in ask(page, b"GET /metrics HTTP/1.0\r\n\r\n")
        # The thread of a connection that was closed ends when the system lets it run.
        until(lambda: threading.active_count() - before <= 2 * CONNECTIONS_MAX)
        taken = threading.active_count() - before
        taken_mib = max(0, memory_bytes(os.getpid()) - before_bytes) / 2**20
        record_property("figure", f"{taken} threads, {taken_mib:.1f} MiB for {len(silent)} silent")
        # The oldest were closed.
        assert read_all(silent[0]) == b""
    finally:
        for wire in silent:
            wire.close()
