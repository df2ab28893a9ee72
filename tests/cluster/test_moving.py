"""Queues that are moved to other shards, on nodes in one process and three NATS servers."""

import asyncio
from collections import Counter

import pytest

from penstock.cluster.membership import set_register
from penstock.cluster.operations import operate
from penstock.cluster.placement import first_shard, shard_of_id
from penstock.cluster.spread_rules import Spread, with_note
from penstock.errors import InvalidField, QueueNotFound
from penstock.service import ConfigureQueue, CreateQueue
from tests.cluster.ledger import pace

# The home shard of "orders", and others.
HOME = first_shard("orders", 4)
NEXT, THIRD = (HOME + 1) % 4, (HOME + 2) % 4


async def move(cluster, queue, *to):
    """Moves a queue as `penstock cluster move-queue` does: the router of the test hears nothing."""
    return await operate(cluster.address, lambda each: each.move_queue(queue, to))


def shards_with(cluster, queue):
    """The shards in which there is a queue of this name."""
    owned = cluster.owned_shards()
    return sorted(each.shard for each in owned if queue in each.engine.shard.names)


def shard_of(cluster, message_id):
    return shard_of_id(message_id, cluster.nodes["a"].router._settings.identity)


def test_a_queue_that_is_moved_keeps_its_messages_as_they_are(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders", visibility_timeout=600, max_messages=1_000)
        await queues.configure("orders", annotations={"tag": "kept"})
        ids = {}
        for body in (b"held", b"back", b"low"):
            ids[body] = (await queues.push("orders", body, priority=0, attributes={"a": "1"})).id
        ids[b"late"] = (await queues.push("orders", b"late", delay=600)).id
        ids[b"once"] = (await queues.push("orders", b"once", dedup_id="d1", priority=9)).id
        held, back = await queues.pull("orders"), await queues.pull("orders")
        await queues.release(back)
        due_ms = (await queues.peek("orders", 1, state="delayed"))[0].pushed_at_ms
        status = await move(cluster, "orders", NEXT)
        assert (status.shards, status.before) == ((NEXT,), (HOME,))
        new = (await queues.push("orders", b"new", priority=9)).id
        assert shard_of(cluster, new) == NEXT
        assert (await queues.push("orders", b"once", dedup_id="d1")).id == ids[b"once"]
        # A receipt from before stays valid.
        await queues.extend(held, 300)
        assert await queues.delete(held)
        (late,) = await queues.peek("orders", 1, state="delayed")
        assert (late.id, late.pushed_at_ms) == (ids[b"late"], due_ms)
        found = await queues.pull_many("orders", 10)
        # Those that were there are the first.
        assert found[-1].body == b"new"
        assert {each.body: each.id for each in found if each.body != b"new"} == {
            body: ids[body] for body in ids if body not in (held.body, b"late")
        }
        receives = {each.body: each.receives for each in found}
        assert receives[back.body] == 2
        assert receives[b"new"] == 1
        info = await queues.describe("orders")
        assert info.settings.annotations == {"tag": "kept"}
        assert (info.settings.max_messages, info.settings.visibility_timeout) == (1_000, 600)

    on_cluster(work)


def test_a_shard_that_a_queue_has_left_has_nothing_of_it_but_its_settings(on_cluster, monkeypatch):
    monkeypatch.setattr("penstock.cluster.spread_rules.DEDUP_WINDOW_MS", 0)

    async def work(cluster):
        queues = await cluster.open_queue("orders", ("a", "b"))
        for number in range(10):
            await queues.push("orders", b"%d" % number)
        await move(cluster, "orders", NEXT)
        await move(cluster, "orders", THIRD)
        await queues.push("orders", b"10")
        bodies = []
        while claim := await queues.pull("orders"):
            bodies.append(claim.body)
            await queues.delete(claim)
        assert bodies == [b"%d" % number for number in range(11)]
        await cluster.until(lambda: shards_with(cluster, "orders") == sorted([HOME, THIRD]))
        # A new client finds it, and everything reaches it there.
        other = await cluster.connect()
        await other.push("orders", b"x")
        assert (await other.stats("orders")).visible == 1
        await other.configure("orders", visibility_timeout=77)
        assert (await other.describe("orders")).settings.visibility_timeout == 77
        assert (await other.pull("orders", wait=5)).body == b"x"
        status = await operate(cluster.address, lambda each: each.spread("orders", None))
        assert (status.shards, status.messages) == ((THIRD,), {THIRD: 1})
        # Back in its home shard it is an ordinary queue again.
        await other.purge("orders")
        await move(cluster, "orders", HOME)
        await cluster.until(lambda: shards_with(cluster, "orders") == [HOME])
        await queues.push("orders", b"home")
        assert (await queues.pull("orders")).body == b"home"
        await queues.remove("orders")
        assert await queues.list() == []

    on_cluster(work)


def test_groups_stay_in_order_and_dedup_ids_are_known_while_a_fifo_queue_is_moved(on_cluster):
    """Its dedup ids are those of the whole queue: it cannot be spread, but it can be moved."""

    async def work(cluster):
        queues = await cluster.open_queue("orders", ("a", "b"), fifo=True)
        groups = [f"g{number}" for number in range(5)]
        sent: Counter[str] = Counter()
        seen: dict[str, list[int]] = {group: [] for group in groups}
        stop = asyncio.Event()

        async def push(group):
            own = await cluster.connect()
            while not stop.is_set():
                number = sent[group]
                dedup_id = f"{group}-{number}"
                first = (
                    await own.push("orders", b"%d" % number, group=group, dedup_id=dedup_id)
                ).id
                again = (
                    await own.push("orders", b"%d" % number, group=group, dedup_id=dedup_id)
                ).id
                assert first == again
                sent[group] += 1
                await pace()

        async def pull():
            own = await cluster.connect()
            while not stop.is_set():
                for claim in await own.pull_many("orders", 3, wait=1):
                    seen[claim.group].append(int(claim.body))
                    await own.delete(claim)

        tasks = [asyncio.create_task(push(group)) for group in groups]
        tasks += [asyncio.create_task(pull()) for _ in range(2)]
        for to in (NEXT, HOME, THIRD):
            await move(cluster, "orders", to)
            pushed = sum(sent.values())
            await cluster.until(lambda pushed=pushed: sum(sent.values()) > pushed + 40)
        stop.set()
        await asyncio.gather(*tasks)
        while claims := await queues.pull_many("orders", 100):
            for claim in claims:
                seen[claim.group].append(int(claim.body))
                await queues.delete(claim)
        assert seen == {group: list(range(sent[group])) for group in groups}

    on_cluster(work)


def test_dead_letters_go_to_a_queue_that_was_moved_and_come_back_from_it(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders-dead", ("a", "b"))
        await queues.create("orders", dead_letter="orders-dead", max_receives=1)

        async def make_dead(body):
            await queues.push("orders", body)
            await queues.release(await queues.pull("orders"))

        async def dead():
            claim = await asyncio.wait_for(queues.pull("orders-dead", wait=20), 30)
            await queues.release(claim)
            return claim.body, claim.source

        # The source is moved, then the dead-letter queue, then both are in one shard.
        for number, (queue, to) in enumerate(
            [("orders", NEXT), ("orders-dead", THIRD), ("orders", THIRD)]
        ):
            await move(cluster, queue, to)
            body = b"%d" % number
            await make_dead(body)
            assert await dead() == (body, "orders")
            assert await queues.redrive("orders-dead") == 1
            claim = await queues.pull("orders", wait=5)
            assert claim.body == body
            await queues.delete(claim)
        # A dead letter that leaves before its queue is moved, and arrives after that.
        await queues.push("orders", b"last")
        claim = await queues.pull("orders")
        await asyncio.gather(queues.release(claim), move(cluster, "orders-dead", HOME))
        assert await dead() == (b"last", "orders")

    on_cluster(work)


def test_a_move_that_ends_half_way_is_completed_by_the_owner_or_by_the_next_one(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders", ("a", "b"))
        await queues.push("orders", b"before")
        router = cluster.nodes["a"].router
        # The command ends after its first step.
        note = with_note({}, Spread(7, (NEXT,), (1,), 1_700_000_000_000))
        await router.ask(HOME, ConfigureQueue("orders", {"annotations": note}))
        await queues.push("orders", b"after")
        assert [each.body for each in await queues.pull_many("orders", 5)] == [b"before", b"after"]
        first = await move(cluster, "orders", NEXT)
        assert first == await move(cluster, "orders", NEXT)
        assert first.shards == (NEXT,)

    on_cluster(work)


def test_a_move_that_cannot_be_made_is_refused_and_changes_nothing(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders", fifo=True)
        for to, text in (
            ((4,), "to: 4 is outside 0 to 3"),
            ((-1,), "to: -1 is outside"),
            ((1, 1), "none of them twice"),
            ((), "at least one"),
            ((1, 2), "dedup_per_group"),
        ):
            with pytest.raises(InvalidField, match=text):
                await move(cluster, "orders", *to)
        with pytest.raises(QueueNotFound):
            await move(cluster, "none", 1)
        with pytest.raises(InvalidField, match="queue"):
            await move(cluster, "a b", 1)
        log = cluster.nodes["a"].node._replicated
        old = b'{"state":"up","endpoint":"","settings":["priority_age_ms"]}'
        await log.run(set_register("node.old", old))
        with pytest.raises(InvalidField, match=r"move-queue: node 'old' runs.*upgrade that node"):
            await move(cluster, "orders", NEXT)
        await queues.push("orders", b"x", group="g", dedup_id="1")
        assert shards_with(cluster, "orders") == [HOME]

    on_cluster(work)


def test_a_queue_is_created_again_where_it_was_moved_to(on_cluster):
    """A creation with the same settings is no error, and no second queue."""

    async def work(cluster):
        queues = await cluster.open_queue("orders", visibility_timeout=9)
        await move(cluster, "orders", NEXT)
        settings = {"visibility_ms": 9_000, "annotations": {}}
        router = cluster.nodes["a"].router
        for each in (settings, {"visibility_ms": 9_000}, {}):
            info = await router.execute(CreateQueue("orders", each))
            assert info.settings.annotations == {}
        new = (await queues.push("orders", b"x")).id
        assert shard_of(cluster, new) == NEXT

    on_cluster(work)
