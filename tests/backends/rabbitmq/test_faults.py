"""RabbitMQ killed, stopped or stalled under load, and processes that end with claims."""

import asyncio
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock
import penstock.aio
from penstock.backends.rabbitmq import registry
from penstock.errors import BackendLost, QueueNotFound, StaleReceipt, UnavailableError
from tests.conftest import FULL
from tests.rabbit import PAUSE, shared_broker
from tests.server.conftest import until

pytestmark = pytest.mark.service("rabbitmq-server")
TIMEOUT_S = 90
own_broker = pytest.mark.skipif(
    not FULL, reason="with FULL=1: a broker of its own takes its time to start"
)
PRODUCERS = 3
CONSUMERS = 3
BEFORE, AFTER = (1_000, 1_000) if FULL else (150, 150)
# Between two pushes of a producer: what is proven does not depend on how busy the machine is.
PAUSE_S = 0.0 if FULL else 0.02
HOLDER = """
import os, sys, penstock
queues = penstock.connect(sys.argv[1])
claim = queues.pull(sys.argv[2], wait=30)
print(claim.receives, flush=True)
os.kill(os.getpid(), 9)
"""


class RabbitLoad:
    """Producers and consumers that continue after errors, and a ledger of the answers."""

    def __init__(self, queues, queue):
        self.queue = queue
        self._began_s = time.monotonic()
        self.pushed = []
        self.received = set()
        self.errors = []
        self.faults = []
        self._ended = threading.Event()
        self._drained = threading.Event()
        self._queues = queues
        self._threads = [
            threading.Thread(target=target, args=(number,), daemon=True)
            for target, count in ((self._produce, PRODUCERS), (self._consume, CONSUMERS))
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def age_s(self):
        return time.monotonic() - self._began_s

    def _run(self, ended, step):
        while not ended.is_set():
            try:
                step()
            except UnavailableError as error:
                self.errors.append(error)
                PAUSE.wait(0.02)
            except StaleReceipt as error:
                # Of a claim that ended with the connection.
                self.errors.append(error)
            except BaseException as fault:
                self.faults.append(fault)
                return

    def _produce(self, number):
        def step():
            body = f"{number}/{len(self.pushed)}/{secrets.token_hex(4)}"
            self.pushed.append((self._queues.push(self.queue, body).id, body))
            PAUSE.wait(PAUSE_S)

        self._run(self._ended, step)

    def _consume(self, number):
        def step():
            for claim in self._queues.pull_many(self.queue, 5, wait=0.5):
                self.received.add((claim.id, claim.body.decode()))
                self._queues.delete(claim)

        self._run(self._drained, step)

    def finish(self):
        """Ends the producers, and the consumers once they have seen everything."""
        self._ended.set()
        until(lambda: set(self.pushed) <= self.received or self.faults, TIMEOUT_S)
        self._drained.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a call did not end"
        self._queues.close()


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("how", "kind"),
    [(signal.SIGKILL, "classic")]
    + [(signal.SIGTERM, "classic"), (signal.SIGKILL, "quorum")] * FULL,
)
def test_a_broker_ended_and_started_under_load_loses_no_answered_push(
    rabbit, name, how, kind, connect
):
    """Row 12: every answered push arrives; in between there are typed errors; all recovers."""
    options = f"?queues={kind}&timeout=10"
    with connect(options) as queues:
        queues.create(name, visibility_timeout=30)
    load = RabbitLoad(connect(options), name)
    until(lambda: len(load.pushed) >= BEFORE or load.faults, TIMEOUT_S)
    # Streams and quorum queues of this version do not survive a kill in their first second.
    until(lambda: load.age_s() > 3)
    rabbit.stop(how)
    until(lambda: any(isinstance(error, BackendLost) for error in list(load.errors)))
    at_restart = len(load.pushed)
    rabbit.start()
    until(lambda: len(load.pushed) >= at_restart + AFTER or load.faults, TIMEOUT_S)
    load.finish()
    assert load.faults == []
    assert len(load.pushed) >= BEFORE + AFTER
    lost = set(load.pushed) - load.received
    assert not lost, f"{len(lost)} of {len(load.pushed)} answered pushes were lost"
    assert all(str(rabbit.port) in str(e) for e in load.errors if isinstance(e, BackendLost))
    with connect(options) as queues:
        assert queues.describe(name).settings.visibility_timeout == 30
        queues.remove(name)


@own_broker
def test_a_new_broker_killed_at_once_still_has_the_queues_and_their_messages():
    """Row 12: RabbitMQ saves the name of its first stream, the registry, only a second later."""
    with shared_broker() as broker:
        with penstock.connect(broker.url) as queues:
            queues.create("orders", visibility_timeout=77)
            queues.push("orders", b"first")
        broker.stop(signal.SIGKILL)
        broker.start()
        with penstock.connect(broker.url) as queues:
            assert queues.describe("orders").settings.visibility_timeout == 77
            assert [claim.body for claim in queues.pull_many("orders", 1)] == [b"first"]


