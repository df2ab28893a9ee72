"""What a cluster does beside its commands: snapshots, purges, repairs, drains; and its status."""

import asyncio
import json
import re

from penstock.cli import main
from penstock.cluster.jetstream import JetStream
from penstock.cluster.log import Bounds, ReadRegister, ReadSlots
from penstock.cluster.membership import set_register
from penstock.cluster.nats_servers import server_config
from penstock.cluster.operations import operate
from penstock.cluster.placement import first_shard
from penstock.cluster.snapshots import manifest_key
from penstock.cluster.spread_rules import spread_of, with_new_version, with_note
from penstock.service import ConfigureQueue, CreateQueue, Delete, DescribeQueue, Pull, Push
from tests.cluster.ledger import pace
from tests.cluster.nodes import TIMEOUT_S
from tests.cluster.plainlog import PlainLog
from tests.cluster.test_spread_queues import spread
from tests.cluster.test_takeover import SHARD, OwnerOnLog, filled


def test_the_log_is_purged_only_as_far_as_it_is_archived(quick_path):
    log = PlainLog()
    owner = OwnerOnLog(log, quick_path).take()
    owner.journal.archived_position = 0
    filled(owner, 40, 100_000)
    for claim in owner.do(Pull("q", 39)):
        owner.do(Delete("q", claim.receipt))
    for body in (b"after", b"later"):
        owner.do(Push("q", body))
        assert owner.snapshot()
    # Slot 1 opened the term, and has no part of the stream.
    assert log.firsts[SHARD] <= 2
    assert owner.journal.first_position == 0
    # In part: what is before it may go, what follows it stays.
    owner.journal.archived_position = 2_000_000
    owner.do(Push("q", b"in part"))
    assert owner.snapshot()
    assert 2 < log.firsts[SHARD] < 24
    assert owner.journal.first_position <= 2_000_000
    owner.journal.archived_position = owner.journal.durable_position
    owner.do(Push("q", b"all"))
    assert owner.snapshot()
    assert log.firsts[SHARD] > 30


def test_an_owner_takes_a_snapshot_by_itself_once_its_journal_has_grown(on_cluster, monkeypatch):
    monkeypatch.setattr("penstock.backends.engine.upkeep.GROWTH_BYTES_MIN", 50_000)
    monkeypatch.setattr("penstock.cluster.owned_shard._SNAPSHOT_CHECK_S", 0.05)

    async def work(cluster):
        await cluster.add("a")
        await cluster.until_owned("a")
        queues = await cluster.connect()
        await queues.create("q")
        (owned,) = cluster.owned_shards()

        async def manifest():
            return await owned._replicated.execute(ReadRegister(manifest_key(0)))

        await queues.push("q", b"x" * 1_000)
        assert not owned._upkeep.is_due
        assert await manifest() is None
        await queues.push_many("q", [b"x" * 1_000] * 80)
        # The journal looks at its growth when the next entry begins.
        await queues.push("q", b"x")
        async with asyncio.timeout(TIMEOUT_S):
            while await manifest() is None:
                pass
        # The next owner begins with it.
        await cluster.crash("a")
        await cluster.add("b")
        await cluster.until_owned("b")
        assert (await queues.stats("q")).visible == 82
        (owned,) = cluster.owned_shards()
        assert list(owned.directory.glob("snapshot-*"))

    on_cluster(work, shards=1)


def test_a_server_syncs_each_append_before_it_answers(tmp_path):
    """Without it a power cut of two machines could cost what was answered."""
    text = server_config(0, tmp_path, [1, 2, 3], [4, 5, 6], "secret", 1_000)
    (jetstream,) = re.findall(r"^jetstream \{(.*?)\}$", text, re.MULTILINE | re.DOTALL)
    assert "sync_interval: always" in jetstream


