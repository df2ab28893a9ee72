"""What only the Redis backend has: keys, URLs, scripts, moves between slots, sweeps, limits."""

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

import penstock
import penstock.aio
from penstock.backends.redis import layout, scripts, sweeper
from penstock.backends.redis.address import read_target
from penstock.backends.redis.lacks import LACKS
from penstock.backends.redis.service import open_async_service
from penstock.clock import ManualClock
from penstock.errors import (
    BackendLost,
    EngineClosed,
    InvalidField,
    InvalidReceipt,
    UnsupportedOperation,
)
from penstock.service import Batch, BatchItem, Delete, Push, Release
from penstock.url import read_url
from tests.backends.redis.servers import RedisServer
from tests.ports import refusing_port

pytestmark = pytest.mark.service("redis-server")


def connect(server, prefix, **options):
    return penstock.connect(f"{server.url}?prefix={prefix}", **options)


def keys_in(server, prefix):
    """Every key with this prefix."""
    with redis.Redis(port=server.port) as client:
        return sorted(key.decode() for key in client.scan_iter(f"{prefix}:*"))


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("redis:", "redis://HOST:PORT"),
        ("redis://", "HOST:PORT"),
        ("redis://host:0", "HOST:PORT"),
        ("redis://host:99999", "HOST:PORT"),
        ("redis://a,b", "several hosts"),
        ("redis://host/orders", "database"),
        ("redis://host?colour=red", "colour"),
        ("redis://host?prefix={x}", "prefix"),
        ("redis://host?timeout=-1", "timeout"),
        ("redis://host?timeout=86401", "timeout"),
        ("redis://host?replicas=1000", "replicas"),
        ("redis://host?password_file=/nowhere", "password_file"),
        ("rediss://host?ca_file=/nowhere", "ca_file"),
        ("redis+cluster://a:1,b:2/3", "database"),
        ("redis+sentinel://a:1,b:2", "master"),
    ],
)
def test_the_error_of_a_wrong_url_names_the_wrong_part(url, part):
    with pytest.raises(InvalidField, match=re.escape(part)):
        penstock.connect(url)


def test_a_url_gives_hosts_master_database_prefix_and_credentials():
    target = read_target(read_url("redis+sentinel://me:p%40ss@[::1]:1,b/orders/2?prefix=a:b"))
    assert target.hosts == (("::1", 1), ("b", 26379))
    assert (target.master, target.database, target.prefix) == ("orders", 2, "a:b")
    assert target.credentials == {"username": "me", "password": "p@ss"}
    assert "p%40ss" not in target.shown
    assert read_target(read_url("rediss://host")).tls["ssl_check_hostname"] is True


def test_an_error_of_a_url_shows_no_password():
    with pytest.raises(InvalidField) as caught:
        penstock.connect("redis://user:s3cret@host:x")
    assert "s3cret" not in str(caught.value)


def test_the_error_of_a_server_that_cannot_be_reached_names_it():
    for host in ("127.0.0.1", "localhost"):
        with refusing_port() as port, pytest.raises(BackendLost) as lost:
            penstock.connect(f"redis://{host}:{port}?timeout=1")
        assert str(lost.value) == f"redis://{host}:{port}: cannot connect: Connection refused"


def test_all_keys_of_a_queue_share_its_hash_tag_and_are_removed_with_it(shared_redis):
    with connect(shared_redis, "tags", clock=ManualClock()) as queues:
        queues.create("orders-dead")
        queues.create("orders", dead_letter="orders-dead", max_receives=1)
        for number in range(4):
            queues.push("orders", f"{number}", group="eu", dedup_id=f"{number}", ttl=60)
        queues.push("orders", "later", delay=60)
        queues.pull_many("orders", 2, attempt_id="x")
        found = keys_in(shared_redis, "tags")
        assert len(found) > 12
        for key in found:
            assert re.fullmatch(r"tags:(queues|\{orders(-dead)?\}:[a-z_]+)", key), key
        queues.remove("orders", force=True)
        queues.remove("orders-dead", force=True)
        assert [key for key in keys_in(shared_redis, "tags") if "{" in key] == []


