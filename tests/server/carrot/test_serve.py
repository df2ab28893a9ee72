"""`penstock serve --carrot`: a broker beside the SQS endpoint, on the same store, as a process."""

import random
import re
import runpy
import socket
import ssl
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock import carrot
from penstock.errors import BackendLost, InvalidField, ProtocolError, QueueDeleted
from penstock.server.carrot.broker import read_carrot
from penstock.settings import ServerSettings
from penstock.wire.carrot.session import read_given
from tests.conftest import FULL
from tests.measure import SLACK, memory_bytes
from tests.server.carrot.test_session import get, receive
from tests.server.conftest import until
from tests.server.probe import probing
from tests.server.sqs.conftest import PENSTOCK, clean_environment, serve
from tests.wire.carrot.test_carrot import read_golden
from tests.wire.frames.test_fuzz import chunks, mutated, send_and_drain

connect: Any = carrot.connect
broker_of: Any = read_carrot
STREAMS = 40_000 if FULL else 2_000
EXAMPLE = Path(__file__).parents[3] / "examples" / "carrot_client.py"


def metrics(server):
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        return page.read().decode()


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: python carrot_client.py PORT"),
        (["port"], "usage: python carrot_client.py PORT"),
        (["1"], "no broker answers at port 1: "),
        (["99999"], "no broker answers at port 99999: "),
    ],
)
def test_the_example_client_says_how_it_is_used(words, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words])
    with pytest.raises(SystemExit, match=said):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


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
            send_and_drain(port, chunks(chance, sent))
    grown_bytes = seen.peak_bytes - before_bytes
    record_property("figure", f"{seen.longest_ms:.0f} ms, {grown_bytes / 2**20:.1f} MiB")
    assert seen.longest_ms <= 200 * SLACK
    assert grown_bytes <= 16 * 1024 * 1024
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        text = page.read().decode()
    assert "penstock_faults_total 0.0" in text
    assert re.search(r'refused_total\{reason="PROTOCOL"\} [1-9]\d\d', text)


def test_waiting_reads_of_every_protocol_are_served_in_the_order_they_came(server, client):
    sqs = server.client()
    queue = sqs.create_queue(
        QueueName="in-turn", Attributes={"ReceiveMessageWaitTimeSeconds": "20"}
    )["QueueUrl"]
    port = carrot_port(server)

    def by_session():
        with connect("127.0.0.1", port) as one, one.get("in-turn", wait=20) as message:
            return message.body

    def by_single():
        with carrot.SingleClient("127.0.0.1", port).read("in-turn") as message:
            return message

    def by_sqs():
        (message,) = sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=20)["Messages"]
        return message["Body"].encode()

    with ThreadPoolExecutor(5) as pool:
        pulls = []
        for read in (by_session, by_single, by_sqs, by_single, by_session):
            pulls.append(pool.submit(read))
            until(
                lambda: (
                    f'penstock_waiting_pulls{{queue="in-turn"}} {len(pulls)}.0' in metrics(server)
                )
            )
        for number in range(5):
            client.put("in-turn", b"%d" % number)
        assert [pull.result(60) for pull in pulls] == [b"0", b"1", b"2", b"3", b"4"]
    client.remove("in-turn")


def test_of_two_thousand_connections_that_wait_each_gets_a_message(server, client):
    """Row 13: no connection is starved."""
    count = 2_000
    client.add("crowd")
    with ExitStack() as stack:
        links = []
        for _ in range(count):
            link = socket.create_connection(("127.0.0.1", carrot_port(server)), 60)
            links.append(stack.enter_context(link))
            link.sendall(get(1, "crowd", wait_ms=60_000))
        until(lambda: f'penstock_waiting_pulls{{queue="crowd"}} {count}.0' in metrics(server))
        client.put_many("crowd", [b"%d" % number for number in range(count)])
        bodies = [read_given(1, receive(link).body)[0].body for link in links]
        assert sorted(bodies, key=int) == [b"%d" % number for number in range(count)]
    until(lambda: "penstock_carrot_unacknowledged 0.0" in metrics(server))
    client.remove("crowd")


def test_with_a_token_and_tls_the_broker_serves_other_machines(tmp_path, certificate):
    token = tmp_path / "token"
    token.write_text("correct horse battery staple\n")
    cert, key = certificate
    words = ["--host", "0.0.0.0", "--key", "AKIAEXAMPLE:secretsecretsecret", "--store", "memory:"]
    words += ["--token-file", str(token), "--tls-cert", cert, "--tls-key", key]
    with serve(*words, "--carrot", "0.0.0.0:0") as started:
        (port,) = re.findall(r"carrot +0\.0\.0\.0:(\d+)", started.output)
        where = ("127.0.0.1", int(port))
        trusted = ssl.create_default_context(cafile=cert)
        with connect(*where, token=token.read_text().strip(), tls=trusted) as secret:
            secret.add("orders")
            secret.put("orders", b"x")
            assert secret.get("orders").body == b"x"
        with (
            connect(*where, token="not the right token", tls=trusted) as stranger,
            pytest.raises(ProtocolError, match="token"),
        ):
            stranger.put("orders", b"x")


def test_a_client_of_another_port_gets_the_error_that_it_is_no_broker(server):
    """The SQS endpoint of the same process answers in HTTP."""
    with (
        connect("127.0.0.1", server.port) as client,
        pytest.raises(ProtocolError, match=r"does not speak Carrot: it began with b'HTTP/1\.1 400"),
    ):
        client.put("orders", b"x")
    with pytest.raises(BackendLost, match="this connection was closed; connect again"):
        client.put("orders", b"x")
    single = carrot.SingleClient("127.0.0.1", server.port)
    with pytest.raises(ProtocolError, match="does not speak Carrot"):
        single.write("orders", b"x")


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda client: client.put(5, b"x"), "queue: expected text, got int"),
        (lambda client: client.put("q\udc80", b"x"), "queue: "),
        (lambda client: client.put("orders", 5), "body: expected bytes or text, got int"),
        (lambda client: client.put_many("orders", [b"x", None]), "body: expected bytes or text"),
        (lambda client: client.put_many("orders", b"x"), "bodies: expected several"),
        (lambda client: client.get("orders", wait="1"), "wait: expected a number of seconds"),
        (lambda client: client.get("orders", wait=-1), "wait: -1 s is outside"),
        (lambda client: client.get_many("orders", 0), "limit: expected a whole number from 1"),
        (lambda client: client.get_many("orders", "2"), "limit: expected a whole number from 1"),
        (lambda client: client.extend([], 10**8), "duration: "),
        (lambda client: client.add("orders", max_messages=1.5), "max_messages: expected a whole"),
        (lambda client: client.add("no/name"), "queue: "),
        (lambda client: connect("127.0.0.1", 99_999), "port: expected a whole number from 1 to"),
        (lambda client: connect("127.0.0.1", "11311"), "port: expected a whole number from 1 to"),
    ],
)
def test_wrong_arguments_of_the_client_are_named_and_its_connection_stays(client, use, said):
    with pytest.raises(InvalidField) as caught:
        use(client)
    assert str(caught.value).startswith(said)
    client.add("still-connected")
