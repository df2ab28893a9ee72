"""The RabbitMQ adapter beyond the contract: several connections, other clients of the broker."""

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiormq
import pytest
from pamqp.commands import Basic

import penstock
import penstock.aio
from penstock.backends.rabbitmq import content, delays, lacks, registry
from penstock.backends.rabbitmq.registry import RabbitQueue
from penstock.errors import (
    EngineClosed,
    InvalidReceipt,
    MessageTooLarge,
    QueueDeleted,
    QueueExists,
    QueueInUse,
    QueueNotFound,
)
from penstock.public import ClaimRef
from penstock.service import Batch, Delete, Pull, Push, QueueSettings
from penstock.testing.conformance import BEHAVIOURS
from tests.server.conftest import until

pytestmark = pytest.mark.service("rabbitmq-server")
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "rabbitmq.md"
TIMEOUT_S = 30


@pytest.fixture(scope="module")
def others(connect):
    """Another connection, as another process would have it."""
    with connect() as queues:
        yield queues


# Other connections.


def test_a_queue_made_by_one_connection_is_known_to_another_at_once(queues, others, name):
    queues.create(name, visibility_timeout=45)
    others.push(name, "from another")
    assert others.describe(name).settings.visibility_timeout == 45
    queues.configure(name, visibility_timeout=46)
    until(lambda: others.describe(name).settings.visibility_timeout == 46)
    assert queues.pull(name).body == b"from another"
    queues.remove(name)
    until(lambda: others.list(name) == [])
    with pytest.raises(QueueNotFound):
        others.push(name, "x")


def test_what_one_connection_holds_another_does_not_get_and_cannot_settle(queues, others, name):
    queues.create(name)
    queues.push(name, "a")
    claim = queues.pull(name)
    assert others.pull(name) is None
    for use in (
        lambda: others.delete(ClaimRef(name, claim.receipt)),
        lambda: others.extend(ClaimRef(name, claim.receipt), 5),
        lambda: others.release(ClaimRef(name, claim.receipt)),
    ):
        with pytest.raises(
            InvalidReceipt, match="binds a message to the connection that pulled it"
        ):
            use()
    queues.release(claim)
    assert others.pull(name, wait=TIMEOUT_S).receives == 2


def test_a_connection_that_is_closed_returns_what_it_held(queues, name, connect):
    queues.create(name)
    queues.push_many(name, ["a", "b"])
    with connect() as closing:
        assert [claim.body for claim in closing.pull_many(name, 2)] == [b"a", b"b"]
        assert queues.pull(name) is None
    claims = [queues.pull(name, wait=TIMEOUT_S) for _ in range(2)]
    assert [(claim.body, claim.receives) for claim in claims] == [(b"a", 2), (b"b", 2)]


def test_a_waiting_pull_ends_when_another_connection_removes_the_queue(queues, others, name):
    queues.create(name)
    with ThreadPoolExecutor(1) as pool:
        pull = pool.submit(queues.pull, name, wait=600)
        until(lambda: queues.stats(name).waiting_pulls == 1)
        others.remove(name)
        with pytest.raises(QueueDeleted, match=name):
            pull.result(TIMEOUT_S)


def test_many_connections_that_make_one_queue_make_it_once(name, connect):
    def create(seconds):
        with connect() as queues:
            try:
                return queues.create(name, visibility_timeout=seconds).created_at_ms
            except QueueExists:
                return None

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(create, [30, 40] * 3))
    assert len({at_ms for at_ms in made if at_ms is not None}) == 1
    assert made.count(None) in (3, 0)


def test_waiting_pulls_of_two_connections_share_new_messages(queues, others, name):
    queues.create(name)
    with ThreadPoolExecutor(4) as pool:
        pulls = [pool.submit(each.pull, name, wait=600) for each in (queues, others) * 2]
        until(lambda: queues.stats(name).waiting_pulls == others.stats(name).waiting_pulls == 2)
        queues.push_many(name, ["a", "b", "c", "d"])
        bodies = sorted(pull.result(TIMEOUT_S).body for pull in pulls)
    assert bodies == [b"a", b"b", b"c", b"d"]


# Pulls whose callers have ended.


def test_a_cancelled_pull_keeps_no_message(rabbit, name):
    async def run():
        async with await penstock.aio.connect(rabbit.url) as queues:
            await queues.create(name, visibility_timeout=600)
            waiting = [asyncio.ensure_future(queues.pull(name, wait=600)) for _ in range(3)]
            while (await queues.stats(name)).waiting_pulls < 3:
                pass
            for pull in waiting[:2]:
                pull.cancel()
            await queues.push(name, "a")
            claim: Any = await asyncio.wait_for(waiting[2], TIMEOUT_S)
            assert (claim.body, claim.receives) == (b"a", 1)
            await queues.delete(claim)

    asyncio.run(run())


