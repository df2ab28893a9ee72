"""`penstock serve --carrot`: a broker beside the SQS endpoint, on the same store, as a process."""

import random
import re
import runpy
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from penstock import carrot
from penstock.errors import InvalidField, QueueDeleted
from penstock.server.carrot.broker import read_carrot
from penstock.settings import ServerSettings
from tests.measure import memory_bytes
from tests.server.probe import probing
from tests.server.sqs.conftest import PENSTOCK, clean_environment, serve
from tests.wire.carrot.test_carrot import read_golden
from tests.wire.frames.test_fuzz import chunks, mutated

connect: Any = carrot.connect
broker_of: Any = read_carrot
STREAMS = 2_000
EXAMPLE = Path(__file__).parents[3] / "examples" / "carrot_client.py"


def carrot_port(server):
    (port,) = re.findall(r"carrot +127\.0\.0\.1:(\d+)", server.output)
    return int(port)


@pytest.fixture(scope="module")
def server():
    with serve("--store", "memory:", "--carrot", "0") as started:
        yield started


@pytest.fixture
def client(server):
    with connect("127.0.0.1", carrot_port(server)) as connected:
        yield connected


def test_messages_pushed_by_one_protocol_are_pulled_by_the_other(server, client):
    sqs = server.client()
    queue = sqs.create_queue(QueueName="shared")["QueueUrl"]
    client.put("shared", "hello from carrot")
    (message,) = sqs.receive_message(QueueUrl=queue)["Messages"]
    assert message["Body"] == "hello from carrot"
    sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    sqs.send_message(QueueUrl=queue, MessageBody="hello from sqs")
    with client.get("shared", wait=20) as message:
        assert message.body == b"hello from sqs"
    assert client.get("shared") is None
    sqs.delete_queue(QueueUrl=queue)


def test_the_brokers_figures_are_among_the_metrics(server, client):
    client.add("counted")
    client.put("counted", b"x")
    held = client.get("counted")
    with pytest.raises(InvalidField):
        client.add("../x")
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        text = page.read().decode()
    assert re.search(r"^penstock_carrot_connections 1\.0$", text, re.MULTILINE)
    assert re.search(r'^penstock_carrot_requests_total\{request="PUT"\} [1-9]', text, re.MULTILINE)
    assert re.search(r"^penstock_carrot_unacknowledged 1\.0$", text, re.MULTILINE)
    assert re.search(r'^penstock_carrot_refused_total\{reason="INVALID"\} 1', text, re.MULTILINE)
    held.ack()


def test_the_example_client_in_plain_sockets_works(server, monkeypatch, capsys):
    lines = [
        line
        for line in EXAMPLE.read_text().splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    assert len(lines) <= 40
    assert "penstock" not in re.sub(r'""".*?"""', "", EXAMPLE.read_text(), flags=re.DOTALL)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(carrot_port(server))])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.splitlines() == ["read b'hello'", "read b'hello' again", "EMPTY"]


def test_a_store_of_another_server_is_served_through_the_broker(tmp_path, server):
    from tests.server.conftest import DaemonProcess

    daemon = DaemonProcess(tmp_path / "store", "--listen", "127.0.0.1:0")
    try:
        url = f"penstock://127.0.0.1:{daemon.port}"
        with (
            serve("--store", url, "--carrot", "0") as started,
            connect("127.0.0.1", carrot_port(started)) as client,
            connect("127.0.0.1", carrot_port(started)) as other,
        ):
            client.add("orders")
            client.put_many("orders", [b"1", b"2", b"3"])
            first = client.get("orders")
            rest = client.get_many("orders", 5, ack=[first])
            assert [each.body for each in rest] == [b"2", b"3"]
            client.nack(rest)
            assert [each.body for each in other.get_many("orders", 5)] == [b"2", b"3"]
            other.close()
            held = client.get("orders", wait=20)
            assert held.body == b"2"
            single = carrot.SingleClient("127.0.0.1", carrot_port(started))
            with single.read("orders") as message:
                assert message == b"3"
            client.remove("orders")
            with pytest.raises(QueueDeleted):
                held.ack()
    finally:
        daemon.stop()


def test_the_brokers_address_is_read_and_refused_where_it_is_open(tmp_path):
    assert broker_of(ServerSettings(), None) is None
    token = tmp_path / "token"
    token.write_text("correct horse battery staple")
    assert str(broker_of(ServerSettings(carrot="7"), None).address) == "127.0.0.1:7"
    assert str(broker_of(ServerSettings(carrot="[::1]:7"), None).address) == "[::1]:7"
    for text in ("localhost", "", "127.0.0.1:x", "70000", "１"):
        with pytest.raises(InvalidField, match="carrot: "):
            broker_of(ServerSettings(carrot=text), None)
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "--token-file and --tls-cert with --tls-key"),
        ({"token_file": str(token)}, "give --tls-cert with --tls-key"),
        ({"insecure_without_tls": True}, "give --token-file"),
    ]
    for given, missing in refused:
        with pytest.raises(InvalidField, match=missing):
            broker_of(ServerSettings(carrot="0.0.0.0:7", **given), None)
    opened = broker_of(
        ServerSettings(carrot="0.0.0.0:7", token_file=str(token), insecure_without_tls=True), None
    )
    assert opened.token == "correct horse battery staple"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--carrot", "0.0.0.0:0"], "carrot: address: 0.0.0.0:0 can be reached from other mach"),
        (["--carrot", "somewhere"], "is not of the form [HOST:]PORT"),
        (["--token-file", "x"], "token_file: is for the clients of a Carrot broker"),
    ],
)
def test_wrong_broker_settings_are_refused_before_a_store_is_created(tmp_path, words, said):
    done = subprocess.run(
        [PENSTOCK, "serve", "--port", "0", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=clean_environment(),
    )
    assert done.returncode == 3
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_is_taken_ends_the_start_with_its_own_status(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [PENSTOCK, "serve", "--port", "0", "--carrot", port],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=clean_environment(),
        )
    assert done.returncode == 7
    assert f"another program listens on 127.0.0.1:{port}" in done.stderr


def test_no_stream_of_bytes_crashes_or_delays_the_broker(server, record_property):
    """Row 19: Carrot, mutated and in any chunks, to a process with a probe beside."""
    chance = random.Random(20_004)
    golden = list(read_golden().values())
    port, pid = carrot_port(server), server.process.pid
    web = int(server.url.rpartition(":")[2])
    before_bytes = memory_bytes(pid)
    with probing(web, pid) as seen:
        for turn in range(STREAMS):
            sent = mutated(chance, b"".join(chance.choice(golden) for _ in range(1 + turn % 4)))
            with socket.create_connection(("127.0.0.1", port), 5) as wire:
                try:
                    for chunk in chunks(chance, sent):
                        wire.sendall(chunk)
                    wire.shutdown(socket.SHUT_WR)
                    while wire.recv(65_536):
                        pass
                except TimeoutError:
                    pytest.fail(f"the broker did not answer {sent!r}")
                except OSError:
                    pass  # it had answered and closed before it was sent everything
    grown_bytes = seen.peak_bytes - before_bytes
    record_property("figure", f"{seen.longest_ms:.0f} ms, {grown_bytes / 2**20:.1f} MiB")
    assert seen.longest_ms <= 200
    assert grown_bytes <= 16 * 1024 * 1024
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        text = page.read().decode()
    assert "penstock_faults_total 0.0" in text
    assert re.search(r'refused_total\{reason="PROTOCOL"\} [1-9]\d\d', text)
