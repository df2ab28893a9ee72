"""Queues that are spread over several shards, on nodes in one process and three NATS servers."""

import asyncio
import random
from collections import Counter

import pytest

from penstock.cluster.membership import set_register
from penstock.errors import InvalidField, InvalidReceipt, QueueNotFound
from penstock.service import Batch, Delete, DescribeQueue, Push, PushMany
from tests.cluster.ledger import pace
from tests.cluster.nodes import TIMEOUT_S


def holding(status):
    return sorted(count for count in status.messages.values() if count)


async def spread(cluster, queue, shards):
    """Spreads a queue by another router than that of the test, which does not know of it."""
    return await next(iter(cluster.nodes.values())).router.spread.spread(queue, shards)


def test_pushes_to_a_spread_queue_go_to_all_its_shards_and_pulls_find_them(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("hot", ("a", "b"))
        await queues.push("hot", b"before")
        await spread(cluster, "hot", 4)
        for number in range(40):
            await queues.push("hot", b"%d" % number)
        status = await cluster.nodes["b"].router.spread.status("hot")
        assert holding(status) == [10, 10, 10, 11]
        assert (await queues.stats("hot")).visible == 41
        bodies = set()
        while claim := await queues.pull("hot"):
            bodies.add(claim.body)
            assert await queues.delete(claim)
        assert bodies == {b"before", *(b"%d" % number for number in range(40))}
        assert (await queues.stats("hot")).messages == 0
        assert await queues.list() == ["hot"]

    on_cluster(work)


def test_clients_that_push_once_do_not_all_push_to_one_shard(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("hot", ("a", "b"))
        await spread(cluster, "hot", 4)
        chosen = random.Random(7).randrange
        for number in range(12):
            client = await cluster.connect(draw=chosen)
            await client.push("hot", b"%d" % number)
        status = await cluster.nodes["b"].router.spread.status("hot")
        assert len(holding(status)) == 4
        # All twelve in one shard: once in four million runs.
        await queues.create("cold")
        await spread(cluster, "cold", 4)
        for number in range(12):
            await (await cluster.connect()).push("cold", b"%d" % number)
        status = await cluster.nodes["b"].router.spread.status("cold")
        assert len(holding(status)) > 1

    on_cluster(work)


def test_one_pull_takes_from_several_shards_what_it_may(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("hot")
        await spread(cluster, "hot", 3)
        for number in range(9):
            await queues.push("hot", b"%d" % number)
        claims = await queues.pull_many("hot", 7)
        assert len({claim.id for claim in claims}) == 7
        for claim in claims:
            await queues.extend(claim, 60)
            await queues.release(claim)
        assert len(await queues.peek("hot", 100)) == 9
        assert len(await queues.pull_many("hot", 100)) == 9

    on_cluster(work)


def test_a_long_poll_waits_on_every_shard_and_takes_nothing_it_does_not_return(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("hot", ("a", "b"), visibility_timeout=600)
        await spread(cluster, "hot", 4)
        for round_number in range(12):
            waits = [asyncio.create_task(queues.pull("hot", wait=20)) for _ in range(2)]
            await asyncio.sleep(0.05)
            pushes = [queues.push("hot", b"%d" % round_number) for _ in range(2)]
            await asyncio.gather(*pushes)
            claims = await asyncio.wait_for(asyncio.gather(*waits), TIMEOUT_S)
            assert [claim.receives for claim in claims] == [1, 1]
            assert claims[0].id != claims[1].id
            for claim in claims:
                await queues.delete(claim)
        # Each time there were two pulls for two messages: no claim was released.
        stats = await queues.stats("hot")
        assert (stats.messages, stats.waiting_pulls) == (0, 0)

    on_cluster(work)


def test_a_long_poll_notices_that_the_queue_is_spread_wider(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("hot", ("a", "b"))
        waiting = asyncio.create_task(queues.pull("hot", wait=30))
        await asyncio.sleep(0.1)
        await spread(cluster, "hot", 4)
        others = await cluster.connect()
        home = cluster.nodes["a"].router.shard_of("hot")
        # A message in another shard than the one in which the pull began to wait.
        for number in range(100):
            key = f"key{number}"
            places = cluster.nodes["a"].router.spread.places("hot")
            if places.places_of(key)[-1] != home:
                await others.push("hot", b"there", dedup_id=key)
                break
        claim = await asyncio.wait_for(waiting, TIMEOUT_S)
        assert claim.body == b"there"

    on_cluster(work)


def test_a_repeated_push_reaches_the_shard_that_knows_its_dedup_id(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("hot")
        ids: dict[int, str] = {}
        for shards in (1, 4, 2, 3):
            await spread(cluster, "hot", shards)
            for number in range(20):
                given = (await queues.push("hot", b"x", dedup_id=f"d{number}")).id
                assert ids.setdefault(number, given) == given
            command = PushMany("hot", [b"x"] * 20, [f"d{number}" for number in range(20)])
            more = await queues.service.execute(command)
            assert [each.id for each in more] == [ids[number] for number in range(20)]
        assert (await queues.stats("hot")).messages == 20

    on_cluster(work)


def test_groups_of_a_fifo_queue_stay_whole_and_in_order_while_its_spread_changes(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("line", ("a", "b"), fifo=True, dedup_per_group=True)
        groups = [f"g{number}" for number in range(8)]
        sent: Counter[str] = Counter()
        seen: dict[str, list[int]] = {group: [] for group in groups}
        stop = asyncio.Event()

        async def push(group):
            own = await cluster.connect()
            while not stop.is_set():
                number = sent[group]
                await own.push("line", b"%d" % number, group=group, dedup_id=f"{number}")
                sent[group] += 1
                await pace()

        async def pull():
            own = await cluster.connect()
            while not stop.is_set():
                for claim in await own.pull_many("line", 3, wait=1):
                    seen[claim.group].append(int(claim.body))
                    await own.delete(claim)

        tasks = [asyncio.create_task(push(group)) for group in groups]
        tasks += [asyncio.create_task(pull()) for _ in range(3)]
        for shards in (3, 1, 2, 4):
            await spread(cluster, "line", shards)
            pushed = sum(sent.values())
            await cluster.until(lambda pushed=pushed: sum(sent.values()) > pushed + 40)
        stop.set()
        await asyncio.gather(*tasks)
        while claims := await queues.pull_many("line", 100):
            for claim in claims:
                seen[claim.group].append(int(claim.body))
                await queues.delete(claim)
        assert min(sent.values()) > 3
        assert seen == {group: list(range(sent[group])) for group in groups}

    on_cluster(work)


def test_a_shard_that_is_no_longer_used_is_emptied_and_loses_the_queue(on_cluster, monkeypatch):
    monkeypatch.setattr("penstock.cluster.spread_rules.DEDUP_WINDOW_MS", 0)

    async def work(cluster):
        queues = await cluster.open_queue("hot", ("a", "b"))
        await spread(cluster, "hot", 4)
        for number in range(20):
            await queues.push("hot", b"%d" % number)
        held = await queues.pull_many("hot", 4)
        await spread(cluster, "hot", 1)
        for _ in range(5):
            await queues.push("hot", b"home")
        status = await cluster.nodes["a"].router.spread.status("hot")
        assert (len(status.shards), len(status.before)) == (1, 4)
        assert sum(status.messages.values()) == 25
        # Receipts are valid in whichever shard the message is.
        for claim in held:
            assert await queues.delete(claim)
        bodies = []
        while claim := await queues.pull("hot"):
            bodies.append(claim.body)
            await queues.delete(claim)
        assert len(bodies) == 21
        await cluster.until(
            lambda: sum("hot" in o.engine.shard.names for o in cluster.owned_shards()) == 1
        )
        status = await cluster.nodes["a"].router.spread.status("hot")
        assert (len(status.shards), status.before, len(status.messages)) == (1, (), 1)
        # And it is an ordinary queue again.
        await queues.push("hot", b"again")
        assert (await queues.pull("hot")).body == b"again"

    on_cluster(work)


def test_nothing_answered_is_lost_when_owners_crash_while_the_spread_changes(on_cluster):
    async def work(cluster):
        await cluster.add("a", "b", "c")
        await cluster.until_owned("a", "b", "c")
        queues = await cluster.connect()
        await queues.create("hot", visibility_timeout=600)
        pushed: set[str] = set()
        pulled: Counter[str] = Counter()
        stop = asyncio.Event()

        async def push(worker):
            number = 0
            while not stop.is_set():
                body = f"{worker}-{number}"
                await queues.push("hot", body.encode(), dedup_id=body)
                pushed.add(body)
                number += 1
                await pace()

        async def pull():
            while not stop.is_set():
                claim = await queues.pull("hot", wait=1)
                if claim is not None:
                    pulled[claim.body.decode()] += 1
                    await queues.delete(claim)

        tasks = [asyncio.create_task(push(worker)) for worker in range(3)]
        tasks += [asyncio.create_task(pull()) for _ in range(3)]

        async def more():
            before = len(pushed)
            await cluster.until(lambda: len(pushed) > before + 20)

        await spread(cluster, "hot", 4)
        await more()
        await cluster.crash("a")
        await spread(cluster, "hot", 2)
        await more()
        await cluster.until_owned("b", "c")
        await cluster.crash("b")
        await spread(cluster, "hot", 3)
        await more()
        stop.set()
        await asyncio.gather(*tasks)
        while claims := await queues.pull_many("hot", 100):
            pulled.update(claim.body.decode() for claim in claims)
        in_flight = (await queues.stats("hot")).in_flight
        # A pull whose answer was lost hides its message until the claim expires.
        assert len(pushed - pulled.keys()) <= in_flight
        assert max(pulled.values()) == 1
        assert len(pushed) > 20

    on_cluster(work)


def test_settings_purge_and_removal_reach_every_shard_of_a_queue(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("hot", ("a", "b"))
        await spread(cluster, "hot", 4)
        await queues.configure("hot", visibility_timeout=77, priority_age=600)
        shown = (await queues.service.execute(DescribeQueue("hot"))).settings
        assert (shown.visibility_ms, shown.annotations) == (77_000, {})
        everywhere = [o.engine.shard.names.get("hot") for o in cluster.owned_shards()]
        ages = [each.settings.priority_age_ms for each in everywhere if each is not None]
        assert ages == [600_000] * 4
        for _ in range(8):
            await queues.push("hot", b"x")
        claims = await queues.pull_many("hot", 8)
        left = {claim.deadline_ms - claim.first_pulled_at_ms for claim in claims}
        assert left == {77_000}
        for _ in range(8):
            await queues.push("hot", b"x")
        assert await queues.purge("hot") == 16
        assert (await queues.stats("hot")).messages == 0
        await queues.remove("hot")
        assert not [o for o in cluster.owned_shards() if "hot" in o.engine.shard.names]
        with pytest.raises(QueueNotFound):
            await queues.push("hot", b"x")
        await queues.create("hot")
        await queues.push("hot", b"new")
        assert (await queues.pull("hot")).body == b"new"

    on_cluster(work)


def test_an_attempt_that_is_repeated_finds_its_claims_in_whichever_shard_they_are(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("hot")
        await spread(cluster, "hot", 4)
        await queues.push("hot", b"one")
        first = await queues.pull_many("hot", 1, attempt_id="t1")
        for _ in range(8):
            await queues.push("hot", b"other")
        for _ in range(6):
            again = await queues.pull_many("hot", 1, attempt_id="t1")
            assert [each.receipt for each in again] == [each.receipt for each in first]

    on_cluster(work)


def test_a_batch_for_several_queues_some_of_them_spread_is_done_item_by_item(on_cluster):
    async def work(cluster):
        await cluster.add("a", "b")
        queues = await cluster.connect()
        for name in ("hot", "cold"):
            await queues.create(name)
        await spread(cluster, "hot", 4)
        pushes = [("hot", f"k{n}") for n in range(10)] + [("cold", f"k{n}") for n in range(10)]
        items = [Push(name, key.encode(), dedup_id=key) for name, key in pushes]
        router = cluster.nodes["b"].router
        replies = await router.execute(Batch([*items, Push("none", b"x")]))
        assert [type(each).__name__ for each in replies] == ["PushReply"] * 20 + ["QueueNotFound"]
        claims = await queues.pull_many("hot", 100)
        assert len(claims) == 10
        deletes = [Delete("hot", claim.receipt) for claim in claims]
        wrong = Delete("cold", claims[0].receipt)
        done = await router.execute(Batch([*deletes, wrong]))
        assert done[:10] == [True] * 10
        assert isinstance(done[10], InvalidReceipt)
        assert (await queues.stats("hot")).messages == 0

    on_cluster(work)


def test_a_fifo_queue_is_spread_only_if_it_knows_dedup_ids_by_group(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("line", fifo=True)
        with pytest.raises(InvalidField, match="dedup_per_group"):
            await spread(cluster, "line", 2)
        await queues.configure("line", dedup_per_group=True)
        await spread(cluster, "line", 2)
        with pytest.raises(InvalidField, match="dedup_per_group"):
            await queues.configure("line", dedup_per_group=False)
        for shards in (0, 5, -1):
            with pytest.raises(InvalidField, match="outside 1 to 4"):
                await spread(cluster, "line", shards)
        with pytest.raises(QueueNotFound):
            await spread(cluster, "none", 2)

    on_cluster(work)


def test_commands_in_a_batch_with_a_push_to_a_spread_queue_are_carried_out(on_cluster):
    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        router = cluster.nodes["a"].router
        home = router.shard_of("hot")
        cold = next(f"q{n}" for n in range(100) if router.shard_of(f"q{n}") == home)
        for name in ("hot", cold):
            await queues.create(name)
        await queues.push(cold, b"x")
        claim = await queues.pull(cold)
        await spread(cluster, "hot", 3)
        # In one turn of the event loop, by a router that does not know of the spread.
        works = [queues.delete(claim), *(queues.push("hot", b"%d" % n) for n in range(5))]
        works += [queues.push(cold, b"y"), queues.push("hot", b"k", dedup_id="k")]
        done = await asyncio.gather(*works)
        assert done[0] is True
        assert len({each.id for each in done[1:]}) == 7
        assert (await queues.stats("hot")).messages == 6
        assert [each.body for each in await queues.pull_many(cold, 10)] == [b"y"]

    on_cluster(work)


def test_a_setting_that_a_node_does_not_know_is_refused_and_changes_nothing(on_cluster):
    """An older node would lose it as the next owner, or refuse it in one shard of several."""

    async def work(cluster):
        queues = await cluster.open_queue("orders")
        await spread(cluster, "orders", 2)
        log = cluster.nodes["a"].node._replicated
        # As a node of a version before priority_age writes its register.
        await log.run(set_register("node.old", b'{"state":"up","endpoint":""}'))
        for change in (queues.configure, queues.create):
            with pytest.raises(InvalidField, match=r"priority_age.*node 'old'.*upgrade that node"):
                await change("orders", priority_age=5)
        await queues.configure("orders", priority_age=None, visibility_timeout=7)
        settings = (await queues.describe("orders")).settings
        assert settings.priority_age is None
        assert settings.visibility_timeout == 7
        await log.run(set_register("node.old", b'{"state":"left","endpoint":""}'))
        await queues.configure("orders", priority_age=5)
        assert (await queues.describe("orders")).settings.priority_age == 5

    on_cluster(work)
