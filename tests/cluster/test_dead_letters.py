"""Dead letters between shards arrive exactly once, also if owners or routers are killed."""

import asyncio

import pytest

from penstock.aio import AsyncQueues
from penstock.cluster.open import open_router
from penstock.errors import BackendLost, PenstockError, QueueExists, QueueNotFound
from penstock.life import dead_letter_move, life
from penstock.service import Claim, DescribeQueue, Pull, Redrive, Stats
from tests.cluster.nodes import TIMEOUT_S

COUNT = 12


class Between:
    """A queue whose shard one node owns, and its dead-letter queue in a shard of another."""

    def __init__(self, cluster):
        self.cluster = cluster

    async def begin(self, **settings):
        cluster = self.cluster
        await cluster.add("a", "b", "c")
        await cluster.until_settled()
        self.router = cluster.nodes["c"].router
        self.queues = await cluster.connect()
        self.work = self.name_owned_by("a", "work")
        self.dead = self.name_owned_by("b", "dead")
        settings = {"dead_letter": self.dead, "max_receives": 1, **settings}
        await self.queues.create(self.work, **settings)
        for number in range(COUNT):
            await self.queues.push(self.work, b"%d" % number)
        self.claims = await self.queues.pull_many(self.work, COUNT)
        assert len(self.claims) == COUNT

    def name_owned_by(self, node, prefix):
        owners = self.cluster.owners()
        for number in range(1_000):
            name = f"{prefix}{number}"
            if owners[self.router.shard_of(name)] == node:
                return name
        raise AssertionError("no such name")

    def source(self):
        """The current owner of the queue's shard; None while the shard moves."""
        shard = self.router.shard_of(self.work)
        owned = self.cluster.owned_shards()
        return next((each for each in owned if each.shard == shard), None)

    def has_settled(self):
        """Whether the shard has an owner, and no dead letter in its outbox."""
        source = self.source()
        return source is not None and not source.engine.shard.departed.deliveries

    async def release_all(self):
        """Makes dead letters of all messages."""
        await asyncio.gather(*(self.queues.release(claim) for claim in self.claims))

    async def check_arrived(self):
        """Every message is in the dead-letter queue once, with its source."""
        found: list[Claim] = []
        async with asyncio.timeout(TIMEOUT_S):
            while len(found) < COUNT:
                found += await self.queues.pull_many(self.dead, 100, wait=1)
        assert sorted(int(each.body) for each in found) == list(range(COUNT))
        assert {each.source for each in found} == {self.work}
        await self.cluster.until(self.has_settled)
        assert (await self.queues.stats(self.work)).messages == 0
        assert (await self.queues.stats(self.dead)).messages == COUNT


def between_shards(on_cluster, disturb, **settings):
    async def work(cluster):
        between = Between(cluster)
        await between.begin(**settings)
        await disturb(cluster, between)
        await between.check_arrived()

    on_cluster(work)


def test_the_owner_of_the_dead_letter_queue_is_killed_before_they_arrive(on_cluster):
    async def disturb(cluster, between):
        await cluster.crash("b")
        await between.release_all()
        # They are in the outbox, durably, until the other shard is taken over.
        assert (await between.queues.stats(between.work)).messages == 0

    between_shards(on_cluster, disturb)


def test_both_owners_are_killed_between_leaving_and_arriving(on_cluster):
    async def disturb(cluster, between):
        await cluster.crash("b")
        await between.release_all()
        await cluster.crash("a")

    between_shards(on_cluster, disturb)


def test_the_owner_is_killed_after_they_arrived_and_before_it_noted_that(on_cluster, monkeypatch):
    async def disturb(cluster, between):
        router = cluster.nodes["a"].router
        carried = asyncio.Event()
        push_dead_letter = router.push_dead_letter

        async def push_and_hang(push):
            await push_dead_letter(push)
            carried.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(router, "push_dead_letter", push_and_hang)
        await between.release_all()
        await asyncio.wait_for(carried.wait(), TIMEOUT_S)
        assert between.source().engine.shard.departed.deliveries
        await cluster.crash("a")

    between_shards(on_cluster, disturb)


def test_the_history_of_a_dead_letter_in_another_shard_says_where_it_went_and_why(on_cluster):
    async def disturb(cluster, between):
        await between.release_all()
        await cluster.until(between.has_settled)
        for claim in between.claims:
            events = await between.queues.history(claim.id)
            last = events[-1]
            assert (last.kind, last.to, last.dead) == ("Moved", between.dead, True)
            told = life(events, events[-1].at_ms)
            assert any(
                f"Dead-lettered from {between.work} to {between.dead} at " in each
                and ", after 1 delivery." in each
                for each in told.sentences
            )
            assert told.sentences[-1].startswith(f"It has waited in {between.dead} since ")
            move = dead_letter_move(events, between.dead, events[-1].at_ms)
            assert move is not None
            assert move.deliveries == 1

    between_shards(on_cluster, disturb)