def test_stores_with_different_prefixes_do_not_see_each_other(shared_redis):
    with connect(shared_redis, "one") as one, connect(shared_redis, "two") as two:
        one.create("orders")
        assert (one.list(), two.list()) == (["orders"], [])


def test_every_script_begins_with_a_list_of_the_keys_and_their_meaning():
    for name in scripts.NAMES:
        opening = scripts.SCRIPTS[name].text.partition("\nlocal ")[0]
        for number, key in enumerate(layout.KEYS, 1):
            assert re.search(rf"^-- +{number} {key} +(hash|zset|list|stream) ", opening, re.M), key
        rest = Path(scripts.__file__).with_name("lua").joinpath(f"{name}.lua").read_text()
        assert rest.startswith("#!lua")
        assert "-- " in rest.splitlines()[1]


def test_every_script_in_the_directory_is_used():
    shipped = {path.stem for path in Path(scripts.__file__).with_name("lua").glob("*.lua")}
    assert shipped == {"queue", "push_plain", *scripts.NAMES}


def test_history_is_refused_unless_the_url_asks_for_it(shared_redis):
    with connect(shared_redis, "history") as queues:
        assert queues.service.LACKS == LACKS
        with pytest.raises(UnsupportedOperation, match="history"):
            queues.history("x")


def test_delayed_messages_are_not_early_and_are_then_pulled_by_priority(shared_redis):
    clock = ManualClock()
    with connect(shared_redis, "early", clock=clock) as queues:
        queues.create("orders")
        bodies = [f"high{number}" for number in range(1_500)]
        queues.push_many("orders", bodies, delay=10, priority=9)
        queues.push("orders", "low")
        clock.advance(ms=9_999)
        assert [claim.body for claim in queues.pull_many("orders", 10)] == [b"low"]
        clock.advance(ms=1)
        # More messages are due than one call of a script settles.
        found = [claim.body for claim in queues.pull_many("orders", 2_000)]
        assert found == [b"high%d" % number for number in range(1_500)]


async def with_outbox(url, clock):
    """A store whose process stopped right after a message became a dead letter."""
    service = await open_async_service(read_url(url), clock)
    queues = penstock.aio.AsyncQueues(service, clock)
    await queues.create("orders", dead_letter="orders-dead", max_receives=1)
    message_id = (await queues.push("orders", "poison", group="eu", attributes={"kind": "test"})).id
    claim: Any = await queues.pull("orders")
    # Only the script of the release, without the move that the service does after it.
    inside = service._queues
    queue = await inside.find("orders")
    item = layout.encode_claim(b"R", claim.proof, 0, -1, False)
    reply = await inside.run_on(queue, "receipts", str(queue.number), item)
    assert reply[2] == 1
    return queues, inside, queue, message_id


def test_a_dead_letter_whose_move_was_interrupted_is_moved_by_the_next_command(shared_redis):
    clock = ManualClock()
    url = f"{shared_redis.url}?prefix=outbox"

    async def stop_halfway():
        queues, _, _, message_id = await with_outbox(url, clock)
        await queues.close()
        return message_id

    message_id = asyncio.run(stop_halfway())
    with penstock.connect(url, clock=clock) as queues:
        assert queues.stats("orders-dead").messages == 0
        assert queues.stats("orders").messages == 0
        claim = queues.pull("orders-dead")
        assert claim is not None
        assert (claim.id, claim.body, claim.source) == (message_id, b"poison", "orders")
        assert (claim.group, claim.attributes) == ("eu", {"kind": "test"})