@own_broker
def test_a_registry_that_rabbitmq_lost_is_removed_by_the_documented_command(monkeypatch):
    """Row 12: the queues are created again, and their messages are still there."""
    monkeypatch.setattr(registry, "_REGISTERED_S", 0)
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "rabbitmq.md").read_text()
    (command,) = re.findall(r"^rabbitmqctl (eval .*)$", page, re.MULTILINE)
    with shared_broker() as broker:
        with penstock.connect(broker.url) as queues:
            queues.create("orders")
            queues.push("orders", b"first")
        broker.stop(signal.SIGKILL)
        broker.start()
        with pytest.raises(BackendLost, match="penstock/registry cannot be read"):
            penstock.connect(f"{broker.url}?timeout=10")
        broker.control(*shlex.split(command))
        with penstock.connect(broker.url) as queues:
            queues.create("orders")
            assert [claim.body for claim in queues.pull_many("orders", 1)] == [b"first"]


def test_a_broker_that_stalls_gives_errors_in_time_and_is_used_again_afterwards(
    rabbit, name, connect
):
    """Row 12: no call hangs past the timeout while the broker is stopped by a signal."""
    # A busy broker may take longer than a second also if it is not stopped.
    with connect("?timeout=3") as queues, ThreadPoolExecutor(8) as pool:
        queues.create(name, visibility_timeout=300)
        queues.push_many(name, ["held", "doomed", "ready"])
        held, doomed = queues.pull_many(name, 2)
        rabbit.send(signal.SIGSTOP)
        try:
            uses: list[Any] = [
                pool.submit(queues.push, name, "lost"),
                pool.submit(queues.pull, name),
                pool.submit(queues.delete, doomed),
                pool.submit(queues.stats, name),
            ]
            for use in uses:
                with pytest.raises(BackendLost, match=str(rabbit.port)):
                    use.result(TIMEOUT_S)
            # The connection was given up, and there is no other.
            with pytest.raises(BackendLost):
                queues.push(name, "lost")
        finally:
            rabbit.send(signal.SIGCONT)
        until(lambda: tried(queues.push, name, "after"))
        with pytest.raises(StaleReceipt):
            queues.extend(held, 60)
        bodies: set[bytes] = set()

        def are_all_back():
            bodies.update(claim.body for claim in queues.pull_many(name, 9))
            return {b"held", b"ready", b"after"} <= bodies

        until(are_all_back)
        # Whether a request without an answer took effect is not known.
        assert bodies - {b"lost", b"doomed"} == {b"held", b"ready", b"after"}


def tried(use, *arguments):
    try:
        use(*arguments)
    except BackendLost:
        return False
    return True


def held_by_a_process_that_is_killed(url, queue):
    """Has a message pulled by a process that is killed; returns how often it was pulled."""
    ended = subprocess.run(
        [sys.executable, "-c", HOLDER, url, queue],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return int(ended.stdout)


def test_a_message_of_a_killed_process_is_visible_at_once_and_its_pulls_are_counted(
    rabbit, name, connect
):
    options = "?queues=quorum"
    with connect(options) as queues:
        queues.create(name, visibility_timeout=600, dead_letter=f"{name}-dead", max_receives=2)
        message_id = queues.push(name, "poison").id
        assert held_by_a_process_that_is_killed(rabbit.url + options, name) == 1
        claim = queues.pull(name, wait=30)
        assert (claim.id, claim.receives) == (message_id, 2)
        queues.release(claim)
        dead = queues.pull(f"{name}-dead", wait=30)
        assert (dead.id, dead.source, dead.receives) == (message_id, name, 1)


def test_a_classic_queue_knows_after_a_crash_that_its_message_was_pulled(rabbit, name, connect):
    with connect() as queues:
        queues.create(name, visibility_timeout=600, dead_letter=f"{name}-dead", max_receives=1)
        message_id = queues.push(name, "poison").id
        assert held_by_a_process_that_is_killed(rabbit.url, name) == 1
        until(lambda: queues.pull(name) is None and queues.stats(f"{name}-dead").visible)
        dead = queues.pull(f"{name}-dead")
        assert (dead.id, dead.receives) == (message_id, 1)


def test_channels_that_the_broker_closes_do_not_end_the_connection(rabbit, name):
    """Row 26: a channel is opened while the broker closes another, for a queue that is missing."""

    async def run():
        queues = await penstock.aio.connect(rabbit.url)
        names = [f"{name}-{number}" for number in range(30)]
        for each in names:
            await queues.create(each)
        service: Any = queues.service

        async def describe_missing():
            with pytest.raises(QueueNotFound):
                await queues.describe(f"{name}-missing")

        async def pull_on_a_new_channel(each):
            assert await queues.pull(each) is None
            await service._lines[each].close_channel()

        for _ in range(20):
            await asyncio.gather(
                *(
                    work
                    for each in names
                    for work in (describe_missing(), pull_on_a_new_channel(each))
                )
            )
        for each in names:
            await queues.remove(each)
        await queues.close()

    asyncio.run(run())
