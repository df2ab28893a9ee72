"""A replay sends each message once: again, under a kill, and hours later."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import penstock
from penstock import cli
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.core.events import Claimed, Deleted, QueueCreated
from penstock.errors import InvalidField, UnavailableError
from penstock.service import CreateQueue, Pull, Push, QueueSettings, Release
from penstock.spark import replay as replaying
from penstock.spark.bronze import ingest
from penstock.spark.lake import OUTBOX, Lake, LakeBusy, locked
from penstock.spark.progress import show_steps, status
from penstock.spark.replay import backfill, beside, replay, replays_table
from penstock.spark.update import update
from tests.spark.journals import write_store

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.timeout(600)]
DEAD = 2_500
WHERE = "queue = 'orders' and state = 'dead'"


@pytest.fixture(scope="module")
def lake(spark, tmp_path_factory):
    """A lake in which many orders are dead, and one message's body was never seen."""
    root = tmp_path_factory.mktemp("replay")
    engine = open_engine(root / "shop", clock=ManualClock(), durability="os", background=False)
    engine.submit(CreateQueue("orders", {"dead_letter": "dead", "max_receives": 1}))
    engine.submit(CreateQueue("line.fifo", {"fifo": True}))
    for number in range(DEAD):
        engine.submit(
            Push(
                "orders",
                b"order %d" % number,
                attributes={"raw": b"\xff%d" % number, "text": "ü"},
                priority=number % 3,
                group=f"g{number % 5}",
                context={"sqs": "kept"},
            )
        )
    for claim in engine.submit(Pull("orders", 10_000)):
        engine.submit(Release("orders", claim.proof))
    engine.submit(Push("orders", b"alive"))
    for number in range(40):
        engine.submit(Push("line.fifo", b"%d" % number, group=f"g{number % 2}"))
    engine.close()
    at_ms = 1_700_000_000_000
    made = QueueCreated(at_ms, 1, "cut", QueueSettings())
    cut = write_store(
        root / "cut",
        [[made], [Claimed(at_ms, 1, 9, 1, at_ms + 30_000)], [Deleted(at_ms, 1, 9, 1)]],
    )
    lake = Lake.open(root / "lake", create=True)
    for store in (root / "shop", cut):
        ingest(lambda: spark, lake, str(store))
    # A replay looks at no other table.
    update(lambda: spark, lake)
    return lake


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def near(clock):
    """Queues in this process, whose time is moved by hand."""
    with penstock.connect("memory:", clock=clock) as near:
        near.create("orders")
        yield near


class ReplayKilled(BaseException):
    """Simulates a kill: nothing of the run continues."""


def killed(*_):
    raise ReplayKilled


def bodies(queues, queue):
    """How often each body is in a queue."""
    claims = []
    while found := queues.pull_many(queue, 1_000, visibility_timeout=60):
        claims += found
    for claim in claims:
        queues.release(claim)
    return Counter(claim.body for claim in claims)


STEPS = ("choosing messages", "reading bodies", "sending to orders")
ALL_DEAD = Counter(b"order %d" % number for number in range(DEAD))


def test_messages_come_back_as_they_were_and_only_once(spark, lake, near, shown):
    outcome = replay(spark, lake, near, WHERE, "orders", name="whole", dry_run=True)
    assert (outcome.to_send, outcome.sent, near.stats("orders").messages) == (DEAD, 0, 0)
    shown.clear()
    outcome = replay(spark, lake, near, WHERE, "orders", name="whole")
    # People who wait see it slice by slice.
    names = [each.name for each in shown]
    assert names == sorted(names, key=STEPS.index)
    sent = [each.part for each in shown if each.name == "sending to orders"]
    assert sent == sorted(sent)
    assert (sent[0], sent[-1]) == (0, 1)
    assert len(set(sent)) > 2
    assert (outcome.matched, outcome.sent, outcome.sent_before, outcome.bodiless) == (
        DEAD,
        DEAD,
        0,
        0,
    )
    found = {claim.body: claim for claim in near.pull_many("orders", 10_000)}
    assert Counter(list(found)) == ALL_DEAD
    claim = found[b"order 7"]
    assert claim.attributes == {"raw": b"\xff7", "text": "ü"}
    assert (claim.priority, claim.group, claim.context) == (1, "g2", {"sqs": "kept"})
    assert claim.dedup_id.endswith(f"{8:012x}")
    assert near.list() == ["orders"]

    near.purge("orders")
    outcome = replay(spark, lake, near, WHERE, "orders", name="whole")
    assert (outcome.sent, outcome.sent_before, near.stats("orders").messages) == (0, DEAD, 0)
    outcome = replay(spark, lake, near, "queue = 'cut'", "orders", name="whole")
    assert (outcome.matched, outcome.bodiless, outcome.sent) == (1, 1, 0)
    assert outcome.bodiless_ids[0].endswith(f"{9:012x}")


