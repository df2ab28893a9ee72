"""One store for all processes: clients reach a data directory through the process that holds it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import penstock
import penstock.aio
from penstock.backends.remote.daemon import connect_socket, running_pid, socket_path
from penstock.backends.remote.starting import daemon_status
from penstock.errors import InvalidField
from tests.backends.engine.test_fork import result_in_child
from tests.server.conftest import (
    TIMEOUT_S,
    DaemonProcess,
    send_one_peek,
    until,
    wait_for_listener,
    without_event_lines,
)
from tests.server.sqs.conftest import PENSTOCK, clean_environment, read_until_started, serve

QUICK = {"PENSTOCK_DURABILITY": "os"}


def penstock_command(*words, stdin=None, **environment):
    return subprocess.run(
        [PENSTOCK, *map(str, words)],
        env={**clean_environment(), **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def result_of(*words, **environment):
    done = penstock_command(*words, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def served(store, *words, **options):
    return serve("--data", str(store), *words, environment=QUICK, **options)


def connect(store, extra=""):
    return penstock.connect(f"file:{store}?durability=os{extra}")


# The store that `serve` holds.


def test_the_command_line_and_an_sqs_client_see_the_same_queues(store):
    with served(store) as server:
        client = server.client()
        url = client.create_queue(QueueName="orders")["QueueUrl"]
        client.send_message(QueueUrl=url, MessageBody="from SQS")
        there = ("--url", f"file:{store}")
        result_of(*there, "push", "orders", "from the command line")
        shown = result_of(*there, "--json", "peek", "orders", "-n", "10")
        assert [json.loads(line)["body"] for line in shown.splitlines()] == [
            "from SQS",
            "from the command line",
        ]
        message = json.loads(shown.splitlines()[0])["id"]
        events = result_of(*there, "--json", "history", message)
        assert "Pushed" in events
        received = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
        assert [each["Body"] for each in received] == ["from SQS", "from the command line"]
        assert json.loads(result_of(*there, "--json", "stats", "orders"))["in_flight"] == 2
        assert running_pid(store) == server.process.pid, "a daemon was started"
        client.close()


APP = """
from pathlib import Path

from penstock.tasks import TaskApp

app = TaskApp(name="shop")


@app.task
def pack(order: str) -> None:
    Path("packed").write_text(order)