def test_settings_that_reached_only_the_home_shard_are_brought_to_the_others(
    on_cluster, monkeypatch
):
    """As if whoever configured the queue had died after the first of its commands."""
    monkeypatch.setattr("penstock.cluster.other_shards._MAINTENANCE_S", 0.05)

    async def work(cluster):
        queues = await cluster.open_queue("hot", ("a", "b"))
        await spread(cluster, "hot", 4)
        router = cluster.nodes["a"].router
        home = router.shard_of("hot")
        info = await router.ask(home, DescribeQueue("hot"))
        old = spread_of(info.settings)
        changes = {
            "visibility_ms": 77_000,
            "annotations": with_note(
                info.settings.annotations, with_new_version(old, old.changed_at_ms)
            ),
        }
        await router.ask(home, ConfigureQueue("hot", changes), old.version)

        def settings():
            shards = [each.engine.shard for each in cluster.owned_shards()]
            return [shard.names["hot"].settings for shard in shards]

        await cluster.until(lambda: {each.visibility_ms for each in settings()} == {77_000})
        assert len(settings()) == 4
        assert len({spread_of(each) for each in settings()}) == 1
        for number in range(8):
            await queues.push("hot", b"%d" % number)
        assert len(await queues.pull_many("hot", 8)) == 8

    on_cluster(work)


def test_a_copy_of_a_queue_in_a_shard_that_has_no_part_in_it_is_removed(on_cluster, monkeypatch):
    """As if whoever spread the queue had died after it made a copy, and the spread was undone."""
    monkeypatch.setattr("penstock.cluster.other_shards._MAINTENANCE_S", 0.02)

    async def work(cluster):
        queues = await cluster.open_queue("hot")
        await spread(cluster, "hot", 2)
        router = cluster.nodes["a"].router
        home = router.shard_of("hot")
        settings = (await router.ask(home, DescribeQueue("hot"))).settings
        stray = (home + 2) % 4
        copied = {"annotations": settings.annotations}
        await router.ask(stray, CreateQueue("hot", copied))

        def having():
            return {
                each.shard for each in cluster.owned_shards() if "hot" in each.engine.shard.names
            }

        assert stray in having()
        await cluster.until(lambda: having() == {home, (home + 1) % 4})
        await queues.push("hot", b"x")
        assert (await queues.stats("hot")).messages == 1

    on_cluster(work)


def test_stats_append_nothing_to_the_journal(on_cluster):
    async def work(cluster):
        queues = await cluster.open_queue("q")
        await queues.push("q", b"x")
        (owned,) = cluster.owned_shards()
        journal = owned.journal
        before = journal.last_sequence, journal.end_position
        for _ in range(50):
            assert (await queues.stats("q")).messages == 1
        assert await queues.list() == ["q"]
        assert (journal.last_sequence, journal.end_position) == before

    on_cluster(work, shards=1)


def test_a_drained_node_gives_its_shards_away_without_an_error_and_gets_none_back(on_cluster):
    """A push without a dedup id cannot be repeated: none may end in an error."""

    async def work(cluster):
        await cluster.add("a", "b", "c")
        await cluster.until_owned("a", "b", "c")
        queues = await cluster.connect()
        names = [f"q{n}" for n in range(8)]
        for name in names:
            await queues.create(name)
        stop = asyncio.Event()
        pushed = []

        async def push(name):
            while not stop.is_set():
                pushed.append((await queues.push(name, b"once")).id)
                await pace()

        workers = [asyncio.create_task(push(name)) for name in names]
        await cluster.until(lambda: len(pushed) > 20)
        assert await operate(cluster.address, lambda each: each.drain("a")) == 0
        before, later = len(pushed), set()
        other = cluster.nodes["b"].node

        def is_settled():
            later.update(cluster.owners().values())
            # Five times as long as nodes wait before they move shards.
            return asyncio.get_running_loop().time() - other.choice._changed_s > 1

        await cluster.until(is_settled)
        await cluster.until(lambda: len(pushed) > before + 20)
        assert later == {"b", "c"}
        stop.set()
        await asyncio.gather(*workers)
        held = [(await queues.stats(name)).visible for name in names]
        assert sum(held) == len(pushed) == len(set(pushed))
        status = await operate(cluster.address, lambda each: each.status())
        assert [(each.node, each.state, each.owned > 0) for each in status.nodes] == [
            ("a", "draining", False), ("b", "up", True), ("c", "up", True),
        ]  # fmt: skip

    on_cluster(work)