def test_a_replay_killed_anywhere_is_continued_hours_later(spark, lake, near, clock, monkeypatch):
    """Before a slice is noted, after, and among its moves; then when no dedup id is remembered."""
    monkeypatch.setattr(replaying, "SLICE_MESSAGES", 1_000)
    target = replaying._Target

    def killed_amid(self, moved):
        self._queues.redrive(self._beside, to=self._to, limit=300)
        raise ReplayKilled

    places = [("_note", killed), ("_move", killed), ("_move", killed_amid), ("_note", killed)]
    expected = [0, 0, 300, 1_000]
    for (method, stop), held in zip(places, expected, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(target, method, stop)
            with pytest.raises(ReplayKilled):
                replay(spark, lake, near, WHERE, "orders", name="killed")
        assert near.stats("orders").messages == held
        clock.advance(seconds=6 * 3_600)
    outcome = replay(spark, lake, near, WHERE, "orders", name="killed")
    assert (outcome.sent, outcome.sent_before) == (DEAD - 1_000, 1_000)
    assert bodies(near, "orders") == ALL_DEAD
    assert near.list() == ["orders"]


def test_messages_that_a_consumer_pulled_from_the_staging_queue_are_not_lost(
    spark, lake, near, monkeypatch
):
    where = "queue = 'line.fifo'"
    near.create("again.fifo", fifo=True)
    with monkeypatch.context() as patch:
        patch.setattr(replaying._Target, "_move", killed)
        with pytest.raises(ReplayKilled):
            replay(spark, lake, near, where, "again.fifo", name="pulled")
    claim = near.pull(beside("again.fifo"))
    with pytest.raises(UnavailableError, match="claimed by a consumer that must not pull from it"):
        replay(spark, lake, near, where, "again.fifo", name="pulled")
    near.release(claim)
    outcome = replay(spark, lake, near, where, "again.fifo", name="pulled")
    assert (outcome.sent, outcome.sent_before, near.stats("again.fifo").messages) == (0, 40, 40)


def replay_words(lake, url, name, *more):
    words = ["pipeline", "replay", "--lake", str(lake.path), "--where", WHERE, "--to", "orders"]
    return [*words, "--url", url, "--name", name, *more]


def test_a_replay_killed_by_sigkill_loses_and_repeats_nothing(lake, url, queues, capsys):
    queues.create("orders")
    words = replay_words(lake, url, "real", "--rate", "100", "--master", "local[2]")
    command = [Path(sys.executable).with_name("penstock"), *words]
    process = subprocess.Popen(command, start_new_session=True)
    while queues.stats("orders").messages < 200:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it ended by itself with {process.wait(timeout=0.05)}")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert 200 <= queues.stats("orders").messages < DEAD
    assert queues.stats(beside("orders")).messages > 0

    assert cli.main(replay_words(lake, url, "real", "--json")) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["sent"] + outcome["sent_before"] == outcome["matched"] == DEAD
    assert bodies(queues, "orders") == ALL_DEAD
    assert queues.list() == ["orders"]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("", "is empty; `true` chooses every message"),
        (" \n", "is empty"),
        ("1" * 10_001, "has 10,001 characters; at most 10,000"),
        # One condition, not statements.
        ("1 = 1; DROP TABLE messages", "is not a condition .*[Ss]yntax error .*';'"),
        ("1 = 1) UNION SELECT * FROM events", r"is not a condition .*[Ss]yntax error .*'\)'"),
        ("queue IN (INSERT INTO t VALUES (1))", "is not a condition .*[Ss]yntax error"),
        # Mistakes.
        ("nosuch = 1", "is not a condition .*`nosuch`"),
        ("queu = 'a'", "is not a condition .*`queu`.* Did you mean .*`queue`"),
        ("nosuch(claims)", "is not a condition .*`nosuch`"),
        ("lower() = 'a'", "is not a condition .*lower"),
        ("queue =", "is not a condition .*[Ss]yntax error .*end of input"),
        ("queue = 'orders", "is not a condition .*[Ss]yntax error"),
        ("`queue = 1", "is not a condition .*[Ss]yntax error"),
        ("claims = 1 = 1", "is not a condition .*claims = 1"),
        ("claims in ()", "is not a condition .*IN predicate"),
        ("claims between 1", "is not a condition .*[Ss]yntax error"),
        ("case end", "is not a condition "),
        ("claims = 1x", "is not a condition "),
        # Errors of types.
        ("queue", "is not a condition on messages: .*BOOLEAN"),
        ("pushed_at_ms = 'soon'", "is not a condition on messages: .*cannot be cast"),
        ("1 / (claims - claims) = 1", "is not a condition on messages: .*[Dd]ivision by zero"),
        # More than Java's stack.
        ("(" * 4_900 + "true" + ")" * 4_900, "(cannot be used|is not a condition)"),
    ],
    ids=range(22),
)
def test_a_wrong_condition_is_refused_in_one_sentence(lake, near, spark, capfd, where, said):
    before = replays_table(lake).rows()
    with pytest.raises(InvalidField, match=f"^where: {said}") as outcome:
        replay(spark, lake, near, where, "orders")
    assert "\n" not in str(outcome.value)
    assert (replays_table(lake).rows(), near.list()) == (before, ["orders"])
    assert capfd.readouterr().err == "", "Spark printed its own account of the error"