def test_dead_letters_of_a_spread_queue_reach_a_spread_dead_letter_queue(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("work", ("a", "b"), dead_letter="dead", max_receives=1)
        router = cluster.nodes["a"].router
        await router.spread.spread("work", 3)
        await router.spread.spread("dead", 4)
        for number in range(COUNT):
            await queues.push("work", b"%d" % number)
        claims = await queues.pull_many("work", COUNT)
        await asyncio.gather(*(queues.release(claim) for claim in claims))
        found: list[Claim] = []
        async with asyncio.timeout(TIMEOUT_S):
            while len(found) < COUNT:
                found += await queues.pull_many("dead", 100, wait=1)
        assert {each.source for each in found} == {"work"}
        assert (await queues.stats("work")).messages == 0
        for claim in found:
            await queues.release(claim)
        assert await queues.redrive("dead") == COUNT
        back = await queues.pull_many("work", 100)
        assert sorted(int(each.body) for each in back) == list(range(COUNT))
        assert (await queues.stats("dead")).messages == 0

    on_cluster(work)


@pytest.mark.parametrize("spread", [False, True])
def test_a_redrive_that_is_interrupted_and_repeated_moves_each_message_once(
    on_cluster, monkeypatch, spread
):
    async def work(cluster):
        await cluster.add("a", "b")
        await cluster.until_owned("a", "b")
        queues = await cluster.connect()
        router = cluster.nodes["a"].router
        names = {router.shard_of(f"dead{n}"): f"dead{n}" for n in range(50)}
        dead = next(name for shard, name in names.items() if shard != router.shard_of("work"))
        await queues.create("work", dead_letter=dead, max_receives=1)
        await queues.configure(dead, visibility_timeout=1)
        if spread:
            await router.spread.spread("work", 3)
        for number in range(COUNT):
            await queues.push("work", b"%d" % number)
        for claim in await queues.pull_many("work", COUNT):
            await queues.release(claim)
        async with asyncio.timeout(TIMEOUT_S):
            while (await queues.stats(dead)).messages < COUNT:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        # A router that ends after it has pushed a message, before it has deleted it.
        ending = await open_router(cluster.address)
        deletes = deleted = 0
        by_receipt = ending._by_receipt

        async def end_router(command):
            nonlocal deletes, deleted
            deletes += 1
            if deletes == 4:
                await ending.close()
            reply = await by_receipt(command)
            # On a busy machine, some claims have expired before.
            deleted += 1
            return reply

        monkeypatch.setattr(ending, "_by_receipt", end_router)
        with pytest.raises(PenstockError):
            await AsyncQueues(ending).redrive(dead)
        moved = 0
        async with asyncio.timeout(TIMEOUT_S):
            while (await router.execute(Stats(dead))).messages:
                moved += await queues.redrive(dead)
                await asyncio.sleep(0.05)
        assert deleted <= 3
        assert moved == COUNT - deleted
        back = await queues.pull_many("work", 100)
        assert sorted(int(each.body) for each in back) == list(range(COUNT))

    on_cluster(work)


def test_a_redrive_that_takes_longer_than_its_claims_moves_each_message_once(
    on_cluster, monkeypatch
):
    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        router = cluster.nodes["a"].router
        home = router.shard_of("work")
        dead = next(f"dead{n}" for n in range(50) if router.shard_of(f"dead{n}") != home)
        await queues.create("work", dead_letter=dead, max_receives=1)
        await queues.configure(dead, visibility_timeout=0.5)
        for number in range(3):
            await queues.push("work", b"%d" % number)
        for claim in await queues.pull_many("work", 3):
            await queues.release(claim)
        pushes = 0
        push = router._push

        async def push_late(command):
            nonlocal pushes
            pushes += 1
            if pushes == 1:
                # Meanwhile the claims of this redrive expire.
                await asyncio.sleep(1)
            return await push(command)

        monkeypatch.setattr(router, "_push", push_late)
        moved = 0
        async with asyncio.timeout(TIMEOUT_S):
            while moved < 3:
                moved += await AsyncQueues(router).redrive(dead)
        back = await queues.pull_many("work", 100)
        assert sorted(int(each.body) for each in back) == [0, 1, 2]
        assert pushes > 3

    on_cluster(work)


# Queues that are made, or must not be removed, with others.


def in_another_shard(router, queue, prefix):
    home = router.shard_of(queue)
    return next(f"{prefix}{n}" for n in range(50) if router.shard_of(f"{prefix}{n}") != home)


def fail_descriptions(monkeypatch, router, name, fault):
    """Has `fault()` run before each description of this queue that a router asks for."""
    ask = router.ask

    async def ask_or_fail(shard, command, *rest, **options):
        if type(command) is DescribeQueue and command.queue == name:
            await fault()
        return await ask(shard, command, *rest, **options)

    monkeypatch.setattr(router, "ask", ask_or_fail)


@pytest.mark.parametrize("outage", [True, False])
def test_a_refused_queue_takes_no_dead_letter_queue_of_others_with_it(
    on_cluster, monkeypatch, outage
):
    """Row 26: an outage does not mean that a queue is missing, or that it may be removed."""

    async def work(cluster):
        queues = await cluster.open_queue("work", visibility_timeout=7)
        router = await open_router(cluster.address)
        cluster.undo.push_async_callback(router.close)
        dead = in_another_shard(router, "work", "dead")

        async def fault():
            await queues.create(dead)
            await queues.push(dead, b"kept")
            raise BackendLost("no answer") if outage else QueueNotFound("made since then")

        fail_descriptions(monkeypatch, router, dead, fault)
        settings = {"visibility_timeout": 8, "dead_letter": dead, "max_receives": 1}
        with pytest.raises(BackendLost if outage else QueueExists):
            await AsyncQueues(router).create("work", **settings)
        assert [each.body for each in await queues.peek(dead)] == [b"kept"]

    on_cluster(work)


@pytest.mark.parametrize("configure", [False, True])
def test_the_repeated_command_creates_the_dead_letter_queue_that_an_outage_left_out(
    on_cluster, monkeypatch, configure
):
    async def work(cluster):
        queues = await cluster.open_queue("work", visibility_timeout=7)
        router = cluster.nodes["a"].router
        name = "work" if configure else "new"
        dead = in_another_shard(router, name, "dead")
        settings = {"dead_letter": dead, "max_receives": 1}
        asked = 0

        async def fault():
            nonlocal asked
            asked += 1
            if asked == 1:
                raise BackendLost("no answer")

        fail_descriptions(monkeypatch, router, dead, fault)
        patched = AsyncQueues(router)
        order = patched.configure if configure else patched.create
        with pytest.raises(BackendLost):
            await order(name, **settings)
        assert dead not in await queues.list()
        assert (await order(name, **settings)).also_created == [dead]
        assert dead in await queues.list()

    on_cluster(work)


async def with_dead_letters(cluster, count):
    """A queue, its dead-letter queue in another shard with one of its messages and others."""
    await cluster.add("a")
    queues = await cluster.connect()
    router = cluster.nodes["a"].router
    dead = in_another_shard(router, "work", "dead")
    await queues.create("work", dead_letter=dead, max_receives=1)
    await queues.push("work", b"back")
    await queues.release(await queues.pull("work"))
    await queues.push_many(dead, [b"stays"] * count)
    return queues, router, dead


def test_a_redrive_that_meets_an_outage_says_so_and_holds_no_claim(on_cluster, monkeypatch):
    async def work(cluster):
        queues, router, dead = await with_dead_letters(cluster, 3)

        async def fault(command):
            raise BackendLost("no answer")

        monkeypatch.setattr(router, "_push", fault)
        with pytest.raises(BackendLost):
            await AsyncQueues(router).redrive(dead)
        assert (await queues.stats(dead)).visible == 4

    on_cluster(work)


@pytest.mark.parametrize("before", [0, 2])
def test_a_redrive_to_a_queue_that_is_deleted_meanwhile_is_refused_and_moves_no_more(
    on_cluster, monkeypatch, before
):
    """It said that it was done, and that it had moved nothing."""

    async def work(cluster):
        queues, router, dead = await with_dead_letters(cluster, 3)
        other = in_another_shard(router, dead, "other")
        await queues.create(other)
        pushed = 0
        push = router._push

        async def delete_first(command):
            nonlocal pushed
            if pushed == before:
                await queues.remove(other)
            pushed += 1
            return await push(command)

        monkeypatch.setattr(router, "_push", delete_first)
        redrive = AsyncQueues(router).redrive
        if before:
            assert await redrive(dead, to=other) == before
        with pytest.raises(QueueNotFound, match=other):
            await redrive(dead, to=other)
        assert (await queues.stats(dead)).visible == 4 - before

    on_cluster(work)


def test_a_redrive_passes_by_messages_whose_source_is_deleted_meanwhile(on_cluster, monkeypatch):
    async def work(cluster):
        queues, router, dead = await with_dead_letters(cluster, 3)
        push = router._push

        async def delete_first(command):
            await queues.remove("work")
            return await push(command)

        monkeypatch.setattr(router, "_push", delete_first)
        assert await router.execute(Redrive(dead)) == 0
        assert (await queues.stats(dead)).visible == 4

    on_cluster(work)


def test_a_redrive_passes_by_a_limited_number_of_messages_and_releases_them(
    on_cluster, monkeypatch
):
    monkeypatch.setattr("penstock.cluster.router._UNMOVED_MAX", 150)

    async def work(cluster):
        queues, router, dead = await with_dead_letters(cluster, 450)
        pulls = 0
        pull = router.spread.pull

        async def count_pull(command: Pull):
            nonlocal pulls
            pulls += 1
            return await pull(command)

        monkeypatch.setattr(router.spread, "pull", count_pull)
        assert await AsyncQueues(router).redrive(dead) == 1
        assert pulls == 2
        assert (await queues.stats(dead)).visible == 450

    on_cluster(work)
