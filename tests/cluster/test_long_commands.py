"""Large requests to the owner of a shard: executed in parts, with other requests in between."""

import asyncio
from itertools import pairwise

import pytest

from penstock.cluster.retry import read_answer
from penstock.errors import InvalidField, QueueNotFound
from penstock.service import (
    Batch,
    ConfigureQueue,
    CreateQueue,
    Pull,
    Push,
    PushMany,
    Redrive,
    Stats,
)
from penstock.wire import shard_protocol as protocol
from penstock.wire.frames.frames import PULL_MESSAGES_MAX
from tests.cluster.nodes import TIMEOUT_S

MANY = 10_000
ATTRIBUTES: dict[str, str | bytes] = {"kind": "test", "number": "17"}


def large(kind, count=MANY):
    """A request of this many items that take long to execute."""
    if kind == "batch":
        return Batch([Push("orders", b"%d" % n, attributes=ATTRIBUTES) for n in range(count)])
    return PushMany("orders", [b"%d" % n for n in range(count)], attributes=ATTRIBUTES)


async def counts_between_parts(owned):
    """The numbers of messages that another client is answered, who asks after each change.

    It asks in the event loop itself: a round through NATS may take as long as the whole request.
    """
    server, deliveries = owned._server, owned.engine.shard.names["orders"].deliveries
    sender, found = server._sender, {}

    class ReplyTaker:
        def send(self, subject, token, data):
            if subject != "here":
                sender.send(subject, token, data)
            elif data[:1] != protocol.IN_PROGRESS:
                found[token] = read_answer(Stats("orders"), data[:1], data[1:]).messages

    server._sender = ReplyTaker()
    (question,) = protocol.write_command(Stats("orders"))
    asked: list[int] = []
    while len(found) < len(asked) or len(deliveries) < MANY:
        if len(deliveries) > max(asked, default=0):
            asked.append(len(deliveries))
            server.receive(("here", asked[-1]), question)
        await asyncio.sleep(0)
    server._sender = sender
    return [found[token] for token in asked]


@pytest.mark.parametrize("kind", ["batch", "bulk push"])
def test_other_clients_are_answered_between_the_parts_of_a_large_request(on_cluster, kind):
    """Row 20: a request of 10,000 items is not one step of the owner's event loop."""

    async def work(cluster):
        queues = await cluster.open_queue("orders")
        (owned,) = cluster.owned_shards()
        watching = asyncio.create_task(counts_between_parts(owned))
        replies = await queues.service.execute(large(kind))
        assert len({reply.id for reply in replies}) == MANY
        seen = await watching
        assert any(0 < count < MANY for count in seen)
        assert seen == sorted(seen)
        bodies = [claim.body for claim in await queues.pull_many("orders", MANY)]
        assert bodies == [b"%d" % n for n in range(MANY)]

    on_cluster(work, shards=1)


