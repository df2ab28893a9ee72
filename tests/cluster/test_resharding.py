"""Clusters that get more shards under load, on nodes in one process and three NATS servers."""

import asyncio
from functools import partial

import msgspec
import pytest

from penstock.cli import main
from penstock.cluster.address import read_address
from penstock.cluster.log import ReadRegister
from penstock.cluster.membership import (
    GROWN_FORMAT,
    ClusterSettings,
    read_cluster_settings,
    set_register,
)
from penstock.cluster.open import open_node
from penstock.cluster.operations import Operator, operate
from penstock.cluster.placement import first_shard, grown_shard, shard_of_id
from penstock.errors import InvalidField, InvalidReceipt
from penstock.service import CreateQueue
from penstock.url import read_url
from tests.cluster.ledger import LoadLedger

NAMES = [f"queue{n}" for n in range(12)]
# Of these, two shards become four.
MOVING = [name for name in NAMES if grown_shard(name, 2, 4) >= 2]
# What a router knows that was opened before the cluster has grown.
STARTED = ClusterSettings(2, 3, b"", b"")


async def reshard(cluster, shards, moved=None):
    """Adds shards as `penstock cluster reshard` does; no router hears of it."""
    found: list[str] = [] if moved is None else moved
    return await operate(
        cluster.address, partial(Operator.reshard, shards=shards, moved=found.append)
    )


async def status(cluster):
    return await operate(cluster.address, lambda each: each.status())


async def places(cluster, queue):
    return await operate(cluster.address, lambda each: each.spread(queue, None))


def shard_of(cluster, message_id):
    return shard_of_id(message_id, cluster.nodes["a"].router._settings.identity)


def test_a_cluster_grows_under_load_and_keeps_every_promise(on_cluster):
    async def work(cluster):
        await cluster.add("a", "b")
        queues = await cluster.connect()
        ledger = LoadLedger(queues, NAMES)
        await ledger.begin()
        await ledger.next_answers(50)
        moved: list[str] = []
        growth = await reshard(cluster, 4, moved)
        assert sorted(moved) == sorted(MOVING)
        assert (growth.created_shards, growth.shards, growth.to_move) == (2, 4, 0)
        await ledger.next_answers(200)
        # Once more, by one shard: only its own queues move.
        more: list[str] = []
        await reshard(cluster, 5, more)
        assert sorted(more) == sorted(n for n in NAMES if grown_shard(n, 2, 5) == 4)
        await ledger.next_answers(200)
        for number, name in enumerate(NAMES, 1):
            new = (await queues.push(name, b"-%d" % number)).id
            assert shard_of(cluster, new) == grown_shard(name, 2, 5)
            assert (await places(cluster, name)).shards == (grown_shard(name, 2, 5),)
        assert await ledger.end() == []

    on_cluster(work, shards=2)


def test_claims_groups_and_dedup_ids_survive_a_growth(on_cluster):
    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        plain, line = MOVING[0], MOVING[1]
        await queues.create(plain)
        await queues.create(line, fifo=True)
        held = (await queues.push(plain, b"held", dedup_id="1")).id
        claim = await queues.pull(plain)
        for number in range(4):
            await queues.push(line, b"%d" % number, group="g", dedup_id=str(number))
        await reshard(cluster, 4)
        assert (await queues.push(plain, b"held", dedup_id="1")).id == held
        await queues.extend(claim, 60)
        assert await queues.delete(claim)
        await queues.push(line, b"4", group="g", dedup_id="4")
        await queues.push(line, b"5", group="h", dedup_id="5")
        assert shard_of(cluster, (await queues.push(line, b"x", group="h", dedup_id="5")).id) >= 2
        bodies = []
        while claims := await queues.pull_many(line, 10):
            for each in claims:
                bodies.append(each.body)
                await queues.delete(each)
        assert sorted(bodies) == [b"%d" % number for number in range(6)]
        assert [each for each in bodies if each != b"5"] == [b"%d" % n for n in range(5)]

    on_cluster(work, shards=2)


def test_routers_and_nodes_that_know_the_old_number_go_on(on_cluster):
    async def work(cluster):
        await cluster.add("a")
        old, other = await cluster.connect(), await cluster.connect()
        name = MOVING[0]
        await old.create(name)
        await reshard(cluster, 4)
        # A receipt and an id of a shard that this router has never heard of.
        await other.push(name, b"x")
        claim = await other.pull(name)
        assert int(claim.receipt[:3], 16) >= 2
        assert [each.kind for each in await old.history(claim.id)] == ["Pushed", "Claimed"]
        assert await old.delete(claim)
        with pytest.raises(InvalidReceipt):
            await old.delete(msgspec.structs.replace(claim, proof="fff" + claim.receipt[3:]))
        # A node may be started again with the URL that it was started with.
        joined = await open_node(cluster.address, directory=cluster.path / "again")
        await joined.close()
        with pytest.raises(InvalidField, match="shards=4, not 8; leave shards out"):
            await open_node(read_address(read_url(cluster.url.replace("shards=2", "shards=8"))))
        await old.push(name, b"y")
        assert (await old.pull(name)).body == b"y"

    on_cluster(work, shards=2)