"""


def test_a_worker_runs_the_tasks_of_the_store_that_serve_holds(store, tmp_path):
    (tmp_path / "shop.py").write_text(APP)
    with served(store) as server:
        for command in (
            [sys.executable, "-c", "import shop; shop.pack.push('order 7')"],
            [str(PENSTOCK), "worker", "shop:app", "--burst"],
        ):
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env={**clean_environment(), "PENSTOCK_URL": f"file:{store}"},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        assert (tmp_path / "packed").read_text() == "order 7"
        assert running_pid(store) == server.process.pid


def test_a_wait_of_one_client_ends_by_a_message_of_another_protocol(store):
    with served(store) as server, connect(store) as queues:
        client = server.client()
        url = client.create_queue(QueueName="orders")["QueueUrl"]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(queues.pull, "orders", wait=60)
            until(lambda: queues.stats("orders").waiting_pulls == 1)
            client.send_message(QueueUrl=url, MessageBody="a")
            claim = waiting.result(TIMEOUT_S)
            assert claim is not None
            assert queues.delete(claim) is True
            receiving = pool.submit(client.receive_message, QueueUrl=url, WaitTimeSeconds=20)
            until(lambda: queues.stats("orders").waiting_pulls == 1)
            queues.push("orders", b"b")
            assert receiving.result(TIMEOUT_S)["Messages"][0]["Body"] == "b"
        client.close()


def test_a_client_in_a_forked_child_has_its_own_connection_to_serve(store):
    with served(store), connect(store) as queues:
        queues.create("orders")
        assert result_in_child(lambda: queues.push("orders", b"child")) == "done"
        queues.push("orders", b"parent")
        assert [claim.body for claim in queues.pull_many("orders", 5)] == [b"child", b"parent"]


def test_options_that_contradict_the_running_serve_are_refused(store):
    with served(store), pytest.raises(InvalidField, match="runs with durability=os"):
        penstock.connect(f"file:{store}?durability=sync")


def test_when_serve_ends_its_clients_continue_with_a_daemon(store):
    with served(store) as server, connect(store) as queues:
        queues.create("orders")
        queues.push("orders", b"x")
        claim = queues.pull("orders", visibility_timeout=600)
        assert claim is not None
        assert server.stop() == 0
        # A plain push can be repeated, because the server says that it was not done.
        queues.push("orders", b"y")
        assert queues.delete(claim) is True
        assert running_pid(store) not in (None, server.process.pid)


def test_after_a_kill_the_next_client_starts_a_daemon_and_finds_everything(store):
    with served(store) as server:
        client = server.client()
        url = client.create_queue(QueueName="orders")["QueueUrl"]
        for number in range(50):
            client.send_message(QueueUrl=url, MessageBody=str(number))
        (claimed,) = client.receive_message(QueueUrl=url, VisibilityTimeout=600)["Messages"]
        client.close()
        server.stop(signal.SIGKILL)
    with connect(store) as queues:
        assert running_pid(store) not in (None, server.process.pid)
        stats = queues.stats("orders")
        assert (stats.visible, stats.in_flight) == (49, 1)
        bodies = {claim.body for claim in queues.pull_many("orders", 100)}
        assert bodies == {b"%d" % number for number in range(50)} - {claimed["Body"].encode()}


def test_with_embedded_in_its_url_serve_opens_no_socket(store):
    with serve("--store", f"file:{store}?embedded=1"):
        assert not (store / "daemon").exists()
        assert connect_socket(store) is None


# A daemon that runs already.


def test_serve_replaces_a_daemon_and_no_claim_or_wait_is_lost(store):
    with connect(store) as queues:
        queues.create("orders")
        queues.push("orders", b"x")
        claim = queues.pull("orders", visibility_timeout=600)
        assert claim is not None
        daemon = running_pid(store)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(queues.pull, "orders", wait=60)
            until(lambda: queues.stats("orders").waiting_pulls == 1)
            with served(store) as server:
                assert running_pid(store) == server.process.pid != daemon
                until(lambda: queues.stats("orders").waiting_pulls == 1)
                client = server.client()
                url = client.get_queue_url(QueueName="orders")["QueueUrl"]
                client.send_message(QueueUrl=url, MessageBody="y")
                served_claim = waiting.result(TIMEOUT_S)
                assert served_claim is not None
                assert served_claim.body == b"y"
                assert queues.delete(claim) is True
                client.close()


PRODUCER = """
import sys, penstock
store, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with penstock.connect(f"file:{store}?durability=os") as queues:
    for number in range(count):
        queues.push("orders", f"{name}/{number}")
print("done")
"""


def test_plain_pushes_are_neither_lost_nor_doubled_when_the_holder_changes(store):
    with connect(store) as queues:
        queues.create("orders")
        producers = [
            subprocess.Popen(
                [sys.executable, "-c", PRODUCER, store, str(number), "400"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        try:
            for _ in range(3):
                with served(store) as server:
                    pushed = queues.stats("orders").messages
                    until(
                        lambda pushed=pushed: (
                            queues.stats("orders").messages > pushed
                            or all(each.poll() is not None for each in producers)
                        )
                    )
                    assert server.stop() == 0
            for each in producers:
                assert each.communicate(timeout=TIMEOUT_S)[0] == "done\n"
        finally:
            for each in producers:
                each.kill()
                each.communicate()
        bodies = [claim.body for claim in queues.pull_many("orders", 1_000)]
        assert sorted(bodies) == sorted(
            f"{name}/{number}".encode() for name in range(2) for number in range(400)
        )


def test_a_serve_whose_port_is_taken_does_not_stop_the_daemon(store, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, connect(store) as queues:
        port = str(taken.getsockname()[1])
        queues.create("orders")
        daemon = running_pid(store)
        done = penstock_command("serve", "--data", store, "--port", port)
        assert done.returncode == 7
        assert running_pid(store) == daemon
        assert penstock_command("serve", "--data", tmp_path / "new", "--port", port).returncode == 7
        assert not (tmp_path / "new").exists()


def test_a_daemon_that_was_started_by_hand_is_not_replaced(store):
    daemon = DaemonProcess(store, "--durability", "os")
    try:
        done = penstock_command("serve", "--data", store, "--port", "0")
        assert done.returncode == 8
        assert f"process {daemon.process.pid} (penstock daemon run) holds it already" in done.stderr
        # It can be used through the daemon, as one of its clients.
        with serve("--store", f"file:{store}?daemon=1") as server:
            client = server.client()
            client.create_queue(QueueName="orders")
            client.close()
            with connect(store) as queues:
                assert queues.list() == ["orders"]
        assert daemon.process.poll() is None
    finally:
        assert daemon.stop() == ""


# Several processes at once.


def test_the_error_of_a_second_serve_names_the_process_that_holds_the_store(store):
    with served(store) as server:
        done = penstock_command("serve", "--data", store, "--port", "0")
        assert (done.returncode, done.stdout) == (8, "")
        assert done.stderr == (
            f"penstock: {store}: process {server.process.pid} (penstock serve at {server.url}) "
            f"holds it already; use it there or as file:{store}, or end it with: penstock daemon "
            f"stop {store}\n"
        )
        with connect(store) as queues:
            assert queues.list() == []


STARTER = """
import sys, penstock
with penstock.connect(f"file:{sys.argv[1]}?durability=os") as queues:
    queues.create("orders")
    queues.push("orders", sys.argv[2])