def test_a_dead_letter_that_is_moved_twice_arrives_once(shared_redis):
    async def carry_twice():
        queues, inside, queue, _ = await with_outbox(
            f"{shared_redis.url}?prefix=twice", ManualClock()
        )
        shown = await inside.run("owed", queue.keys, "show", 10)
        owed = layout.read_owed(queue, shown[3:7])
        dead = await inside.find("orders-dead")
        for _ in range(2):
            await inside.run("arrive", dead.keys, 0, owed.item)
        # The first to finish ends it; another that began before does no harm.
        for _ in range(2):
            await inside.run("owed", queue.keys, "done", owed.number)
        counts = (
            (await queues.stats("orders-dead")).messages,
            (await queues.stats("orders")).messages,
        )
        await queues.close()
        return counts

    assert asyncio.run(carry_twice()) == (1, 0)


def test_a_message_returns_to_its_queue_if_the_dead_letter_queue_was_removed(shared_redis):
    with connect(shared_redis, "nowhere", clock=ManualClock()) as queues:
        queues.create("orders", dead_letter="orders-dead", max_receives=1)
        queues.remove("orders-dead", force=True)
        queues.push("orders", "x")
        for epoch in (1, 2, 3):
            claim = queues.pull("orders")
            assert claim is not None
            assert claim.epoch == epoch
            queues.release(claim)
        assert queues.stats("orders").visible == 1


def test_dead_letters_of_the_same_millisecond_are_moved_in_their_order(shared_redis):
    """Redis sorts members of one score as text: 10 would be before 9."""
    clock = ManualClock()
    with connect(shared_redis, "together", clock=clock) as queues:
        queues.create("work.fifo", dead_letter="dead.fifo", max_receives=1, dedup_by_content=True)
        for number in range(12):
            queues.push("work.fifo", b"%d" % number, group="g")
        assert len(queues.pull_many("work.fifo", 12, visibility_timeout=5)) == 12
        clock.advance(ms=6_000)
        assert queues.stats("work.fifo").messages == 0
        found = [int(message.body) for message in queues.peek("dead.fifo", 20)]
        assert found == list(range(12))


def test_a_queue_with_a_message_in_its_outbox_is_removed_after_it_has_arrived(shared_redis):
    url = f"{shared_redis.url}?prefix=removed"
    clock = ManualClock()

    async def remove():
        queues, _, _, _ = await with_outbox(url, clock)
        await queues.remove("orders", force=True)
        left = (await queues.stats("orders-dead")).messages
        await queues.close()
        return left

    assert asyncio.run(remove()) == 1


def test_many_sweepers_at_once_return_each_message_once(shared_redis, monkeypatch):
    # None of them sweeps by itself meanwhile.
    monkeypatch.setattr(sweeper, "SWEEP_S", 600.0)

    async def race():
        url = read_url(f"{shared_redis.url}?prefix=sweepers")
        services = [await open_async_service(url) for _ in range(8)]
        queues = penstock.aio.AsyncQueues(services[0])
        await queues.create("orders")
        await queues.push_many("orders", [f"{number}" for number in range(300)])
        claims = await queues.pull_many("orders", 300, visibility_timeout=0)
        assert len(claims) == 300
        queue = await services[0]._queues.find("orders")
        await asyncio.gather(
            *(each._queues.run("tick", queue.keys, 0) for each in services for _ in range(5))
        )
        again = await queues.pull_many("orders", 1_000, visibility_timeout=60)
        swept = sum(await asyncio.gather(*(each._sweeper.sweep() for each in services)))
        for each in services:
            await each.close()
        return [claim.body for claim in claims], [(c.body, c.epoch) for c in again], swept

    first, again, swept = asyncio.run(race())
    assert again == [(body, 2) for body in first]
    # Only one process sweeps at a time, and there is one queue.
    assert swept == 1


def test_the_claims_of_a_queue_that_no_process_uses_are_ended_by_the_sweep(
    shared_redis, monkeypatch
):
    monkeypatch.setattr(sweeper, "SWEEP_S", 0.05)
    url = f"{shared_redis.url}?prefix=unused"
    with penstock.connect(url) as queues:
        queues.create("orders", dead_letter="orders-dead", max_receives=1, visibility_timeout=0.01)
        queues.push("orders", "x")
        assert queues.pull("orders") is not None

    async def sweep():
        service = await open_async_service(read_url(url))
        queues = penstock.aio.AsyncQueues(service)
        # No command names the queue with the claim: its own process has ended.
        while not (await queues.stats("orders-dead")).messages:
            pass
        await queues.close()

    asyncio.run(asyncio.wait_for(sweep(), 60))