def test_status_shows_gaps_and_how_far_a_standby_is_behind(
    on_cluster, cluster_url, monkeypatch, capsys
):
    """A replica of the log answers once without a slot that is there."""

    async def shown(*words):
        status = ["cluster", "status", "--url", cluster_url, *words]
        assert await asyncio.to_thread(main, status) == 0
        return capsys.readouterr().out

    async def work(cluster):
        await cluster.add("a")
        await cluster.until_owned("a")
        queues = await cluster.connect()
        await queues.create("q")
        for _ in range(5):
            await queues.push("q", b"x")
        owner = cluster.nodes["a"].node
        await owner._replicated.run(set_register("pin.0", b"a"))
        execute = JetStream.execute
        missing, resumed = [1], asyncio.Event()
        resumed.set()

        async def execute_badly(log, request):
            if type(request) is not ReadSlots or log is owner._replicated:
                return await execute(log, request)
            await resumed.wait()
            answer = await execute(log, request)
            if len(answer) > 2 and missing:
                del answer[missing.pop()]
            return answer

        monkeypatch.setattr(JetStream, "execute", execute_badly)
        await cluster.add("b")
        other = cluster.nodes["b"].node
        await cluster.until(lambda: 0 in other._standbys and other._standbys[0].replica.gaps)
        slot = owner.owned[0].journal.slot
        # No read is on its way that could find what is pushed below.
        await cluster.until(lambda: other._standbys[0].replica.next_slot > slot)
        resumed.clear()
        for _ in range(4):
            await queues.push("q", b"y")
        behind = owner.owned[0].journal.slot - slot
        found = json.loads(await shown("--json"))
        (shard,) = found["shards"]
        assert (shard["standby"], shard["gaps"]) == ("b", 1)
        assert shard["standby_lag"] >= behind > 0
        assert [(each["node"], each["gaps"]) for each in found["nodes"]] == [("a", 0), ("b", 1)]
        nodes, shards = (part.splitlines() for part in (await shown()).split("\n\n"))
        assert nodes[0].split()[-2:] == ["gaps", "endpoint"]
        assert [line.split()[5:6] for line in nodes[1:]] == [["0"], ["1"]]
        assert shards[0].split()[-3:] == ["standby", "lag", "gaps"]
        assert shards[1].split()[-3:] == ["b", str(shard["standby_lag"]), "1"]
        # Whoever takes the shard over takes the count along.
        resumed.set()
        await operate(cluster.address, lambda each: each.move(0, "b"))
        found = json.loads(await shown("--json"))
        assert (found["shards"][0]["owner"], found["shards"][0]["gaps"]) == ("b", 1)
        assert (await queues.stats("q")).visible == 9

    on_cluster(work, shards=1)


def test_an_idle_cluster_appends_nothing_also_while_it_is_asked_for_stats(on_cluster, monkeypatch):
    """Each append is a sync on three servers."""
    # A queue that is being moved is looked at all the time.
    monkeypatch.setattr("penstock.cluster.other_shards._MAINTENANCE_S", 0.1)
    monkeypatch.setattr("penstock.cluster.other_shards._CHANGING_ROUNDS_MAX", 1)

    async def work(cluster):
        queues = await cluster.open_queue("plain", ("a", "b"))
        await queues.create("hot")
        await queues.create("moved")
        await queues.push("moved", b"stays where it is until somebody pulls it")
        await spread(cluster, "hot", 3)
        home = first_shard("moved", 4)
        await operate(cluster.address, lambda each: each.move_queue("moved", [(home + 1) % 4]))
        for name in ("plain", "hot"):
            await queues.push(name, b"x")

        async def slots():
            log = cluster.nodes["a"].node._replicated
            return [(await log.execute(Bounds(shard))).last for shard in range(4)]

        async def idle():
            found = await slots()
            for _ in range(15):
                await queues.stats("plain")
                await queues.stats("hot")
                await asyncio.sleep(0.1)
            return found == await slots()

        # The rest of what the cluster has to do after its start.
        async with asyncio.timeout(30):
            while not await idle():
                pass

    on_cluster(work)