def test_a_fault_in_the_last_item_of_a_large_bulk_push_changes_nothing(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        rows = [None] * 899 + [{"a": 5}]
        with pytest.raises(InvalidField):
            await queues.service.execute(
                PushMany("orders", [b"x"] * 900, each_attributes=rows)  # type: ignore[arg-type]
            )
        assert (await queues.stats("orders")).messages == 0
        items = [Push("orders" if n else "missing", b"x") for n in range(900)]
        replies = await queues.service.execute(Batch([*items]))
        assert isinstance(replies[0], QueueNotFound)
        assert (await queues.stats("orders")).messages == 899

    on_cluster(work, shards=1)


def test_settings_are_changed_after_the_last_part_of_a_large_request(on_cluster):
    """All parts are executed under the spread that the request was sent for."""

    async def work(cluster):
        queues = await cluster.open_queue("orders")
        (owned,) = cluster.owned_shards()
        server = owned._server
        replies: list[tuple[int, bytes]] = []
        done = asyncio.Event()

        class ReplyRecorder:
            def send(self, subject, token, data):
                if data[:1] != protocol.IN_PROGRESS:
                    replies.append((token, data[:1]))
                    if len(replies) == 2:
                        done.set()

        sender, server._sender = server._sender, ReplyRecorder()
        for message in protocol.write_command(large("batch", 2_000)):
            server.receive(("here", 1), message)
        (message,) = protocol.write_command(ConfigureQueue("orders", {"visibility_ms": 77_000}))
        server.receive(("here", 2), message)
        assert owned.engine.shard.names["orders"].settings.visibility_ms != 77_000
        async with asyncio.timeout(TIMEOUT_S):
            await done.wait()
        server._sender = sender
        assert replies == [(1, protocol.REPLY_WHOLE), (2, protocol.REPLY_WHOLE)]
        assert owned.engine.shard.names["orders"].settings.visibility_ms == 77_000
        assert (await queues.stats("orders")).messages == 2_000

    on_cluster(work, shards=1)


def test_a_large_request_for_an_old_spread_changes_nothing_and_is_sent_again(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        # The other router does not know that the queue is spread.
        await cluster.nodes["a"].router.spread.spread("orders", 2)
        replies = await queues.service.execute(large("batch", 1_000))
        assert len({reply.id for reply in replies}) == 1_000
        assert (await queues.stats("orders")).messages == 1_000

    on_cluster(work, shards=2)


def test_a_shard_is_handed_over_after_the_last_part_of_a_large_request(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        (owned,) = cluster.owned_shards()
        pushing = asyncio.create_task(queues.service.execute(large("batch")))
        await cluster.until(lambda: owned.engine.shard.names["orders"].deliveries)
        assert owned._server._running
        await owned.hand_over()
        assert not owned._server._running
        async with asyncio.timeout(TIMEOUT_S):
            assert len(await pushing) == MANY

    on_cluster(work, shards=1)


def test_a_pull_of_many_is_answered_in_several_replies_of_limited_size(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("orders")
        await queues.service.execute(PushMany("orders", [b"x"] * (PULL_MESSAGES_MAX + 500)))
        router = queues.service
        sizes = []
        shard_client = router._shard_client
        ask = shard_client.ask

        async def note_size(*arguments, **options):
            reply = await ask(*arguments, **options)
            sizes.append(len(reply))
            return reply

        shard_client.ask = note_size
        claims = await router.execute(Pull("orders", 10_000))
        assert sizes == [PULL_MESSAGES_MAX, 500]
        assert len({claim.id for claim in claims}) == PULL_MESSAGES_MAX + 500

    on_cluster(work, shards=1)


def is_gradual(counts: list[int]) -> bool:
    """Whether some of many were seen, and never many more than a moment before.

    The engine's own timer may settle a part between two others.
    """
    steps = [later - earlier for earlier, later in pairwise(counts)]
    return max(steps) <= 2 * 250 and any(0 < count < PULL_MESSAGES_MAX for count in counts)


def test_a_redrive_of_many_is_made_in_parts_and_a_pull_settles_in_parts(on_cluster):
    """Row 20: owners use the same parts as the frame server."""

    async def work(cluster):
        queues = await cluster.open_queue("orders")
        await queues.service.execute(CreateQueue("other"))
        await queues.service.execute(PushMany("orders", [b"x"] * PULL_MESSAGES_MAX))
        (owned,) = cluster.owned_shards()
        server = owned._server
        parts: dict[int, bytes] = {}
        replies: dict[int, bytes] = {}
        counts: list[int] = []
        names = owned.engine.shard.names

        class PartRecorder:
            def send(self, subject, token, data):
                if data[:1] in (protocol.REPLY_PART, protocol.REPLY_WHOLE):
                    parts[token] = parts.get(token, b"") + data[1:]
                if data[:1] not in (protocol.REPLY_PART, protocol.IN_PROGRESS):
                    replies[token] = data[:1]

        async def ask(token, command, count):
            (message,) = protocol.write_command(command)
            server.receive(("here", token), message)
            async with asyncio.timeout(TIMEOUT_S):
                while token not in replies:
                    counts.append(count())
                    await asyncio.sleep(0)
            return read_answer(command, replies[token], parts[token])

        sender, server._sender = server._sender, PartRecorder()
        redrive = Redrive("orders", "other", PULL_MESSAGES_MAX)
        assert await ask(1, redrive, lambda: names["other"].visible) == PULL_MESSAGES_MAX
        assert is_gradual(counts)
        pull = Pull("other", PULL_MESSAGES_MAX, visibility_ms=0)
        assert len(owned.engine.submit(pull)) == PULL_MESSAGES_MAX
        counts.clear()
        assert len(await ask(2, pull, lambda: names["other"].visible)) == PULL_MESSAGES_MAX
        assert is_gradual(counts)
        server._sender = sender

    on_cluster(work, shards=1)