print("done")
"""


@pytest.mark.parametrize("round", range(3))
def test_of_five_processes_at_once_one_serve_holds_the_store_and_every_push_arrives(store, round):
    serves = [
        subprocess.Popen(
            [PENSTOCK, "serve", "--data", str(store), "--port", "0"],
            env={**clean_environment(), **QUICK},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(2)
    ]
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, str(store), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(3)
    ]
    try:
        for each in clients:
            assert each.communicate(timeout=TIMEOUT_S)[0] == "done\n"
        until(lambda: any(each.poll() is not None for each in serves))
        loser, winner = sorted(serves, key=lambda each: each.poll() is None)
        output = loser.communicate(timeout=TIMEOUT_S)[0].decode()
        assert loser.returncode == 8, output
        assert f"process {winner.pid} (penstock serve" in output
        assert output.count("\n") == 1
        read_until_started(winner)
        assert running_pid(store) == winner.pid
        with connect(store) as queues:
            bodies = {claim.body for claim in queues.pull_many("orders", 10)}
        assert bodies == {b"0", b"1", b"2"}
    finally:
        started: list[subprocess.Popen[Any]] = [*serves, *clients]
        for process in started:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=TIMEOUT_S)


# Status, stop, health and metrics.


def test_status_and_stop_name_the_serve_that_holds_the_store(store):
    with served(store) as server:
        shown = result_of("daemon", "status", store)
        assert f"holds the store as process {server.process.pid}, at {server.url}" in shown
        status = json.loads(result_of("--json", "daemon", "status", store))
        assert (status["holder"], status["endpoint"]) == ("serve", server.url)
        stopped = result_of("daemon", "stop", store)
        assert stopped == f"stopped penstock serve of {store}, process {server.process.pid}\n"
        assert server.process.wait(TIMEOUT_S) == 0


def test_serve_does_not_end_when_its_socket_is_idle(store):
    with served(store) as server:
        connect(store, "&idle=1").close()
        threading.Event().wait(2.5)
        assert running_pid(store) == server.process.pid


def get(url, **headers):
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_daemon_serves_health_and_metrics_with_the_option(store):
    daemon = DaemonProcess(store, "--http", "0")
    try:
        port = int((store / "daemon" / "http").read_text())
        with penstock.connect(f"file:{store}") as queues:
            queues.create("orders")
            queues.push("orders", b"x")
            assert get(f"http://127.0.0.1:{port}/health") == (200, '{"status":"ok"}')
            status, figures = get(f"http://127.0.0.1:{port}/metrics")
            assert status == 200
            assert 'penstock_messages{queue="orders",state="visible"} 1.0' in figures
            assert 'penstock_commands_total{command="Push",result="ok"} 1.0' in figures
            with pytest.raises(penstock.QueueNotFound):
                queues.push("none", b"x")
            assert queues.pull("orders", wait=1) is not None
            assert queues.pull("orders", wait=0.01) is None
            figures = get(f"http://127.0.0.1:{port}/metrics")[1]
            assert 'penstock_commands_total{command="Push",result="QueueNotFound"} 1.0' in figures
            assert 'penstock_commands_total{command="Pull",result="ok"} 2.0' in figures
            assert get(f"http://127.0.0.1:{port}/orders")[0] == 404
            assert get(f"http://127.0.0.1:{port}/metrics", Origin="http://a.test")[0] == 403
    finally:
        assert without_event_lines(daemon.stop()) == ""
    assert daemon.process.returncode == 0


DAEMON_WITH_A_FAULT = """
import asyncio
import sys
from penstock.server import daemon
from penstock.service import Peek

