"""A local cluster as people use it: workers and Carrot on it, a node stopped meanwhile, its end.

One node is stopped before the first of these tests and resumed by the last but one, 30 s later:
the others run in between, on the two nodes that are left.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import carrot
from penstock.cluster.jetstream import open_client
from penstock.cluster.operations import Operator, operate
from penstock.cluster.placement import first_shard
from penstock.cluster.sender import Sender
from penstock.service import Peek, Pull, Push, Stats
from penstock.wire import shard_protocol as protocol
from tests.cluster.processes import TIMEOUT_S, LocalCluster
from tests.conftest import IN_CI
from tests.measure import SLACK
from tests.server.conftest import until
from tests.server.sqs.conftest import serve
from tests.server.test_holder import tree
from tests.tasks.conftest import Shop

STOPPED_S = 30
NOBODY = 65_534
connect: Any = carrot.connect
QUEUE = next(f"held{n}" for n in range(100) if first_shard(f"held{n}", 4) == 0)


class StoppedOwner:
    """The owner of shard 0, which is stopped, and what it answers to those who ask it directly."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.replies = {}
        self.stopped_s = 0.0
        self.owner = ""
        self.resumed = threading.Event()
        self.asked = threading.Event()
        self.commands = [Stats(QUEUE), Peek(QUEUE), Push(QUEUE, b"stale"), Pull(QUEUE, wait_ms=0)]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()), daemon=True)

    def begin(self):
        self._thread.start()
        assert self.asked.wait(TIMEOUT_S)

    async def _ask(self):
        """Asks the owner by its term while it is stopped; reads its answers once it is resumed."""
        shard = (await self.cluster.status()).shards[0]
        self.owner = shard.owner
        client = await open_client(self.cluster.address, "test")
        answered = asyncio.Event()

        async def take(message):
            for token, data in protocol.unpack(message.data):
                if data[:1] != protocol.IN_PROGRESS:
                    self.replies.setdefault(token, data[:1])
                    if len(self.replies) == len(self.commands):
                        answered.set()

        inbox = client.new_inbox()
        await client.subscribe(inbox + protocol.REPLIES, cb=take)
        self.cluster.signal(shard.owner, signal.SIGSTOP)
        self.stopped_s = time.monotonic()
        sender = Sender(client, inbox)
        for token, command in enumerate(self.commands):
            (message,) = protocol.write_command(command)
            sender.send(f"penstock.serve.0.{shard.term}", token, message)
        await sender.drain()
        await client.flush()
        self.asked.set()
        await asyncio.to_thread(self.resumed.wait)
        async with asyncio.timeout(TIMEOUT_S):
            await answered.wait()
        await client.close()

    def resume(self):
        """Resumes the node once it was stopped for long enough, and waits for its answers."""
        time.sleep(max(0, self.stopped_s + STOPPED_S - time.monotonic()))
        assert not self.replies
        self.cluster.signal(self.owner, signal.SIGCONT)
        self.resumed.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def stopped(local_cluster):
    asyncio.run(local_cluster.until_served())
    with penstock.connect(local_cluster.url) as queues:
        queues.create(QUEUE)
        queues.push(QUEUE, b"before")
    stopped = StoppedOwner(local_cluster)
    stopped.begin()
    asyncio.run(local_cluster.until_replaced(0, stopped.owner, 10 * SLACK))
    yield stopped
    if not stopped.resumed.is_set():
        local_cluster.signal(stopped.owner, signal.SIGCONT)
        stopped.resumed.set()


def test_a_worker_runs_the_tasks_of_a_cluster(local_cluster, stopped, tmp_path):
    shop = Shop(tmp_path, local_cluster.url)
    shop.write("""
        @app.task
        def greet(name: str) -> None:
            note(name)
        """)
    shop.app().greet.push_many([(f"guest-{n}",) for n in range(5)])
    code, _, err = shop.run("worker", "shop:app", "--burst", "--processes", "1")
    assert code == 0, err
    assert shop.names() == {f"guest-{n}" for n in range(5)}
    assert "stopped after 5 done, 0 retried, 0 failed" in err


def test_a_node_serves_carrot_beside_sqs(local_cluster, stopped):
    store = f"{local_cluster.url}&node=carrots"
    with serve("--store", store, "--carrot", "0") as server:
        (port,) = re.findall(r"carrot +127\.0\.0\.1:(\d+)", server.output)
        with connect("127.0.0.1", int(port)) as client:
            client.add("carrots")
            client.put("carrots", b"one")
            client.put("carrots", b"two")
            first = client.get("carrots", wait=20)
            assert first.body == b"one"
            first.ack()
            held = client.get("carrots", wait=20)
            assert held.body == b"two"
            held.nack()
        # What one node was given, every client of the cluster finds.
        with penstock.connect(local_cluster.url) as queues:
            claim = queues.pull("carrots", wait=20)
            assert claim is not None
            assert claim.body == b"two"
            assert queues.delete(claim)
            assert queues.stats("carrots").messages == 0
        assert server.stop() == 0