def test_a_wait_ends_if_a_clock_is_set_before_the_reply_of_the_script_is_read(
    shared_redis, monkeypatch
):
    clock = ManualClock()

    async def wait():
        service = await open_async_service(read_url(f"{shared_redis.url}?prefix=late"), clock)
        queues = penstock.aio.AsyncQueues(service)
        await queues.create("orders")
        call = service._pulls._call

        async def call_and_advance(*arguments):
            reply = await call(*arguments)
            if reply[3] == b"waits":
                clock.advance(seconds=5)
            return reply

        monkeypatch.setattr(service._pulls, "_call", call_and_advance)
        found = await queues.pull("orders", wait=4)
        await queues.close()
        return found

    assert asyncio.run(asyncio.wait_for(wait(), 60)) is None


def test_a_waiting_pull_claims_a_delayed_message_with_one_call_at_its_time():
    server = RedisServer("--slowlog-log-slower-than", "0", "--slowlog-max-len", "100000")
    try:
        with penstock.connect(server.url) as queues, redis.Redis(port=server.port) as client:
            queues.create("orders")
            for number in range(3):
                queues.push("orders", f"{number}", delay=0.8 + 0.4 * number)
            client.slowlog_reset()
            claims = [queues.pull("orders", wait=20) for _ in range(3)]
            assert [claim and claim.body for claim in claims] == [b"0", b"1", b"2"]
            words = [each["command"].split() for each in client.slowlog_get(100_000)]
        calls = [each for each in words if each[0] == b"EVALSHA"]
        pulls, ticks = (
            [each for each in calls if each[1].decode() == scripts.SCRIPTS[name].sha]
            for name in ("pull", "tick")
        )
        # Each pull finds nothing at first, and its message when it is repeated.
        assert 3 < len(pulls) <= 6
        # A tick of the sweep has no waiter. The empty first argument is lost by `split`.
        assert [each for each in ticks if len(each) > 3 + len(layout.KEYS) + 3] == []
    finally:
        server.close()


def test_a_cancelled_pull_is_no_waiter_any_more_and_keeps_no_message(shared_redis):
    async def cancel():
        queues = await penstock.aio.connect(f"{shared_redis.url}?prefix=cancelled")
        await queues.create("orders")
        pulls = [asyncio.ensure_future(queues.pull("orders", wait=60)) for _ in range(2)]
        while (await queues.stats("orders")).waiting_pulls < 2:
            pass
        pulls[0].cancel()
        await queues.push("orders", "x")
        claim: Any = await asyncio.wait_for(pulls[1], 60)
        while (await queues.stats("orders")).waiting_pulls:
            pass
        await queues.close()
        return claim.body

    assert asyncio.run(cancel()) == b"x"


def test_the_items_of_a_batch_for_one_queue_are_applied_in_order(shared_redis):
    with connect(shared_redis, "batch", clock=ManualClock()) as queues:
        queues.create("orders")
        queues.push_many("orders", ["a", "b"])
        a, b = queues.pull_many("orders", 2)
        replies = queues.service.execute(
            Batch(
                [
                    Release("orders", a.receipt),
                    Push("orders", b"c"),
                    Release("orders", b.receipt),
                    Release("orders", a.receipt),
                ]
            )
        )
        assert [type(reply).__name__ for reply in replies] == [
            "NoneType",
            "PushReply",
            "NoneType",
            "StaleReceipt",
        ]
        assert [message.body for message in queues.peek("orders", 9)] == [b"a", b"b", b"c"]