def test_new_queues_are_made_in_their_shard_and_others_stay_where_they_were_put(on_cluster):
    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        by_hand, spread, new = MOVING[:3]
        for name in (by_hand, spread):
            await queues.create(name)
        home = first_shard(by_hand, 2)
        await operate(cluster.address, lambda each: each.move_queue(by_hand, [1 - home]))
        await operate(cluster.address, lambda each: each.spread(spread, 2))
        growth = await reshard(cluster, 4)
        assert (growth.queues, growth.to_move) == (2, 0)
        assert (await places(cluster, by_hand)).shards == (1 - home,)
        assert len((await places(cluster, spread)).shards) == 2
        # This router does not know yet that the cluster has grown.
        await queues.create(new, visibility_timeout=5)
        late = await cluster.connect()
        for settings in ({"visibility_timeout": 5}, {}):
            await late.create(new, **settings)
        await late.service.execute(CreateQueue(new, {"annotations": {}}))
        assert (await status(cluster)).growth.to_move == 1
        await reshard(cluster, 4)
        for name in MOVING[3:]:
            await late.create(name, annotations={"tag": "x"})
            await late.create(name)
            assert (await late.describe(name)).settings.annotations == {"tag": "x"}
            found = await places(cluster, name)
            assert (found.shards, found.before) == ((grown_shard(name, 2, 4),), ())
        growth = (await status(cluster)).growth
        assert (growth.queues, growth.to_move) == (len(MOVING), 0)
        # Back by hand to where it belongs: from now on it moves with the others.
        belongs = grown_shard(by_hand, 2, 4)
        await operate(cluster.address, lambda each: each.move_queue(by_hand, [belongs]))
        assert sorted(await late.list()) == sorted(MOVING)

    on_cluster(work, shards=2)


def test_a_growth_that_is_interrupted_is_continued_by_repeating_it(on_cluster):
    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        for name in NAMES:
            await queues.create(name)

        def end_after_two(moved, name):
            moved.append(name)
            if len(moved) == 2:
                raise RuntimeError

        moved: list[str] = []
        ending = partial(Operator.reshard, shards=4, moved=partial(end_after_two, moved))
        with pytest.raises(RuntimeError):
            await operate(cluster.address, ending)
        growth = (await status(cluster)).growth
        assert (growth.queues, growth.to_move) == (len(NAMES), len(MOVING) - 2)
        await reshard(cluster, 4, moved)
        assert sorted(moved) == sorted(MOVING)
        assert (await status(cluster)).growth.to_move == 0

    on_cluster(work, shards=2)


def test_a_growth_that_cannot_be_made_is_refused_and_changes_nothing(on_cluster):
    async def work(cluster):
        await cluster.add("a")
        for shards, text in ((1, "cannot have fewer"), (0, "outside 1 to"), (5_000, "outside 1")):
            with pytest.raises(InvalidField, match=text):
                await reshard(cluster, shards)
        log = cluster.nodes["a"].node._replicated
        old = b'{"state":"up","endpoint":"","settings":["priority_age_ms"]}'
        await log.run(set_register("node.old", old))
        with pytest.raises(InvalidField, match=r"reshard: node 'old' runs.*upgrade that node"):
            await reshard(cluster, 4)
        assert (await status(cluster)).growth is None
        await log.run(set_register("node.old", old.replace(b"up", b"left")))
        await reshard(cluster, 3)
        # Versions that know one format only are refused from now on.
        settings = read_cluster_settings(await log.execute(ReadRegister("cluster")))
        assert (settings.shards, settings.homes, settings.format) == (3, 2, GROWN_FORMAT)
        assert len((await status(cluster)).shards) == 3

    on_cluster(work, shards=2)


def test_the_command_line_shows_how_far_a_growth_has_come(on_cluster, capsys):
    async def work(cluster):
        await cluster.add("a")
        queues = await cluster.connect()
        for name in NAMES:
            await queues.create(name)

        async def run(*words):
            status = await asyncio.to_thread(main, ["cluster", *words, "--url", cluster.url])
            printed = capsys.readouterr()
            return status, printed.out or printed.err

        assert "grown" not in (await run("status"))[1]
        _, text = await run("reshard", "4")
        grown = f"grown from 2 to 4 shards; of {len(NAMES)} queues 0 are to be moved"
        assert text.splitlines()[-1].startswith(grown)
        assert text.endswith(f"; {len(MOVING)} were moved now\n")
        # A router that does not know the new number makes a queue in its home shard.
        await queues.remove(MOVING[0])
        queues.service.spread.known.settings = STARTED
        await queues.create(MOVING[0])
        tables, _, line = (await run("status"))[1].rpartition("\n\n")
        assert len(tables.splitlines()) == 2 + 1 + 1 + 4
        assert "queues 1 are to be moved (penstock cluster reshard 4), " in line
        for words, problem in (
            (("reshard", "3"), "this cluster has 4, and cannot have fewer again"),
            (("reshard", "0"), "shards: 0 is outside 1 to 4096"),
            (("move-queue", NAMES[0], "--to", "4"), "to: 4 is outside 0 to 3"),
            (("move-queue", "none", "--to", "1"), "no queue 'none'"),
        ):
            status, text = await run(*words)
            assert (status, problem in text) == (3, True), text

    on_cluster(work, shards=2)
