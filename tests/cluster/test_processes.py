"""A cluster of real processes that are killed, stopped and resumed."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import time
from functools import partial

import msgspec
import pytest

import penstock.aio
from penstock.cli import main
from penstock.cluster.jetstream import open_client
from penstock.cluster.operations import Operator, operate
from penstock.cluster.placement import first_shard, grown_shard
from penstock.cluster.sender import Sender
from penstock.core.events import Claimed
from penstock.journal import codec
from penstock.journal.reader import JournalReader
from penstock.journal.segments import Segments
from penstock.journal.store import journals_in
from penstock.service import Peek, Pull, Push, Stats
from penstock.wire import shard_protocol as protocol
from tests.cluster.ledger import LoadLedger
from tests.cluster.processes import TIMEOUT_S
from tests.conftest import FULL
from tests.measure import SLACK

STOPS = 50 if FULL else 3
MOVES = 50 if FULL else 4
KILLS = 20 if FULL else 2
# The limits of the scorecard (rows 10 and 11).
FAILOVER_S = 10 * SLACK
HEALED_S = 15 * SLACK
_names = (f"queue{n}" for n in itertools.count())


def with_ledger(cluster, disturb, queues=4, names=None):
    """Runs the clients of a ledger during a fault; the violations that it found."""
    names = names or [next(_names) for _ in range(queues)]

    async def work():
        await cluster.until_served()
        async with await penstock.aio.connect(cluster.url) as connected:
            ledger = LoadLedger(connected, names)
            await ledger.begin()
            await ledger.next_answers(50)
            await disturb(ledger)
            await ledger.next_answers(50)
            return await ledger.end(), ledger

    wrong, ledger = asyncio.run(work())
    assert ledger.pushed
    return wrong


def names_in_shard(shard, count=1):
    """Names of queues in a shard."""
    return list(itertools.islice((n for n in _names if first_shard(n, 4) == shard), count))


class Pauses:
    """Measures how long a shard does not answer after each of several faults."""

    def __init__(self, queues, shard=0):
        self.queues = queues
        (self.name,) = names_in_shard(shard)
        self.took_s: list[float] = []

    async def measure(self):
        """Waits until a push to the shard is answered, which must be within the limit."""
        began_s = time.monotonic()
        async with asyncio.timeout(FAILOVER_S):
            await self.queues.push(self.name, b"x", dedup_id=f"{len(self.took_s)}")
        self.took_s.append(time.monotonic() - began_s)

    def figure(self, what):
        worst_s = max(self.took_s)
        return f"answers {worst_s:.2f} s after {what}, {len(self.took_s)} times; 0 answered lost"


def test_killing_owners_loses_nothing_that_was_answered(local_cluster, record_property):
    """Row 9: owners are killed with -9; another answers within 10 s, nothing answered is lost."""
    pauses = []

    async def kill(ledger):
        pause = Pauses(ledger.queues)
        pauses.append(pause)
        await ledger.queues.create(pause.name)
        for _ in range(KILLS):
            await local_cluster.until_served()
            victim = await local_cluster.owner(0)
            local_cluster.signal(victim, signal.SIGKILL)
            await pause.measure()
            await ledger.next_answers(100)
            local_cluster.start_again(victim)

    assert with_ledger(local_cluster, kill) == []
    record_property("figure", pauses[0].figure("kill -9"))


@pytest.fixture
def pipeline(capsys):
    def run(*words):
        """The lines that `penstock pipeline` prints, decoded, and its exit status."""
        status = main(["pipeline", *map(str, words), "--json"])
        printed = capsys.readouterr()
        assert status in (0, 1), printed.err
        return [json.loads(line) for line in printed.out.splitlines()], status

    return run


@pytest.mark.service("default-jre-headless")
def test_the_audit_of_the_archive_holds_over_failovers_and_finds_a_planted_fault(
    local_cluster, pipeline, tmp_path
):
    """Row 9: owners are killed with -9, and the journal they leave is audited from end to end.

    It is the second test of this file, so that the archive has little more than the kills above.
    """
    pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

    async def kill(ledger):
        await local_cluster.until_served()
        victim = await local_cluster.owner(0)
        local_cluster.signal(victim, signal.SIGKILL)
        await local_cluster.until_replaced(0, victim, FAILOVER_S)
        await ledger.next_answers(50)
        local_cluster.start_again(victim)

    assert with_ledger(local_cluster, kill) == []
    asyncio.run(hold_a_message(local_cluster))
    asyncio.run(local_cluster.until_archived())
    copy = tmp_path / "archive"
    shutil.copytree(local_cluster.archive, copy)
    journals = journals_in(copy)
    assert len(journals) == 4
    terms = {journal: read_terms(journal) for journal in journals}
    assert len(set(terms[journals[0]])) > 1
    lake = tmp_path / "lake"
    pipeline("run", "--journal", copy, "--lake", lake)
    [verdict, *found], status = pipeline("audit", "--lake", lake)
    assert (status, found) == (0, [])
    assert verdict["events"] == sum(map(len, terms.values()))
    for check in ("terms rise", "one holder", "nothing lost", "no gaps"):
        assert verdict["counts"][check] == 0
    # A fault: an owner that was replaced, and still writes.
    plant(journals[0])
    faulty = tmp_path / "faulty"
    pipeline("run", "--journal", journals[0], "--lake", faulty)
    [verdict, *found], status = pipeline("audit", "--lake", faulty)
    assert (status, verdict["holds"]) == (1, False)
    assert verdict["counts"]["terms rise"] == 1
    assert verdict["counts"]["one holder"] >= 1
    assert {each["finding"]["check"] for each in found} >= {"terms rise", "one holder"}


def read_terms(journal):
    with JournalReader(journal, archive=journal) as reader:
        return [each.term for each in reader.events()]


async def hold_a_message(cluster):
    """Claims a message of shard 0 for a long time."""
    (name,) = names_in_shard(0)
    async with await penstock.aio.connect(cluster.url) as queues:
        await queues.create(name, visibility_timeout=10_000)
        await queues.push(name, b"held", dedup_id="1")
        assert await queues.pull(name) is not None


def plant(journal):
    """Appends another claim of a message that is in flight, by the first owner of the shard."""
    with JournalReader(journal, archive=journal) as reader:
        events = list(reader.events())
    held = [each.event for each in events if type(each.event) is Claimed][-1]
    again = msgspec.structs.replace(held, epoch=held.epoch + 1)
    with Segments.open(journal, background=False) as segments:
        block, _ = codec.encode([again], events[0].shard, events[0].term)
        segments.append([block], version=codec.VERSION)


def test_a_planned_move_causes_no_error(local_cluster):
    """A push without a dedup id cannot be repeated: none may end in an error."""

    async def work():
        await local_cluster.until_served()
        stopped = False
        async with await penstock.aio.connect(local_cluster.url) as queues:
            names = names_in_shard(0, 4)
            for name in names:
                await queues.create(name)
            pushed = []

            async def push(name):
                while not stopped:
                    pushed.append((await queues.push(name, b"once")).id)

            tasks = [asyncio.create_task(push(name)) for name in names for _ in range(4)]
            terms = set()
            for _ in range(MOVES):
                owner = await local_cluster.owner(0)
                other = next(name for name in local_cluster.nodes if name != owner)
                await operate(local_cluster.address, partial(Operator.move, shard=0, node=other))
                terms.add((await local_cluster.status()).shards[0].term)
                before = len(pushed)
                while len(pushed) < before + 100 and not any(task.done() for task in tasks):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            stopped = True
            await asyncio.gather(*tasks)
            assert len(terms) == MOVES
            held = [(await queues.stats(name)).visible for name in names]
            assert sum(held) == len(pushed) == len(set(pushed))

    asyncio.run(work())


def test_an_owner_that_is_stopped_and_resumed_answers_nothing_stale(local_cluster, record_property):
    """Row 10: SIGSTOP of a shard's owner, then resume; the failover takes less than 10 s."""
    pauses = []

    async def stop(ledger):
        pause = Pauses(ledger.queues)
        pauses.append(pause)
        await ledger.queues.create(pause.name)
        for _ in range(STOPS):
            await local_cluster.until_served()
            victim = await local_cluster.owner(0)
            local_cluster.signal(victim, signal.SIGSTOP)
            try:
                await pause.measure()
                await ledger.next_answers(50)
                if FULL:
                    await asyncio.sleep(30)
            finally:
                local_cluster.signal(victim, signal.SIGCONT)
            await ledger.next_answers(50)

    assert with_ledger(local_cluster, stop) == []
    record_property("figure", pauses[0].figure("SIGSTOP"))