def test_pulls_that_are_cancelled_in_any_step_lose_no_message(rabbit, name):
    async def run():
        async with await penstock.aio.connect(rabbit.url) as queues:
            await queues.create(name, visibility_timeout=600)
            await queues.push_many(name, [str(number) for number in range(20)])
            held: list[Any] = []
            cancelled = 0
            for number in range(30):
                pull = asyncio.ensure_future(queues.pull_many(name, 2))
                for _ in range(number):
                    await asyncio.sleep(0)
                pull.cancel()
                try:
                    held += await pull
                except asyncio.CancelledError:
                    cancelled += 1
            assert cancelled
            for claim in held:
                await queues.release(claim)
            found: list[Any] = []
            while len(found) < 20:
                claims = await queues.pull_many(name, 100, wait=TIMEOUT_S)
                assert all(await queues.delete_many(claims))
                found += claims
            assert len({claim.id for claim in found}) == 20
            assert (await queues.stats(name)).messages == 0

    asyncio.run(run())


async def cancelled_after(steps, call):
    """Cancels a call after so many turns of the loop; whether it had not ended by then."""
    task = asyncio.ensure_future(call)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


def test_commands_that_are_cancelled_in_any_step_leave_no_message_that_nobody_holds(rabbit, name):
    """What they have begun is finished, so that a second connection finds each message once."""

    async def run():
        url, dead = rabbit.url, f"{name}-dead"
        async with await penstock.aio.connect(url) as queues:
            await queues.create(name, visibility_timeout=600, dead_letter=dead, max_receives=1)
            bodies = {f"{steps}" for steps in range(24)}
            await queues.push_many(name, sorted(bodies))
            claims = await queues.pull_many(name, 24)
            cancelled = 0
            for steps, claim in enumerate(claims):
                # Half of them become dead letters, the others are deleted.
                use = queues.release if steps % 2 else queues.delete
                cancelled += await cancelled_after(1 + steps // 2, use(claim))
            for steps in range(12):
                cancelled += await cancelled_after(steps, queues.redrive(dead))
            assert cancelled > 12, cancelled
            async with await penstock.aio.connect(url) as others:
                left: list[Any] = []
                while len(left) < 12:
                    for queue in (name, dead):
                        left += await others.pull_many(queue, 24)
                released = {claim.body for claim in claims[1::2]}
                assert {claim.body for claim in left} == released
                assert len(left) == 12
        async with await penstock.aio.connect(url) as last:
            assert (await last.stats(name)).messages + (await last.stats(dead)).messages == 12

    asyncio.run(run())


def test_closing_fails_the_pulls_that_wait(name, connect):
    queues = connect()
    queues.create(name)
    with ThreadPoolExecutor(1) as pool:
        pull = pool.submit(queues.pull, name, wait=600)
        until(lambda: queues.stats(name).waiting_pulls == 1)
        queues.close()
        with pytest.raises(EngineClosed):
            pull.result(TIMEOUT_S)
    with pytest.raises(EngineClosed):
        queues.push(name, "x")


def test_a_pull_limited_in_bytes_leaves_the_rest(queues, name):
    queues.create(name, visibility_timeout=600)
    queues.push_many(name, ["x" * 60, "y" * 60, "z" * 10])
    (first,) = queues.service.execute(Pull(name, 10, bytes_max=50))
    assert first.body == b"x" * 60
    rest = queues.service.execute(Pull(name, 10, bytes_max=70))
    assert [(claim.body[:1], claim.receives) for claim in rest] == [(b"y", 1), (b"z", 1)]


# Other clients of the broker.


def test_another_client_sees_body_and_attributes_as_they_were_pushed(queues, name, amqp):
    queues.create(name)
    message_id = queues.push(
        name, b"\x00body", attributes={"kind": "test", "raw": b"\xff"}, priority=7
    ).id
    message = amqp(lambda channel: channel.basic_get(name, no_ack=True))
    properties = message.header.properties
    assert message.body == b"\x00body"
    assert properties.headers == {"kind": "test", "raw": bytearray(b"\xff")}
    assert (properties.message_id, properties.delivery_mode) == (message_id, 2)
    assert (properties.priority, properties.expiration) == (7, "345600000")


def test_a_message_of_another_client_is_pulled_like_any_other(queues, name, amqp):
    queues.create(name, dead_letter=f"{name}-dead", max_receives=1)
    headers: Any = {
        "n": 5,
        "list": [1, "a"],
        "text": "t",
        "x-other": "kept",
        "x-penstock": "{broken",
    }
    properties = Basic.Properties(headers=headers, priority=200)
    amqp(lambda channel: channel.basic_publish(b"x", routing_key=name))
    amqp(
        lambda channel: channel.basic_publish(b"y", routing_key=name, properties=properties),
    )
    first = queues.pull(name)
    assert first.body == b"y"
    assert first.attributes == {"n": "5", "list": '[1,"a"]', "text": "t", "x-other": "kept"}
    assert first.priority == 9
    queues.release(first)
    assert queues.pull(f"{name}-dead").attributes == first.attributes
    plain = queues.pull(name)
    assert (plain.body, plain.attributes, plain.receives) == (b"x", {}, 1)
    assert queues.delete(plain) is True


def test_attributes_that_rabbitmq_would_read_come_back_as_they_were_pushed(queues, name):
    queues.create(name)
    attributes = {"CC": "a", "BCC": b"b", "x-death": "c", "x-penstock": "{}", "x" * 300: "long"}
    queues.push(name, "x", attributes=attributes)
    claim = queues.pull(name)
    assert claim.attributes == attributes
    queues.release(claim)
    assert queues.pull(name).attributes == attributes


# Delays.


def test_delays_of_every_length_end_in_their_order(queues, name):
    queues.create(name)
    # The first push of a delay makes the queues of its bits, which takes a while.
    queues.push(name, "warm", delay=0.511)
    assert queues.pull(name, wait=TIMEOUT_S).body == b"warm"
    # In one go: on a busy machine one push may take longer than the delays differ by. Each bit of a
    # delay takes longer there, too: those with many bits are far from the next longer one.
    delays_ms = (500, 63, 300, 1, 127)
    queues.service.execute(
        Batch([Push(name, b"%d" % delay_ms, delay_ms) for delay_ms in delays_ms])
    )
    bodies = [queues.pull(name, wait=TIMEOUT_S).body.decode() for _ in range(5)]
    assert bodies == ["1", "63", "127", "300", "500"]


def test_a_delayed_message_of_a_removed_queue_is_gone_with_it(queues, name, amqp):
    queues.create(name)
    queues.push_many(name, ["a", "b"], delay=3_600)
    assert queues.stats(name).delayed == 2
    assert queues.purge(name) == 2
    queues.push(name, "c", delay=3_600)
    queues.remove(name)
    for level in (7, 9, 10):
        gone = delays.level_name(name, level)
        with pytest.raises(aiormq.exceptions.ChannelNotFoundEntity):
            amqp(lambda channel, gone=gone: channel.queue_declare(gone, passive=True))


def test_a_release_beyond_the_hold_is_kept_by_the_broker_and_counts_on(name, connect):
    with connect("?hold=3") as queues:
        queues.create(name, visibility_timeout=3)
        message_id = queues.push(name, "a", attributes={"k": "v"}).id
        claim = queues.pull(name)
        queues.release(claim, delay=3.1)
        released_s = time.monotonic()
        stats = queues.stats(name)
        assert (stats.delayed, stats.in_flight) == (1, 0)
    with connect() as queues:
        early = queues.pull(name)
        # On a busy machine the connection may have taken all of the delay.
        assert early is None or time.monotonic() > released_s + 3
        again = early or queues.pull(name, wait=TIMEOUT_S)
        assert (again.id, again.receives, again.attributes) == (message_id, 2, {"k": "v"})
        assert again.first_pulled_at_ms == claim.first_pulled_at_ms


def test_the_key_of_a_delay_has_its_bits_and_the_name_as_one_word():
    key = delays.routing_key("a.b", 5)
    assert key == "1.0.1." + "0." * 29 + "a/b"
    assert len(delays.routing_key("x" * 161, 2**32 - 1)) <= 255


def test_the_broker_itself_keeps_delays_ttls_and_priorities(name, connect, amqp):
    """After a push no process of ours is needed, and no client consumes meanwhile."""

    def count_ready():
        declared = amqp(lambda channel: channel.queue_declare(name, passive=True))
        return declared.message_count

    with connect() as queues:
        queues.create(name)
        queues.push(name, "expired", ttl=0.2)
    until(lambda: count_ready() == 0)
    with connect() as queues:
        queues.push(name, "low", priority=1)
        queues.push(name, "high", priority=5)
        queues.push(name, "later", delay=0.3, priority=9)
    until(lambda: count_ready() == 3)
    found = [amqp(lambda channel: channel.basic_get(name, no_ack=True)).body for _ in range(3)]
    assert found == [b"later", b"high", b"low"]


# The registry.


def test_a_connection_begins_with_the_snapshot_and_reads_the_rest(name, monkeypatch, connect, amqp):
    monkeypatch.setattr(registry, "SNAPSHOT_AFTER", 5)
    with connect() as queues:
        for number in range(8):
            queues.create(f"{name}-{number}", visibility_timeout=number)
        queues.remove(f"{name}-3")
        shown = amqp(lambda channel: channel.basic_get(registry.SNAPSHOT))
        kept = registry._decode_snapshot(shown.body)
        assert f"{name}-1" in {queue.name for queue in kept.queues}
        queues.configure(f"{name}-5", visibility_timeout=50)
        expected = queues.service.execute(penstock.service.DescribeQueues(name))
    with connect() as fresh:
        assert fresh.service.execute(penstock.service.DescribeQueues(name)) == expected
        assert len(expected) == 7
        for info in expected:
            fresh.remove(info.queue)


def test_entries_of_a_queue_that_was_made_again_do_not_touch_the_new_one():
    queues: dict[str, Any] = {}
    added = registry.QueueAdded("t", 1, "q", "classic", QueueSettings())
    first: Any = registry.fold(queues, added, 10)
    number = first.number
    assert registry.fold(queues, registry.QueueAdded("u", 2, "q", "quorum", QueueSettings()), 11)
    assert queues["q"].kind == "classic"
    assert registry.fold(queues, registry.QueueDropped("t", "q", number), 12) is first
    again: Any = registry.fold(queues, added, 13)
    assert registry.fold(queues, registry.QueueDropped("t", "q", number), 14) is None
    changes = {"visibility_ms": 5}
    assert registry.fold(queues, registry.SettingsChanged("t", 9, "q", 10, changes), 15) is None
    assert queues == {"q": RabbitQueue("q", again.number, "classic", QueueSettings(), 1, 1)}
    registry.fold(queues, registry.SettingsChanged("t", 9, "q", 13, changes), 16)
    note = {"annotations": {".note": "x"}}
    registry.fold(queues, registry.SettingsChanged("t", 20, "q", 13, note), 17)
    assert (queues["q"].configured_at_ms, queues["q"].settings.annotations) == (9, {".note": "x"})


def test_a_dead_letter_queue_in_use_is_removed_only_by_force(queues, name):
    queues.create(name, dead_letter=f"{name}-dead", max_receives=1)
    with pytest.raises(QueueInUse, match=name):
        queues.remove(f"{name}-dead")
    queues.remove(f"{name}-dead", force=True)
    queues.push(name, "x")
    queues.release(queues.pull(name))
    # Without a dead-letter queue it stays where it is.
    assert queues.pull(name).receives == 2


# Messages.


def test_a_batch_has_a_reply_or_an_error_for_each_item_in_order(queues, name):
    queues.create(name, max_body_bytes=100, visibility_timeout=600)
    bodies = [str(number) for number in range(500)]
    replies = queues.push_many(name, bodies)
    assert len({reply.id for reply in replies}) == 500
    claims = queues.pull_many(name, 1_000)
    assert [claim.body.decode() for claim in claims] == bodies
    replies = queues.service.execute(
        Batch([Push(name, b"x" * 101), Delete(name, claims[0].receipt), Delete(name, "x")])
    )
    assert isinstance(replies[0], MessageTooLarge)
    assert replies[1] is True
    assert isinstance(replies[2], InvalidReceipt)
    assert queues.delete_many(claims[1:]) == [True] * 499
    assert queues.stats(name).messages == 0


def test_an_id_contains_the_time_of_the_push():
    message_id = content.new_id(1_700_000_000_123)
    assert content.pushed_at_ms(message_id) == 1_700_000_000_123
    for other in ("", "x" * 36, "00000000-0000-7000-8000-00000000000g", message_id + "0"):
        assert content.pushed_at_ms(other) is None


def test_a_ttl_or_retention_beyond_what_the_broker_counts_is_kept_here(queues, name, amqp):
    queues.create(name, retention=100 * 86_400)
    queues.push(name, "a")
    queues.push(name, "b", ttl=60 * 86_400)
    for body in (b"a", b"b"):
        message = amqp(lambda channel: channel.basic_get(name, no_ack=True))
        assert (message.body, message.header.properties.expiration) == (body, None)


# The page.


def rows_of(heading):
    text = PAGE.read_text().split(heading, 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows[1:]}


def test_the_page_lists_what_rabbitmq_lacks():
    assert rows_of("## What RabbitMQ cannot do") == {
        **lacks.COMMON,
        **{f"{key} (quorum)": reason for key, reason in lacks.QUORUM_ONLY.items()},
    }
    assert set(lacks.LACKS["quorum"]) <= set(BEHAVIOURS)


def test_the_page_lists_what_is_weaker():
    assert rows_of("## Behaviours with limits") == dict(lacks.WEAKER)


def test_the_python_code_of_the_page_runs(rabbit):
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    url = "amqp://guest:guest@127.0.0.1:5672/"
    assert url in code
    with penstock.connect(rabbit.url) as queues:
        try:
            # Other tests use the same broker.
            code = code.replace(url, rabbit.url).replace("orders", "page-orders")
            exec(compile(code, PAGE, "exec"), {})
            assert queues.stats("page-orders").messages == 0
        finally:
            for name in ("page-orders", "page-orders-dead"):
                queues.remove(name, force=True)
