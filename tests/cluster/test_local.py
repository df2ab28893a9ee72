"""A local cluster as people use it: workers and Carrot on it, a node stopped meanwhile, its end.

One node is stopped before the first of these tests and resumed by the last but one, 30 s later:
the others run in between, on the two nodes that are left.
"""

import asyncio
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import carrot
from penstock.cluster import calls
from penstock.cluster.jetstream import open_client
from penstock.cluster.placement import first_shard
from penstock.service import Peek, Pull, Push, Stats
from tests.cluster.processes import TIMEOUT_S
from tests.measure import SLACK
from tests.server.sqs.conftest import serve
from tests.tasks.conftest import Shop

STOPPED_S = 30
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
            for token, data in calls.unpack(message.data):
                if data[:1] != calls.IN_PROGRESS:
                    self.replies.setdefault(token, data[:1])
                    if len(self.replies) == len(self.commands):
                        answered.set()

        inbox = client.new_inbox()
        await client.subscribe(inbox + calls.REPLIES, cb=take)
        self.cluster.signal(shard.owner, signal.SIGSTOP)
        self.stopped_s = time.monotonic()
        sender = calls.Sender(client, inbox)
        for token, command in enumerate(self.commands):
            (message,) = calls.write_command(command)
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
        assert set(stopped.replies.values()) <= {calls.NOT_OWNER, calls.LOST}
        assert len(stopped.replies) == len(stopped.commands)
        bodies = {claim.body for claim in queues.pull_many(QUEUE, 10)}
        assert bodies == {b"before", b"after"}


def test_a_cluster_that_is_taken_down_leaves_no_process(local_cluster):
    """It comes last in this file."""
    pids = [*(node["pid"] for node in local_cluster.nodes.values()), *local_cluster.nats]
    assert len(pids) == 6
    assert local_cluster.down() == 6
    left = [pid for pid in pids if is_running(pid)]
    assert left == []


def is_running(pid):
    """Whether a process runs; of one that has ended, its parent may not have asked yet."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"