def test_an_owner_that_was_replaced_never_answers(local_cluster):
    """Row 10: a command that reaches an old owner by its old term is not carried out."""

    async def work():
        await local_cluster.until_served()
        async with await penstock.aio.connect(local_cluster.url) as queues:
            (name,) = names_in_shard(0)
            await queues.create(name)
            await queues.push(name, b"before")
            shard = (await local_cluster.status()).shards[0]
            client = await open_client(local_cluster.address, "test")
            replies: dict[int, bytes] = {}
            answered = asyncio.Event()

            async def take(message):
                for token, data in protocol.unpack(message.data):
                    if data[:1] != protocol.IN_PROGRESS:
                        replies.setdefault(token, data[:1])
                        if len(replies) == len(commands):
                            answered.set()

            inbox = client.new_inbox()
            await client.subscribe(inbox + protocol.REPLIES, cb=take)
            commands = [Stats(name), Peek(name), Push(name, b"stale"), Pull(name, wait_ms=0)]
            local_cluster.signal(shard.owner, signal.SIGSTOP)
            try:
                # They arrive while it is stopped, and are the first that it handles then.
                sender = Sender(client, inbox)
                for token, command in enumerate(commands):
                    (message,) = protocol.write_command(command)
                    sender.send(f"penstock.serve.0.{shard.term}", token, message)
                await sender.drain()
                await client.flush()
                await local_cluster.until_replaced(0, shard.owner, FAILOVER_S)
                # The dedup id lets the router repeat it, if it asks the old owner first.
                await queues.push(name, b"after", dedup_id="after")
            finally:
                local_cluster.signal(shard.owner, signal.SIGCONT)
            async with asyncio.timeout(TIMEOUT_S):
                await answered.wait()
            assert set(replies.values()) <= {protocol.NOT_OWNER, protocol.LOST}
            bodies = {claim.body for claim in await queues.pull_many(name, 10)}
            assert bodies == {b"before", b"after"}
            await client.close()

    asyncio.run(work())


