"""Commands that share a Batch to a shard: each is answered, refused and repeated separately."""

import asyncio

import pytest

from penstock.cluster.retry import NotDone
from penstock.cluster.sender import in_slices
from penstock.errors import InvalidField, InvalidReceipt, QueueNotFound
from penstock.service import Delete, Extend, Pull, Push, PushReply
from penstock.wire import shard_protocol as protocol
from tests.cluster.nodes import TIMEOUT_S


def test_commands_of_one_turn_share_entries_and_keep_their_order(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        await cluster.until_owned("a")
        journal = cluster.nodes["a"].node.owned[0].journal
        before = journal.last_sequence
        sent = await asyncio.gather(*(queues.push("orders", b"%d" % n) for n in range(100)))
        # Batches of 32, 32, 32 and 4; there may be some other entries.
        assert journal.last_sequence - before < 10
        claims = await queues.pull_many("orders", 100)
        assert [int(claim.body) for claim in claims] == list(range(100))
        assert [claim.id for claim in claims] == [each.id for each in sent]
        before = journal.last_sequence
        assert all(await asyncio.gather(*map(queues.delete, claims)))
        assert journal.last_sequence - before < 10

    on_cluster(work, shards=1)


def test_pushes_to_a_spread_queue_share_entries_in_each_of_its_shards(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("hot")
        await cluster.nodes["a"].router.spread.spread("hot", 2)
        await queues.push("hot", b"reads the spread")
        journals = [each.journal for each in cluster.nodes["a"].node.owned.values()]
        before = sum(each.last_sequence for each in journals)
        pushes = [queues.push("hot", b"%d" % n) for n in range(60)]
        # A push whose key may be in a shard of the earlier spread is sent alone.
        keyed = [queues.push("hot", b"k", dedup_id=f"{n}") for n in range(4)]
        sent = await asyncio.gather(*pushes, *keyed)
        assert len({each.id for each in sent}) == 64
        assert sum(each.last_sequence for each in journals) - before < 20
        assert sum((await queues.service.spread.status("hot")).messages.values()) == 65

    on_cluster(work, shards=2)


def test_a_command_refused_in_a_batch_gets_the_error_that_it_gets_alone(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        execute = queues.service.execute
        (claim,) = await claim_one(queues)
        commands = [
            Push("orders", b"first"),
            Push("orders", b"misspelt", delay_ms="soon"),  # type: ignore[arg-type]
            Push("nowhere", b"lost"),
            Delete("orders", "000-forged"),
            Extend("orders", claim.receipt, 60_000),
            Push("orders", b"unsendable", attributes={"a": object()}),  # type: ignore[dict-item]
            Push("orders", b"last"),
        ]
        together = await asyncio.gather(*map(execute, commands), return_exceptions=True)
        alone: list[object] = []
        for command in commands:
            alone += await asyncio.gather(execute(command), return_exceptions=True)
        expected = [None, InvalidField, QueueNotFound, InvalidReceipt, None, InvalidField, None]
        for kind, one, other in zip(expected, together, alone, strict=True):
            if kind is None:
                assert not isinstance(one, Exception)
            else:
                assert type(one) is type(other) is kind
                assert str(one) == str(other)
        bodies = {each.body for each in await queues.pull_many("orders", 10)}
        assert bodies == {b"first", b"last"}

    on_cluster(work, shards=1)


async def claim_one(queues):
    await queues.push("orders", b"held")
    return await queues.pull_many("orders", 1)


def test_a_cancelled_command_does_not_affect_the_others_of_its_batch(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        tasks = [asyncio.create_task(queues.push("orders", b"%d" % n)) for n in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[3], asyncio.CancelledError)
        answered = {each.id for each in done if isinstance(each, PushReply)}
        assert len(answered) == 9
        found = await queues.service.execute(Pull("orders", 20))
        assert {claim.id for claim in found} >= answered

    on_cluster(work, shards=1)


def test_items_of_a_message_come_in_order_with_turns_between_them():
    async def work():
        items = [(n, b"x" * 1_000) for n in range(10)]
        ((_, message),) = protocol.pack(items)
        turns = 0

        def count():
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(count)

        count()
        found = [each async for each in in_slices(message)]
        assert found == items
        assert turns >= 3

    asyncio.run(work())


def test_items_without_data_have_turns_between_them_too():
    async def work():
        items = [(n, b"") for n in range(1_000)]
        ((_, message),) = protocol.pack(items)
        turns = 0

        def count():
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(count)

        count()
        assert [each async for each in in_slices(message)] == items
        assert turns >= 5

    asyncio.run(work())


def test_parts_of_requests_are_joined_by_sender_and_the_oldest_are_dropped(monkeypatch):
    monkeypatch.setattr(protocol, "_HALF_RECEIVED_MAX", 3)
    monkeypatch.setattr(protocol, "_HALF_RECEIVED_BYTES_MAX", 100)
    monkeypatch.setattr(protocol, "FRAME_BYTES_MAX", 60 - protocol.PART_BYTES)
    assembly = protocol.Assembly()
    for sender in ("a", "b"):
        assembly.add(sender, b"1" + sender.encode())
        assembly.add(sender, b"2")
    assert assembly.whole("b", b"3") == b"1b23"
    assert assembly.whole("b", b"alone") == b"alone"
    for sender in ("c", "d", "e"):
        assembly.add(sender, sender.encode())
    assert assembly.whole("a", b"too many") == b"too many"
    assembly.add("c", b"x" * 50)
    assembly.add("d", b"y" * 50)
    assert assembly.whole("c", b"all too large") == b"all too large"
    assembly.add("d", b"y" * 20)
    assert assembly.whole("d", b"itself too large") == b"itself too large"
    assert assembly.whole("e", b"!") == b"e!"
    assert assembly._bytes == 0


@pytest.mark.parametrize("size", [0, 1, 1_024, 1_025, 70_000])
def test_bodies_of_every_size_arrive_whole(on_cluster, size):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        body = bytes(n % 251 for n in range(size))
        await asyncio.gather(*(queues.push("orders", body) for _ in range(40)))
        claims = await queues.pull_many("orders", 100)
        assert [claim.body for claim in claims] == [body] * 40

    on_cluster(work, shards=1)


def test_a_request_that_was_lost_on_its_way_is_sent_again(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        owned = cluster.nodes["a"].node.owned[0]
        client = cluster.nodes["a"].node._client
        subject = f"{cluster.address.name}.serve.0.{owned.term}"
        # Another subscriber gets the message, so that NATS does not report it as undelivered.
        received = asyncio.Event()

        async def discard(message):
            received.set()

        instead = await client.subscribe(subject, cb=discard)
        await owned._subscription.unsubscribe()
        await client.flush()
        pushing = asyncio.create_task(queues.push("orders", b"lost", dedup_id="once"))
        await received.wait()
        owned._subscription = await client.subscribe(subject, cb=owned._receive)
        await instead.unsubscribe()
        async with asyncio.timeout(TIMEOUT_S):
            sent = await pushing
        assert [claim.id for claim in await queues.pull_many("orders", 10)] == [sent.id]

    on_cluster(work, shards=1)


def test_a_command_is_repeated_at_once_if_the_owner_announces_itself_meanwhile(
    on_cluster, monkeypatch
):
    """A router may read the term from the register before the new owner has subscribed."""

    async def work(cluster):
        await cluster.add("a")
        await cluster.until_owned("a")
        queues = await cluster.connect()
        await queues.create("orders")
        shard_client, node = queues.service._shard_client, cluster.nodes["a"].node
        try_once = shard_client._try
        tries = 0

        async def fail_twice(*arguments):
            nonlocal tries
            tries += 1
            if tries == 2:
                counted = shard_client._announced.get(0, 0)
                term = str(node.owned[0].term).encode()
                await node._client.publish(f"{node._name}.owned.0", term)
                await cluster.until(lambda: shard_client._announced.get(0, 0) > counted)
            if tries <= 2:
                raise NotDone("no owner listens there yet")
            return await try_once(*arguments)

        monkeypatch.setattr(shard_client, "_try", fail_twice)
        monkeypatch.setattr("penstock.cluster.retry._RETRY_S", 600.0)
        monkeypatch.setattr("penstock.cluster.retry._RETRY_S_MAX", 600.0)
        async with asyncio.timeout(TIMEOUT_S):
            await queues.push("orders", b"x")
        assert tries == 3

    on_cluster(work, shards=1)