def test_settings_that_another_process_has_changed_are_used_at_once(shared_redis):
    with connect(shared_redis, "other") as one, connect(shared_redis, "other") as other:
        one.create("orders")
        one.push("orders", "x" * 100)
        other.configure("orders", dedup_by_content=True, max_body_bytes=50)
        first = one.push("orders", "same").id
        assert one.push("orders", "same").id == first
        with pytest.raises(penstock.errors.MessageTooLarge):
            one.push("orders", "x" * 51)
        other.configure("orders", wait=60)
        assert other.stats("orders").messages == 2


def test_a_mixed_batch_after_another_process_set_dedup_by_content_has_every_reply(shared_redis):
    with connect(shared_redis, "content") as one, connect(shared_redis, "content") as other:
        one.create("orders")
        one.push_many("orders", ["a", "b"])
        a, b = one.pull_many("orders", 2)
        other.configure("orders", dedup_by_content=True)
        pushed = Push("orders", b"c")
        named = Push("orders", b"d", dedup_id="d")
        batch: list[BatchItem] = [
            Delete("orders", a.receipt),
            pushed,
            named,
            Delete("orders", b.receipt),
            pushed,
        ]
        first, c, d, second, again = one.service.execute(Batch(batch))
        assert (first, second) == (True, True)
        assert again == msgspec.structs.replace(c, duplicate=True)
        assert {message.id: message.body for message in one.peek("orders", 9)} == {
            c.id: b"c",
            d.id: b"d",
        }


def test_a_batch_on_a_queue_that_was_removed_and_made_again_is_one_on_the_new_queue(shared_redis):
    with connect(shared_redis, "again") as one, connect(shared_redis, "again") as other:
        one.create("orders")
        one.push("orders", "old")
        old = one.pull("orders")
        other.remove("orders")
        other.create("orders")
        other.push("orders", "new")
        new = other.pull("orders")
        items = [Delete("orders", old.receipt), Delete("orders", new.receipt)]
        refused, deleted, pushed = one.service.execute(Batch([*items, Push("orders", b"x")]))
        assert isinstance(refused, InvalidReceipt)
        assert deleted is True
        (left,) = other.peek("orders", 9)
        assert (left.body, left.id) == (b"x", pushed.id)


def test_the_documentation_has_the_table_of_what_the_backend_lacks():
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "redis.md").read_text()
    for behaviour, reason in LACKS.items():
        assert f"| {behaviour} | {reason} |" in page


def test_the_largest_batches_are_pushed_pulled_and_deleted(shared_redis):
    with connect(shared_redis, "large", clock=ManualClock()) as queues:
        sizes = (("plain", None, 10_000), ("grouped", "g", 1_500), ("q.fifo", "g", 1_500))
        for name, group, count in sizes:
            queues.create(name)
            bodies = [b"%d" % number for number in range(count)]
            queues.push_many(name, bodies, group=group)
            claims = queues.pull_many(name, 10_000)
            assert [claim.body for claim in claims] == bodies
            assert queues.delete_many(claims) == [True] * count
            assert queues.stats(name).stored_bytes == 0


def test_pushes_that_are_too_large_for_one_call_are_sent_in_several(shared_redis):
    with connect(shared_redis, "heavy", clock=ManualClock()) as queues:
        queues.create("orders")
        bodies = [bytes([number]) * 1_000_000 for number in range(40)]
        replies = queues.push_many("orders", bodies)
        assert [reply.sequence for reply in replies] == list(range(1, 41))
        assert [claim.body for claim in queues.pull_many("orders", 40)] == bodies


def test_closing_ends_the_pulls_that_wait(shared_redis):
    async def close():
        queues = await penstock.aio.connect(f"{shared_redis.url}?prefix=closing")
        await queues.create("orders")
        pull = asyncio.ensure_future(queues.pull("orders", wait=60))
        while not (await queues.stats("orders")).waiting_pulls:
            pass
        await queues.close()
        with pytest.raises(EngineClosed):
            await pull
        with pytest.raises(EngineClosed):
            await queues.stats("orders")

    asyncio.run(close())