def test_an_owner_that_was_stopped_for_30_s_answers_nothing(local_cluster, stopped):
    """Row 10: what reached it before it was stopped is older than any router waits for it."""
    with penstock.connect(local_cluster.url) as queues:
        queues.push(QUEUE, b"after")
        stopped.resume()
        assert set(stopped.replies.values()) <= {protocol.NOT_OWNER, protocol.LOST}
        assert len(stopped.replies) == len(stopped.commands)
        bodies = {claim.body for claim in queues.pull_many(QUEUE, 10)}
        assert bodies == {b"before", b"after"}


def test_a_cluster_that_is_taken_down_leaves_no_process(local_cluster):
    """It comes last in this file, but for the next one."""
    pids = [*(node["pid"] for node in local_cluster.nodes.values()), *local_cluster.nats]
    assert len(pids) == 6
    assert local_cluster.down() == 6
    left = [pid for pid in pids if is_running(pid)]
    assert left == []


def test_a_cluster_is_not_started_again_with_another_number_of_shards(local_cluster):
    local_cluster.down()
    up = [sys.executable, "-m", "penstock", "cluster", "up", "--port", "0"]
    up += ["--directory", str(local_cluster.root), "--nodes", "1", "--json"]
    done = subprocess.run([*up, "--shards", "8"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 4
    assert re.search(
        r"node1 did not start: shards: .* shards=4, .*; leave shards out.*reshard 8", done.stderr
    )
    assert not (local_cluster.root / "cluster.json").exists()
    done = subprocess.run(up, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    again = LocalCluster(local_cluster.root, json.loads(done.stdout))
    try:
        assert len(asyncio.run(again.status()).shards) == 4
        # What it was created with, or had once, is another number, too.
        asyncio.run(operate(again.address, partial(Operator.reshard, shards=6, moved=print)))
        check_refused(up, "4")
        check_refused(up, "5")
    finally:
        again.down()
    check_refused(up, "5")
    assert not (local_cluster.root / "cluster.json").exists()


def check_refused(up, named):
    """Starts a cluster of six shards with another number of them."""
    done = subprocess.run(
        [*up, "--shards", named], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 3
    assert f"shards: this cluster has shards=6, not {named}; " in done.stderr


def cluster_command(action, root, *more, **options):
    """Runs `penstock cluster ACTION` to its end."""
    command = [sys.executable, "-m", "penstock", "cluster", action, "--directory", str(root)]
    return subprocess.run(
        [*command, *more], capture_output=True, text=True, timeout=TIMEOUT_S, **options
    )


@pytest.fixture
def one_node(tmp_path):
    """A cluster of one node, with its own directory for temporary files."""
    root, temporary = tmp_path / "cluster", tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    options = ("--port", "0", "--nodes", "1", "--shards", "1", "--json")
    done = cluster_command("up", root, *options, env=environment)
    assert done.returncode == 0, done.stderr
    yield root, json.loads(done.stdout), environment
    cluster_command("down", root)


def test_up_starts_again_what_has_ended_and_down_says_that_the_data_stays(one_node, tmp_path):
    root, state, environment = one_node
    with penstock.connect(state["url"]) as queues:
        queues.create("orders")
        queues.push("orders", b"kept")
    (left,) = (tmp_path / "tmp").glob("penstock-copies-*")
    for process in (state["nodes"][0], state["nats"][2]):
        os.kill(process["pid"], signal.SIGKILL)
    while is_running(state["nodes"][0]["pid"]):
        pass
    # Until the other NATS servers have noticed, nothing answers.
    until(lambda: cluster_command("status", root, "--json").returncode == 0)
    # Without a directory, of the cluster that the variable names.
    command = [sys.executable, "-m", "penstock", "cluster", "status", "--json"]
    named = os.environ | {"PENSTOCK_URL": state["url"]}
    status = json.loads(subprocess.check_output(command, env=named, cwd=tmp_path))
    assert [(node["state"], node["is_live"]) for node in status["nodes"]] == [("down", False)]
    again = cluster_command("up", root, "--json", env=environment)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["started"] == ["NATS server 3", "node1"]
    assert found["url"] == state["url"]
    assert [each["endpoint"] for each in found["nodes"]] == [
        each["endpoint"] for each in state["nodes"]
    ]
    with penstock.connect(state["url"]) as queues:
        assert [each.body for each in queues.peek("orders")] == [b"kept"]
    # What the killed node had among its temporary files is removed by the new one.
    (copies,) = (tmp_path / "tmp").glob("penstock-copies-*")
    assert copies != left
    refused = cluster_command("up", root)
    assert refused.returncode == 8
    assert "already running" in refused.stderr
    down = cluster_command("down", root)
    assert f"4 processes were stopped; the data stays in {root}" in down.stdout
    assert f"penstock cluster up --directory {root} continues with it" in down.stdout
    stopped = cluster_command("status", root)
    assert stopped.returncode == 3
    assert "was taken down; penstock cluster up starts it again, with its data" in stopped.stderr


def test_a_state_file_that_is_damaged_is_refused(tmp_path):
    deep = b'{"x":' + b"[" * 4_000
    for content in (
        b"",
        b"{}",
        b'{"url": 1}',
        b'{"url": "", "nats": [{"pid": 1}], "nodes": []}',
        deep,
    ):
        (tmp_path / "cluster.json").write_bytes(content)
        for action in ("down", "up", "url", "status"):
            done = cluster_command(action, tmp_path)
            assert done.returncode == 6
            assert done.stderr.count("\n") == 1
            assert "cluster.json: cannot be read" in done.stderr
        assert (tmp_path / "cluster.json").read_bytes() == content


def running_child():
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


@pytest.mark.parametrize("began", [None, "1", "right"])
def test_down_ends_no_process_that_up_has_not_started(tmp_path, began):
    with running_child() as child:
        ticks = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        process = {"pid": child.pid, "began": ticks if began == "right" else began}
        state = {"url": "cluster:nats://127.0.0.1:1", "nats": [process], "nodes": []}
        (tmp_path / "cluster.json").write_text(json.dumps(state))
        done = cluster_command("down", tmp_path)
        if began == "right":
            # The file is this user's own, and says so.
            assert "1 processes" in done.stdout
            assert child.wait(TIMEOUT_S) == -signal.SIGTERM
        else:
            assert "0 processes" in done.stdout
            assert child.poll() is None
        child.kill()


@pytest.fixture
def prepared(tmp_path):
    """A directory that another user has prepared."""
    if os.geteuid() != 0:
        (pytest.fail if IN_CI else pytest.skip)("only root gives files to another user")
    root = tmp_path / "cluster"
    (root / "nats").mkdir(parents=True)
    return root


def give_away(path):
    for each in (path, *path.rglob("*")):
        os.chown(each, NOBODY, NOBODY, follow_symlinks=False)


@pytest.mark.root
def test_root_uses_no_directory_of_another_user(prepared):
    """Row 28: its cluster.json could name any process, and its files be links to any others."""
    with running_child() as child:
        ticks = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        process = {"pid": child.pid, "began": ticks}
        state = {"url": "cluster:nats://127.0.0.1:1", "nats": [process], "nodes": []}
        (prepared / "cluster.json").write_text(json.dumps(state))
        give_away(prepared)
        before = tree(prepared)
        for action in ("up", "down", "url", "status"):
            done = cluster_command(action, prepared)
            assert done.returncode == 6
            assert "belongs to user 65534" in done.stderr
            assert done.stderr.count("\n") == 1
        assert child.poll() is None
        assert tree(prepared) == before
        child.kill()


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cluster.json", "link"),
        ("node1.out", "link"),
        ("nats/1.conf", "file"),
        ("nats/1.out", "hard link"),
        ("nats", "link"),
        ("nats/2", "pipe"),
    ],
)
def test_up_writes_to_nothing_in_its_directory_that_another_user_prepared(prepared, name, kind):
    """Row 28: only one file is another user's, in a directory that was open to all."""
    precious = prepared.parent / "precious"
    precious.write_text("precious")
    path = prepared / name
    if path.is_dir():
        path.rmdir()
    if kind == "link":
        path.symlink_to(precious)
    elif kind == "hard link":
        os.link(precious, path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch(0o666)
    if kind != "hard link":
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    readable = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind in ("file", "pipe") else None
    done = cluster_command("up", prepared, "--nodes", "1", "--shards", "1", "--port", "0")
    try:
        assert precious.read_text() == "precious"
        if done.returncode == 0:
            # It was replaced by a file of its own, which the other user cannot read.
            assert name in ("cluster.json", "nats/1.conf")
            assert not path.is_symlink()
            assert path.stat().st_uid == os.geteuid()
            assert path.stat().st_mode & 0o077 == 0
            if readable is not None and kind == "file":
                assert os.read(readable, 10) == b""
        else:
            assert done.returncode == 6
            assert done.stderr.count("\n") == 1
            assert "Traceback" not in done.stderr
    finally:
        cluster_command("down", prepared)
        if readable is not None:
            os.close(readable)
    assert precious.read_text() == "precious"


def is_running(pid):
    """Whether a process runs; of one that has ended, its parent may not have asked yet."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"
