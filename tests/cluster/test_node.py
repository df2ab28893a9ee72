"""Nodes in one process on three real NATS servers: routing, takeover, moves, dead letters."""

import asyncio

import pytest

from penstock.cluster.address import read_address
from penstock.cluster.jetstream import JetStream
from penstock.cluster.log import ReadSlots
from penstock.cluster.membership import set_register
from penstock.cluster.open import open_node
from penstock.cluster.spread_rules import NOTE
from penstock.errors import InvalidField, StoreInUse
from penstock.service import ConfigureQueue, CreateQueue
from penstock.url import read_url
from tests.cluster.ledger import pace
from tests.cluster.nodes import TIMEOUT_S


def test_a_message_goes_through_a_cluster_of_one_node(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        pushed = (await queues.push("orders", b"hello")).id
        claim = await queues.pull("orders", wait=5)
        assert (claim.body, claim.id) == (b"hello", pushed)
        await queues.extend(claim, 60)
        assert await queues.delete(claim)
        assert (await queues.stats("orders")).messages == 0

    on_cluster(work)


def test_an_owner_that_crashes_is_replaced_and_nothing_answered_is_lost(on_cluster):
    async def work(cluster):
        await cluster.add("a", "b")
        await cluster.until_owned("a", "b")
        queues = await cluster.connect()
        names = [f"q{n}" for n in range(12)]
        for name in names:
            await queues.create(name)
            await queues.push(name, name.encode())
        held = {name: await queues.pull(name) for name in names[:4]}
        await cluster.crash("a")
        await cluster.until_owned("b")
        for name, claim in held.items():
            # The claims are in the log: the new owner has them, too.
            assert await queues.pull(name) is None
            assert await queues.delete(claim)
        for name in names[4:]:
            assert (await queues.pull(name)).body == name.encode()

    on_cluster(work)


def test_shards_move_to_a_node_that_joins_without_an_error(on_cluster):
    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        names = [f"q{n}" for n in range(8)]
        for name in names:
            await queues.create(name)
        stop = asyncio.Event()
        answered = 0

        async def use(name):
            nonlocal answered
            while not stop.is_set():
                await queues.push(name, b"x")
                await queues.delete(await queues.pull(name, wait=10))
                answered += 1
                await pace()

        workers = [asyncio.create_task(use(name)) for name in names]
        await cluster.add("b")
        await cluster.until_owned("a", "b")
        await cluster.end("a")
        await cluster.until_owned("b")
        before = answered
        await cluster.until(lambda: answered > before + 10)
        stop.set()
        await asyncio.gather(*workers)
        assert not any([(await queues.stats(name)).messages for name in names])

    on_cluster(work)


def test_a_shard_is_asked_for_only_once_the_standby_has_caught_up(on_cluster, monkeypatch):
    """What is not read by then is read while the shard has no owner and clients wait."""
    asked = []

    async def work(cluster):
        await cluster.add("a")
        await cluster.until_owned("a")
        queues = await cluster.connect()
        await queues.create("q")
        for number in range(60):
            await queues.push("q", b"%d" % number)
        await cluster.add("b")
        old, new = (cluster.nodes[name].node for name in "ab")
        execute, end_standby = JetStream.execute, new.end_standby

        async def execute_late(log, request):
            if log is new._replicated and type(request) is ReadSlots:
                # Longer than the time in which a move used to begin.
                await asyncio.sleep(0.3)
            return await execute(log, request)

        async def note_lag(shard):
            replica = await end_standby(shard)
            asked.append(old.owned[shard].journal.slot - (replica.next_slot - 1))
            return replica

        monkeypatch.setattr(JetStream, "execute", execute_late)
        monkeypatch.setattr(new, "end_standby", note_lag)
        await new._replicated.run(set_register("pin.0", b"b"))
        await cluster.until(lambda: 0 in new.owned)
        assert (await queues.stats("q")).visible == 60

    on_cluster(work, shards=1)
    assert max(asked) < 5


def test_new_standbys_are_started_one_at_a_time(on_cluster, monkeypatch):
    """Each has a whole log to read, on the event loop that serves the shards of its node."""
    started = []

    async def work(cluster):
        await cluster.add("a")
        await cluster.until_owned("a")
        await cluster.add("b")
        node = cluster.nodes["b"].node
        start_standby = node.resume_standby

        def count_new(replica):
            start_standby(replica)
            started.append(sum(each.is_new for each in node._standbys.values()))

        monkeypatch.setattr(node, "resume_standby", count_new)
        await cluster.until(lambda: len(node._standbys) + len(node.owned) == 8)

    on_cluster(work, shards=8)
    assert len(started) >= 8
    # A move starts a standby of its own.
    assert max(started) <= 2


def test_a_standby_reads_nothing_while_its_node_pauses_that(on_cluster, monkeypatch):
    """Clients wait for a shard that changes its owner; at most a second, if that does not end."""

    async def work(cluster):
        await cluster.add("a", "b")
        node = cluster.nodes["a"].node
        await cluster.until(lambda: node._standbys)
        shard, standby = next(iter(node._standbys.items()))
        replica = standby.replica
        with node.reading_paused(), node.reading_paused():
            assert replica.is_paused()
        assert not replica.is_paused()
        monkeypatch.setattr("penstock.cluster.node._READING_PAUSED_S", 0.0)
        with node.reading_paused():
            assert not replica.is_paused()
        monkeypatch.undo()
        await node.end_standby(shard)
        with node.reading_paused():
            # It is used to take the shard over.
            assert not replica.is_paused()

    on_cluster(work)


def test_a_fenced_owner_answers_nothing_and_discards_its_state(on_cluster):
    """Row 10: the old owner resumes after another has taken its shard."""

    async def work(cluster):
        await cluster.add("a")
        await cluster.until_owned("a")
        queues = await cluster.connect()
        await queues.create("q")
        # Another node's takeover, while the first has noticed nothing.
        await cluster.add("b")
        old = cluster.nodes["a"].node.owned[0]
        taken = cluster.nodes["b"].node
        await taken.end_standby(0)
        await taken.take_over(0, old.term)
        await cluster.until(lambda: 0 in taken.owned)
        old.service.submit(CreateQueue("stale"))
        await cluster.until(lambda: cluster.nodes["a"].node.owned.get(0) is not old)
        assert old.journal.failure is not None
        assert "stale" not in await queues.list()

    on_cluster(work, shards=1)


def test_a_waiting_pull_is_answered_after_its_owner_has_crashed(on_cluster):
    async def work(cluster):
        await cluster.add("a", "b")
        await cluster.until_owned("a", "b")
        queues = await cluster.connect()
        names = [f"q{n}" for n in range(6)]
        for name in names:
            await queues.create(name)
        waits = [asyncio.create_task(queues.pull(name, wait=60)) for name in names]
        await asyncio.sleep(0)
        await cluster.crash("b")
        await cluster.until_owned("a")
        for name in names:
            await queues.push(name, name.encode(), dedup_id="1")
        claims = await asyncio.wait_for(asyncio.gather(*waits), TIMEOUT_S)
        assert [claim.body.decode() for claim in claims] == names

    on_cluster(work)


def test_dead_letters_reach_a_queue_in_another_shard_and_come_back(on_cluster):
    async def work(cluster):
        await cluster.add("a", "b")
        queues = await cluster.connect()
        shards = {cluster.nodes["a"].router.shard_of(f"dead{n}"): f"dead{n}" for n in range(50)}
        home = cluster.nodes["a"].router.shard_of("work")
        dead = next(name for shard, name in shards.items() if shard != home)
        info = await queues.create("work", dead_letter=dead, max_receives=1)
        assert info.also_created == [dead]
        await queues.push("work", b"poison", attributes={"kind": "test"})
        await queues.release(await queues.pull("work"))
        found = await queues.pull(dead, wait=20)
        assert (found.body, found.source, found.attributes) == (b"poison", "work", {"kind": "test"})
        assert found.receives == 1
        await queues.release(found)
        assert await queues.redrive(dead) == 1
        assert (await queues.pull("work")).body == b"poison"
        assert (await queues.stats(dead)).messages == 0

    on_cluster(work)


def test_a_body_larger_than_a_message_of_nats_goes_through(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("large", max_body_bytes=8_000_000)
        body = bytes(range(256)) * 12_000
        await queues.push("large", body)
        assert (await queues.pull("large")).body == body

    on_cluster(work, shards=1)


def test_a_node_that_is_started_with_another_number_of_shards_is_refused(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        url = f"{cluster.url}&replicas=3"
        others = (("shards=4", "shards=8"), ("shards=4", "shards=3"), ("replicas=3", "replicas=1"))
        for other, named in others:
            with pytest.raises(InvalidField, match=f"{other}.*leave .* out"):
                await open_node(read_address(read_url(url.replace(other, named))))
        unnamed = read_address(read_url(cluster.url.replace("&shards=4", "")))
        joined = await open_node(unnamed, directory=cluster.path / "joined")
        await joined.close()
        await queues.push("orders", b"still there")
        assert (await queues.pull("orders")).body == b"still there"

    on_cluster(work)


def test_two_nodes_of_one_name_are_refused(on_cluster):
    async def work(cluster):
        await cluster.add("a")
        with pytest.raises(StoreInUse, match="'a' is already running"):
            await open_node(cluster.address, node="a", directory=cluster.path / "twin")
        await cluster.until_owned("a")

    on_cluster(work, shards=1)


def test_a_malformed_request_to_a_node_is_refused_and_changes_nothing(on_cluster):
    requests = [b"", b"yield", b"yield \xc2\xb2", b"yield -1", b"yield 0 0", b"x" * 100_000]

    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        await queues.create("orders")
        before = cluster.owners()
        client = queues.service._shard_client._client
        name = cluster.address.name
        for request in requests:
            answer = await client.request(f"{name}.node.a.ask", request, timeout=TIMEOUT_S)
            assert answer.data == b"? unknown request"
        for subject in ("owned.x", "grown.x", "grown.9999"):
            await client.publish(f"{name}.{subject}", b"\xff")
        await queues.push("orders", b"x")
        assert cluster.owners() == before

    on_cluster(work, shards=1)


def test_the_note_of_a_spread_queue_is_refused_in_the_settings_of_a_client(on_cluster):
    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        await queues.create("orders")
        for number, note in enumerate(("junk", "[1, 2]")):
            settings = {"annotations": {NOTE: note}}
            create = CreateQueue(f"other{number}", settings)
            for command in (create, ConfigureQueue("orders", settings)):
                with pytest.raises(InvalidField, match="penstock cluster spread"):
                    await queues.service.execute(command)
            # Another router may send it all the same: the owner goes on.
            await queues.service.ask(0, create)
            await queues.push("orders", b"x")
        assert (await queues.stats("orders")).messages == 2
        assert not cluster.nodes["a"].node.failures

    on_cluster(work, shards=1)