def test_a_nats_server_is_killed_under_load_and_comes_back(local_cluster, record_property):
    """Row 11: one server of three is lost; clients go on, and it heals within 15 s."""
    healed = []

    async def lose(number, ledger):
        os.kill(local_cluster.nats[number], signal.SIGKILL)
        began_s = time.monotonic()
        async with asyncio.timeout(HEALED_S):
            await ledger.next_answers(100)
        healed.append(time.monotonic() - began_s)
        local_cluster.start_nats_again(number)
        async with asyncio.timeout(HEALED_S):
            await ledger.next_answers(50)

    async def lose_one_after_another(ledger):
        await lose(0, ledger)
        # The first one must have caught up, or there would be no majority.
        await local_cluster.until_served()
        await lose(1, ledger)

    assert with_ledger(local_cluster, lose_one_after_another) == []
    record_property("figure", f"a NATS server killed: healed in {max(healed):.1f} s")


def test_without_a_majority_nothing_is_answered_and_it_heals(local_cluster, record_property):
    """Row 11: two of three NATS servers are stopped; nothing that was answered is lost."""
    healed = []

    async def lose_majority(ledger):
        for pid in local_cluster.nats[:2]:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3):
                    # Answers in flight may still come, and then no more.
                    await ledger.next_answers(100_000)
            before = len(ledger.pushed)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    await ledger.next_answers(100_000)
            assert len(ledger.pushed) == before
        finally:
            for pid in local_cluster.nats[:2]:
                os.kill(pid, signal.SIGCONT)
        began_s = time.monotonic()
        async with asyncio.timeout(HEALED_S):
            await ledger.next_answers(50)
        healed.append(time.monotonic() - began_s)

    assert with_ledger(local_cluster, lose_majority) == []
    record_property("figure", f"two NATS servers stopped: healed in {max(healed):.1f} s")


def test_a_queue_that_is_moved_while_its_owner_is_killed_keeps_every_promise(local_cluster):
    """Row 9: the owner of the old shard is killed with -9 while `move-queue` works."""
    (name,) = names_in_shard(0)
    moved = []

    async def move(ledger):
        for number, (to, left) in enumerate([(2, 0), (3, 2), (0, 3)]):
            await local_cluster.until_served()
            victim = await local_cluster.owner(left)
            moving = asyncio.create_task(asyncio.to_thread(local_cluster.move_queue, name, to))
            if number == 1:
                await ledger.next_answers(1)
            local_cluster.signal(victim, signal.SIGKILL)
            status = await moving
            assert status["shards"] == [to]
            await ledger.next_answers(100)
            moved.append(local_cluster.spread(name))
            local_cluster.start_again(victim)

    assert with_ledger(local_cluster, move, names=[name]) == []
    # New messages went to the last shard alone.
    assert [each["shards"] for each in moved] == [[2], [3], [0]]


def test_shards_are_added_while_an_owner_is_killed_and_nothing_is_lost(local_cluster):
    """Row 9: the owner of a shard that queues leave is killed with -9 while `reshard` works.

    It is the last test of this file: the cluster has six shards after it.
    """
    names = list(itertools.islice(_names, 12))
    moving = [name for name in names if grown_shard(name, 4, 6) >= 4]

    async def grow(ledger):
        await local_cluster.until_served()
        victim = await local_cluster.owner(first_shard(moving[0], 4))
        growing = asyncio.create_task(asyncio.to_thread(local_cluster.reshard, 6))
        await ledger.next_answers(1)
        local_cluster.signal(victim, signal.SIGKILL)
        growth = await growing
        assert (growth["shards"], growth["to_move"]) == (6, 0)
        await ledger.next_answers(100)
        local_cluster.start_again(victim)
        assert [local_cluster.spread(name)["shards"] for name in moving] == [
            [grown_shard(name, 4, 6)] for name in moving
        ]

    assert moving
    assert with_ledger(local_cluster, grow, names=names) == []