def open_engine(arguments):
    engine = daemon.open_store(arguments)
    engine._handlers[Peek] = lambda command, now_ms: {reply}
    return engine

sys.exit(daemon.main(sys.argv[1:], open_engine))
"""


def fault_report(store, reply, ask):
    """What a daemon prints that replies so to a peek, after `ask` made one and it was counted."""
    program = DAEMON_WITH_A_FAULT.replace("{reply}", reply)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(store), "--idle", "0", "--http", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_listener(store)
        until((store / "daemon" / "http").exists)
        port = int((store / "daemon" / "http").read_text())
        ask(store)
        assert "\npenstock_faults_total 1.0\n" in get(f"http://127.0.0.1:{port}/metrics")[1]
    finally:
        process.terminate()
        reported = process.communicate(timeout=TIMEOUT_S)[1]
    assert reported.startswith("penstock: fault in ")
    assert reported.count("\n") == 1
    return reported


def test_a_daemon_counts_a_fault_of_the_frame_server_in_its_figures(store):
    # A reply of a type that no frame can hold.
    fault_report(store, "object()", send_one_peek)


def test_a_daemon_counts_and_prints_a_fault_in_a_callback_of_its_event_loop(store):
    """Row 19."""

    def peek(store):
        with penstock.connect(f"file:{store}") as queues:
            assert queues.peek("orders") == []

    callback = "asyncio.get_running_loop().call_soon(lambda _: 1 / 0, 'a secret')"
    reported = fault_report(store, f"{callback} and []", peek)
    assert ": ZeroDivisionError at " in reported
    assert "secret" not in reported


def test_a_daemon_refuses_to_serve_metrics_to_the_network_without_the_option(store):
    done = penstock_command("daemon", "run", store, "--http", "0.0.0.0:0")
    assert done.returncode == 3
    assert "can be reached from other machines" in done.stderr
    assert not store.exists()


# Which store `serve` opens.


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--url", "file:{}"], {}),
        (["--store", "file:{}"], {"PENSTOCK_URL": "memory:"}),
        ([], {"PENSTOCK_URL": "file:{}"}),
        ([], {"PENSTOCK_DATA": "{}", "PENSTOCK_URL": "file:{}"}),
    ],
)
def test_serve_opens_the_given_store_and_prints_it_in_json(store, tmp_path, words, environment):
    process = subprocess.Popen(
        [PENSTOCK, "serve", "--port", "0", "--json", *(word.format(store) for word in words)],
        env={
            **clean_environment(),
            **{name: value.format(store) for name, value in environment.items()},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        shown = json.loads(process.stdout.readline())
        assert shown == {
            "url": shown["url"],
            "store": f"file:{store}",
            "pid": process.pid,
            "socket": str(socket_path(store)),
            "carrot": None,
        }
        assert get(f"{shown['url']}/health")[0] == 200
        assert (store / "store").exists()
        assert not (tmp_path / "penstock-data").exists()
        status = daemon_status(store)
        assert status is not None
        assert status["pid"] == process.pid
    finally:
        process.terminate()
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert (out, without_event_lines(err)) == ("", "")


def test_two_stores_in_the_environment_are_refused(store):
    done = penstock_command("serve", PENSTOCK_DATA=str(store), PENSTOCK_URL="memory:")
    assert done.returncode == 3
    assert "PENSTOCK_URL is 'memory:' and PENSTOCK_DATA means 'file:" in done.stderr
    assert not store.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--url", "file:x", "--data", "y"],
        ["--url", "file:x", "--store", "memory:"],
        ["--data", "x", "--store", "memory:"],
    ],
)
def test_a_store_that_is_named_twice_is_refused(words, tmp_path):
    done = penstock_command("serve", *words)
    assert done.returncode == 2
    assert "each say where the store is; give one of them" in done.stderr


@pytest.mark.root
def test_root_serves_the_directory_of_another_user_only_with_the_option(store):
    store.mkdir()
    os.chown(store, 65_534, 65_534)
    done = penstock_command("serve", "--data", store, "--port", "0")
    assert done.returncode == 6
    assert "belongs to user 65534" in done.stderr
    assert list(store.iterdir()) == []
    with served(store, "--insecure-other-owner") as server:
        assert running_pid(store) == server.process.pid


# Files in the store that would never end.


def pipe_at(path):
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def refusal(*words):
    """The one line of a command that fails with the status of a store that cannot be used."""
    done = penstock_command(*words)
    assert done.returncode == 6, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_named_pipe_in_place_of_the_region_is_refused_at_once(store):
    """Row 23."""
    store.mkdir()
    with penstock.connect(f"file:{store}?embedded=1&durability=os"):
        pass
    pipe_at(store / "sqs")
    assert "sqs is a named pipe, not a regular file" in refusal("serve", "--data", store)
    (store / "sqs").unlink()
    (store / "sqs").symlink_to("/dev/zero")
    assert "sqs is a symbolic link, not a regular file" in refusal("serve", "--data", store)
    (store / "sqs").unlink()
    with (store / "sqs").open("wb") as file:
        file.truncate(1 << 40)
    assert "sqs is larger than 4096 bytes" in refusal("serve", "--data", store)


def test_a_named_pipe_in_place_of_a_file_of_the_daemon_is_refused_at_once(store):
    """Row 23."""
    with penstock.connect(f"file:{store}?embedded=1&durability=os"):
        pass
    pointer, pid = store / "daemon" / "elsewhere", store / "daemon" / "pid"
    pipe_at(pointer)
    listed = ("--url", f"file:{store}", "list")
    assert "elsewhere is a named pipe, not a regular file" in refusal(*listed)
    pointer.unlink()
    pointer.write_bytes(b"\xff\0" * 5_000)
    assert "elsewhere is larger than 4096 bytes" in refusal(*listed)
    # A path at which no socket can be: no process answers for the store.
    pointer.write_bytes(b"/\xff\0")
    assert penstock_command(*listed).returncode == 0
    pointer.unlink()
    pipe_at(pid)
    for command in ("status", "stop"):
        shown = refusal("daemon", command, store)
        assert "pid is a named pipe, not a regular file" in shown
    pid.unlink()


# Text that is no text.


@pytest.mark.parametrize("host", ["a" * 64, "a..b", os.fsdecode(b"\xff"), "\u0131" * 64])
def test_a_host_that_cannot_be_a_name_is_one_sentence(store, host):
    """Row 19."""
    open_to_all = ("--insecure-without-keys", "--insecure-without-tls")
    served = ("serve", "--store", "memory:", "--port", "0", "--host", host, *open_to_all)
    insecure = "--insecure-open-to-the-network"
    listening = ("daemon", "run", store, "--listen", f"{host}:0", insecure)
    pages = ("daemon", "run", store, "--http", f"{host}:0", insecure)
    for words in (served, listening, pages):
        done = penstock_command(*words)
        assert done.returncode == 3, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert "Traceback" not in done.stderr


def test_a_path_that_is_not_utf_8_is_shown_in_json(tmp_path):
    """Row 19."""
    store = str(tmp_path / os.fsdecode(b"\xff"))
    shown = json.loads(penstock_command("--json", "daemon", "status", store).stdout)
    assert shown == {"path": store, "running": False}
    process = subprocess.Popen(
        [PENSTOCK, "serve", "--port", "0", "--json", "--data", store],
        env={**clean_environment(), **QUICK},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["store"] == f"file:{store}"
        shown = json.loads(penstock_command("--json", "daemon", "status", store).stdout)
        assert (shown["path"], shown["pid"]) == (store, process.pid)
    finally:
        process.terminate()
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert (out, without_event_lines(err)) == ("", "")
