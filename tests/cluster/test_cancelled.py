"""A cancelled pull through a router gives back what it has claimed, on real NATS servers."""

import asyncio

from penstock.service import Pull

MANY = 5_000


def test_a_cancelled_pull_of_many_messages_keeps_none_of_them(on_cluster):
    """An answer has at most 2,000 messages: the first claims are here while the rest is asked."""

    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        await queues.create("orders", visibility_timeout=12 * 3_600)
        await queues.push_many("orders", [b"x"] * MANY)
        pulling = asyncio.create_task(queues.pull_many("orders", MANY))
        calls = queues.service._shard_client._calls

        def asks_for_the_rest():
            pulls = [each.command for each in calls.values() if type(each.command) is Pull]
            return any(pull.limit < MANY for pull in pulls)

        await cluster.until(asks_for_the_rest)
        pulling.cancel()
        stats = await queues.stats("orders")
        while stats.in_flight:
            stats = await queues.stats("orders")
        assert stats.visible == MANY
        # They were claimed once, and can be claimed again at once.
        assert len(await queues.pull_many("orders", MANY)) == MANY

    on_cluster(work, shards=1)