def test_every_part_of_a_condition_is_understood_by_spark(lake, near, spark):
    """Conditions that hold for all dead orders, each using something else."""
    tests = [
        "lower(upper(queue)) = 'orders' and claims between 1 and 2 and not (group is null)",
        "queue in ('orders', 'x') and group like 'g%' and group not like 'g!%%' escape '!'",
        r"queue || '$' = 'orders$' and length('\\') = 1 and length('it''s') = 4",
        "pushed_at > timestamp '2001-01-01 00:00:00' - interval 2 days",
        "case when claims > 0 then true else false end and cast(claims as string) = '1'",
        "date(timestamp_millis(pushed_at_ms)) <= current_date() or year(pushed_at) > 2000",
        "-claims + 3 * 2 - 5 = 0 and substr(queue, 1, 2) = 'or' and coalesce(dedup_id, '-') = '-'",
        "greatest(claims, 1) % 2 = 1 and if(claims = 1, length(queue), 0) = 6",
        "dedup_id <=> null and round(1.5) + floor(1.5) + ceil(0.5) = 4 /* a comment */",
        # As a query, it may ask more than one table.
        "exists (select 1 from range(3))",
    ]
    where = f"state = 'dead' and queue = 'orders' and ({') and ('.join(tests)})"
    outcome = replay(spark, lake, near, where, "orders", name="grammar", dry_run=True)
    assert outcome.matched == DEAD


class SleptTime:
    """A `time` that only its own `sleep` advances."""

    def __init__(self):
        self.now_s = 0.0
        self.time_ns = time.time_ns

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def test_a_fifo_queue_keeps_the_order_of_its_groups(spark, lake, near, monkeypatch):
    at = []

    def look():
        now = status()
        if now is not None and now.name.startswith("sending") and now.part:
            at.append((round(slept.now_s, 3), round(now.part * 40)))

    near.create("again.fifo", fifo=True)
    slept = SleptTime()
    monkeypatch.setattr(replaying, "time", slept)
    show_steps(look)
    try:
        outcome = replay(spark, lake, near, "queue = 'line.fifo'", "again.fifo", rate=100)
    finally:
        show_steps()
    assert outcome.sent == 40
    # At most 100 a second.
    assert at == [(0, 10), (0.1, 20), (0.2, 30), (0.3, 40), (0.4, 40)]
    found: dict[str, list[int]] = {}
    while claims := near.pull_many("again.fifo", 10):
        for claim in claims:
            found.setdefault(claim.group, []).append(int(claim.body))
        near.delete_many(claims)
    assert found == {"g0": list(range(0, 40, 2)), "g1": list(range(1, 40, 2))}

    outcome = replay(spark, lake, near, "queue = 'orders' and state = 'live'", "again.fifo")
    assert (outcome.sent, len(outcome.refused)) == (0, 1)
    assert "group" in outcome.refused[0][1]
    assert near.list() == ["again.fifo", "orders"]


def test_a_queue_with_the_name_of_the_staging_queue_is_not_changed(spark, lake, near):
    near.create(beside("orders"))
    near.push(beside("orders"), b"mine")
    with pytest.raises(InvalidField, match=r"'orders-replay' is needed .* not made by a replay"):
        replay(spark, lake, near, WHERE, "orders", name="blocked")
    assert near.stats(beside("orders")).messages == 1
    assert beside("o" * 80 + "@scope") == "o" * 73 + "-replay@scope"


def test_two_replays_of_a_lake_do_not_run_at_once(spark, lake, near):
    with (
        locked(lake, OUTBOX),
        pytest.raises(LakeBusy, match="another process is replaying from it"),
    ):
        replay(spark, lake, near, WHERE, "orders")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--to", "nowhere"], 3, "queue: there is no queue 'nowhere'; create it first"),
        (["--rate", "0"], 3, "rate: 0 is outside 1 to 1000000"),
        (["--name", "a b"], 3, "name: 'a b' is not a queue name"),
        (["--lake", "."], 6, ".: is not a Penstock lake"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_sent(lake, capsys, words, status, said):
    assert cli.main([*replay_words(lake, "memory:", "x"), "--to", "orders", *words]) == status
    assert said in capsys.readouterr().err


def test_a_backfill_repeated_soon_adds_nothing(spark, url, queues):
    queues.create("orders")
    frame = spark.createDataFrame(
        [("a", 1, "x"), ("b", 2, "y")], "text string, id int, team string"
    )
    for _ in range(2):
        backfill(frame, url, "orders", key="id", body="text", group="team")
    assert bodies(queues, "orders") == Counter([b"a", b"b"])
    with pytest.raises(InvalidField, match="nosuch"):
        backfill(frame, url, "orders", key="nosuch", body="text")
