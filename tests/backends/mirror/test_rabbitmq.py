"""A store mirrored to RabbitMQ, seen there by a plain AMQP client."""

import asyncio
import json
import secrets
import signal
import subprocess
from typing import Any

import aiormq
import pytest

import penstock
from tests.conftest import FULL
from tests.server.conftest import end_daemon, until
from tests.server.sqs.conftest import PENSTOCK, clean_environment

pytestmark = pytest.mark.service("rabbitmq-server")
connect: Any = penstock.connect
TIMEOUT_S = 90


@pytest.fixture
def store(quick_path):
    yield quick_path / "store"
    end_daemon(quick_path / "store")


@pytest.fixture
def name():
    """A name no other test uses."""
    return f"m-{secrets.token_hex(6)}"


def take_all(rabbit, queue):
    """Every message of a queue as a plain AMQP client gets them: the body and the headers."""

    async def run():
        connection = await aiormq.connect(rabbit.url)
        try:
            channel = await connection.channel()
            found: list[tuple[bytes, Any]] = []
            while True:
                message: Any = await channel.basic_get(queue, no_ack=True)
                if message.delivery.name == "Basic.GetEmpty":
                    return found
                found.append((bytes(message.body), message.header.properties.headers or {}))
        finally:
            await connection.close()

    return asyncio.run(run())


def queue_exists(rabbit, queue):
    async def run():
        connection = await aiormq.connect(rabbit.url)
        try:
            await (await connection.channel()).queue_declare(queue, passive=True)
        except aiormq.exceptions.ChannelNotFoundEntity:
            return False
        else:
            return True
        finally:
            await connection.close()

    return asyncio.run(run())


def has_caught_up(queues):
    progress = queues.service.mirror.progress
    return progress is not None and progress.behind_bytes == 0


def until_mirrored(queues, rabbit, new):
    """Waits until all commands so far are mirrored, by creating a queue.

    What the mirror says of itself may be older than the last commands; a new queue is not.
    """
    queues.create(new)
    until(lambda: queue_exists(rabbit, new), TIMEOUT_S)


def test_an_amqp_client_sees_what_the_store_has(rabbit, store, name):
    url = f"mirror:?primary=file:{store}&mirror={rabbit.url}"
    with connect(url) as queues:
        queues.create(name)
        queues.push(name, b"first", attributes={"kind": "test"})
        queues.push_many(name, [b"%d" % i for i in range(20)])
        claims = queues.pull_many(name, 6)
        for claim in claims[:4]:
            queues.delete(claim)
        queues.release(claims[4])
        queues.push(name, b"last")
        queues.delete(queues.pull(name))
        # The claim that is still held is hidden on the mirror, too.
        expected = [each.body for each in queues.peek(name, 100)]
        until_mirrored(queues, rabbit, f"{name}-end")
        with connect(rabbit.url) as mirrored:
            until(lambda: mirrored.stats(name).visible == len(expected))
        found = take_all(rabbit, name)
        assert [body for body, _ in found] == expected
        assert len(expected) == 16
        queues.remove(name)
        until(lambda: not queue_exists(rabbit, name))
        assert queues.service.mirror.failure is None


def test_what_only_time_causes_reaches_rabbitmq_from_a_store_that_nobody_uses(rabbit, store, name):
    with connect(f"mirror:?primary=file:{store}&mirror={rabbit.url}") as queues:
        queues.create(name, visibility_timeout=1, dead_letter=f"{name}-dead", max_receives=2)
        queues.push_many(name, [b"dead", b"back"])
        queues.release(queues.pull(name))
        assert queues.pull(name).body == b"dead"
        assert queues.pull(name).body == b"back"
        queues.push(name, b"short", ttl=1)
        until(lambda: queue_exists(rabbit, name), TIMEOUT_S)
        with connect(rabbit.url) as mirrored:

            def has_all():
                live, dead = mirrored.stats(name), mirrored.stats(f"{name}-dead")
                return (live.visible, live.in_flight, dead.visible) == (1, 0, 1)

            until(has_all, TIMEOUT_S)
        until(lambda: has_caught_up(queues))
        assert queues.service.mirror.failure is None
    assert [body for body, _ in take_all(rabbit, name)] == [b"back"]
    assert [body for body, _ in take_all(rabbit, f"{name}-dead")] == [b"dead"]


def test_a_message_keeps_its_attributes_as_headers(rabbit, store, name):
    with connect(f"mirror:?primary=file:{store}&mirror={rabbit.url}") as queues:
        queues.create(name)
        queues.push(name, b"x", attributes={"kind": "test"}, priority=5, group="eu", dedup_id="7")
        until(lambda: has_caught_up(queues) and queues.service.mirror.progress.pushed == 1)
        assert queues.service.mirror.progress.refused == 0
    ((body, headers),) = take_all(rabbit, name)
    assert body == b"x"
    assert headers["kind"] in ("test", b"test")


@pytest.mark.parametrize("how", [signal.SIGKILL] + [signal.SIGTERM] * FULL)
def test_a_broker_stopped_or_killed_under_load_has_every_message_once(rabbit, store, name, how):
    """Row 12: RabbitMQ is stopped or killed in the middle of a load, and comes back."""
    with connect(f"mirror:?primary=file:{store}&mirror={rabbit.url}") as queues:
        # What is held to the end must not run out while the broker starts again.
        queues.create(name, visibility_timeout=600)
        held = []
        for turn in range(30):
            queues.push_many(name, [b"%d.%d" % (turn, i) for i in range(20)])
            claims = queues.pull_many(name, 6)
            for claim in claims[:5]:
                queues.delete(claim)
            held.append(claims[5])
            if turn == 5:
                until(lambda: has_caught_up(queues))
            if turn == 10:
                rabbit.stop(how)
            if turn == 20:
                rabbit.start()
        for claim in held[:20]:
            queues.delete(claim)
        expected = [each.body for each in queues.peek(name, 1_000)]
        until_mirrored(queues, rabbit, f"{name}-end")
        until(lambda: has_caught_up(queues), TIMEOUT_S)
        until(lambda: queues.service.mirror.progress.error is None)
        with connect(rabbit.url) as mirrored:
            until(lambda: mirrored.stats(name).visible == len(expected), TIMEOUT_S)
        progress = queues.service.mirror.progress
        assert (queues.service.mirror.failure, progress.refused, progress.unmatched) == (None, 0, 0)
        assert [body for body, _ in take_all(rabbit, name)] == expected


def test_the_command_mirrors_to_rabbitmq_and_resumes_after_a_stop(rabbit, store, name):
    command = [PENSTOCK, "mirror", "--from", f"file:{store}", "--to", rabbit.url]

    def run_once():
        done = subprocess.run(
            [*command, "--once", "--json"], capture_output=True, text=True, env=clean_environment()
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    with connect(f"file:{store}") as queues:
        queues.create(name)
        queues.push_many(name, [b"%d" % i for i in range(5)])
        assert run_once()["pushed"] == 5
        queues.delete(queues.pull(name))
        queues.push(name, b"5")
        counts = run_once()
        assert (counts["pushed"], counts["deleted"], counts["behind_bytes"]) == (1, 1, 0)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_environment())
        try:
            queues.push(name, b"6")
            with connect(rabbit.url) as mirrored:
                until(lambda: mirrored.stats(name).visible == 6)
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    assert [body for body, _ in take_all(rabbit, name)] == [b"%d" % i for i in range(1, 7)]
