"""The pipeline beside its limits and peers: `make bench NAME=spark`.

The engine writes the journals of a busy store with many failures (`benchmarks.chaos`), one a core:
a tenth of the events, then all of them. What is timed, each against a contestant of its own:

    source   every column of every event into Spark, which discards it; beside it one process
             that decodes the same bytes into the same columns, per core, and a source that decodes
             nothing (`benchmarks.prebuilt`): what Spark costs by itself
    lake     journal to Delta table, and the tables made of it; beside it a bare Spark job that
             reads the same events, makes one exchange by message with a trivial aggregate and
             writes a row a message, and the aggregate of `messages` by itself, by Spark and by
             DuckDB, which runs the same text in one process with as many threads
    audit    every check over the lake's tables, warm
    new      hundredths of the journals, one after another, and single entries: run and audit;
             beside them all tables made and all parts judged again
    commands a store of some 60,000 messages from the command line: `run`, `audit`, and both again
             with nothing new; then `sql`, `report` and an audit of everything with a session that
             is kept; each a process of its own
    sink     a DataFrame into a queue; beside it the blocking client with the same rows, ten a call.
             What limits it: the same DataFrame into a sink that discards it (`benchmarks.discard`),
             and the same rows into the daemon in frames that are made beforehand

The run is void if two counts differ or the audit finds anything.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import penstock
from benchmarks import chaos
from benchmarks.harness import (
    Child,
    Target,
    Void,
    disk_directory,
    filesystem_of,
    finish,
    interleave,
    is_quick,
    machine,
    print_table,
    ratio,
    run_benchmark,
    timed_in_threads,
)
from benchmarks.lakes import (
    bare_job,
    fold_by_duckdb,
    fold_by_spark,
    message_rows,
    remove_unused_files,
    size_of,
)
from penstock.backends.remote.daemon import stop_daemon

EVENTS = 10_000_000
ROUNDS = 3
ROWS = 500_000
BATCH = 10
COMMAND_EVENTS = 196_000
QUICK_EVENTS = 40_000
# Commands that use the session of `pipeline warm`.
KEPT = {
    "sql, session kept": ["sql", "select state, count(*) from messages group by state"],
    "report, session kept": ["report", "--output", "report.html"],
    "audit --all, session kept": ["audit", "--all"],
}
BODY_BYTES = 256
NARROW = "sequence bigint, kind string, at_ms bigint, queue bigint, message bigint, epoch bigint"
CORES = len(os.sched_getaffinity(0))
# How often all tables are made again.
REBUILDS = 2
# How many hundredths of the journals are read by a run each.
NEWS = 3


class WrittenJournals(NamedTuple):
    """Journals of one size."""

    stores: list[str]
    events: int
    bytes: int
    held: dict[str, int]


def write_journals(directory: Path, events: int) -> WrittenJournals:
    """Writes one journal for each core, each in a process of its own, all at once."""
    made: list[chaos.MadeStore | None] = [None] * CORES
    children = [Child() for _ in made]

    def body(number: int) -> None:
        path = directory / f"store-{number}"
        made[number] = children[number].call(chaos.make_store, path, number, events // CORES)

    timed_in_threads(CORES, body)
    for child in children:
        child.close()
    stores = [each for each in made if each is not None]
    paths = [str(each.path) for each in stores]
    counted = Child()
    found = counted.call(count_events, paths)
    counted.close()
    held = {name: count for each in stores for name, count in each.messages.items()}
    return WrittenJournals(paths, *found, held)


def count_events(stores: Sequence[str]) -> tuple[int, int]:
    """How many events there are, and in how many bytes."""
    from penstock.spark.blocks import blocks
    from penstock.spark.stream import Stream

    events = size_bytes = 0
    for path in stores:
        stream = Stream(path)
        size_bytes += stream.end.offset - stream.first.offset
        for block in blocks(stream.scan, stream.identity, stream.first, stream.end, path):
            events += len(block.events)
        stream.close()
    return events, size_bytes


def decode_bare(stores: Sequence[str], expected: int) -> float:
    """Decodes every column of every event in one thread; events a second. Raises Void."""
    import pyarrow as pa

    from penstock.spark.blocks import COLUMNS, blocks
    from penstock.spark.stream import Stream

    pa.set_cpu_count(1)
    names = list(COLUMNS)
    events = 0
    start_s = time.perf_counter()
    for path in stores:
        stream = Stream(path)
        for block in blocks(stream.scan, stream.identity, stream.first, stream.end, path):
            events += len(block.arrow(names)[0])
        stream.close()
    took_s = time.perf_counter() - start_s
    agree("the bare decode", events, expected)
    return events / took_s


def agree(who: str, found: int, expected: int) -> None:
    """Raises Void if a count is not what it must be."""
    if found != expected:
        raise Void(f"{who} found {found:,} where there are {expected:,}")


_spark: dict[str, Any] = {}


def start_spark(scratch: str) -> dict[str, float]:
    """Starts a session; the seconds until it exists and until its first query is answered."""
    os.environ["SPARK_LOCAL_DIRS"] = scratch
    start_s = time.perf_counter()
    from penstock.spark.session import make_session

    _spark["session"] = make_session(conf={"spark.sql.warehouse.dir": f"{scratch}/warehouse"})
    session_s = time.perf_counter() - start_s
    agree("the first query", _spark["session"].range(1_000).selectExpr("id + 1").count(), 1_000)
    return {"session_s": session_s, "first_query_s": time.perf_counter() - start_s - session_s}


def driver_bytes() -> float:
    """The most memory that the JVM of the session had."""
    java = _spark["session"].sparkContext._gateway.proc.pid
    status = Path(f"/proc/{java}/status").read_text()
    return 1024.0 * int(status.split("VmHWM:")[1].split()[0])


def stop_spark() -> None:
    """Ends the session."""
    _spark.pop("session").stop()


def _all_of(stores: Sequence[str], schema: str | None = None) -> Any:
    reader = _spark["session"].read.format("penstock")
    reader = reader if schema is None else reader.schema(schema)
    frames = [reader.load(path) for path in stores]
    union = frames[0]
    for frame in frames[1:]:
        union = union.union(frame)
    return union


def count_by_source(stores: Sequence[str], expected: int) -> None:
    """Raises Void unless the source returns every event once."""
    agree("the source", _all_of(stores).select("entry").count(), expected)


def read_source(stores: Sequence[str], events: int, schema: str | None = None) -> float:
    """Reads all columns, or these, into Spark, which discards them; events a second."""
    frame = _all_of(stores, schema)
    start_s = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return events / (time.perf_counter() - start_s)


def read_prebuilt(store: str, events: int) -> float:
    """Reads as many rows of the same columns, prebuilt; rows a second."""
    from benchmarks.prebuilt import Prebuilt

    spark = _spark["session"]
    spark.dataSource.register(Prebuilt)
    frame = spark.read.format("prebuilt").option("rows", events).load(store)
    start_s = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return events / (time.perf_counter() - start_s)


class FirstBatchDone(Exception):
    """Ends an ingest after its first batch."""


def stop_ingest(seen: Any) -> None:
    """Ends an ingest when it reports its first batch."""
    raise FirstBatchDone


class Laps:
    """Seconds from one moment to the next."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def lap_s(self) -> float:
        """The seconds since this was last asked."""
        now_s = time.perf_counter()
        took_s, self._start_s = now_s - self._start_s, now_s
        return took_s


def fill_lake(stores: Sequence[str], path: str, expected: int) -> dict[str, Any]:
    """Seconds from journals to bronze, from there to every table, and of a hundredth. Raises Void.

    The tables are made from nothing, and then REBUILDS times again: `tables_s` has all of these.
    Each of the last NEWS hundredths of each journal is read by a run of its own; reported is the
    one that took neither longest nor shortest. To need less disk, the journals are removed when the
    lake has them, and so are files of older versions of the tables; but not between these runs,
    which would have to read the commits that the removal leaves.
    """
    from penstock.spark.audit import audit
    from penstock.spark.bronze import events_table, ingest, lag
    from penstock.spark.lake import Lake
    from penstock.spark.update import update

    spark = _spark["session"]
    lake = Lake.open(path, create=True)

    start_s = time.perf_counter()
    for store in stores:
        size = lag(lake, store).behind_bytes * (100 - NEWS) // 100
        try:
            ingest(lambda: spark, lake, store, batch_bytes=size, on_batch=stop_ingest)
        except FirstBatchDone:
            continue
    bronze_s = time.perf_counter() - start_s
    before = events_table(lake).rows()
    update(lambda: spark, lake)
    tables_s = time.perf_counter() - start_s - bronze_s
    audit(lambda: spark, lake)
    least = run_news(stores, path)
    news = [run_news(stores, path, left) for left in range(NEWS, 0, -1)]
    agree("the lake", events_table(lake).rows(), expected)
    for store in stores:
        shutil.rmtree(store)
    remove_unused_files(path)
    clock = Laps()
    all_tables_s, all_audit_s = [], []
    for _ in range(REBUILDS):
        clock.lap_s()
        every = update(lambda: spark, lake, rebuild=True).parts
        all_tables_s.append(clock.lap_s())
        audit(lambda: spark, lake, everything=True)
        all_audit_s.append(clock.lap_s())
        most_bytes = size_of(path)
        remove_unused_files(path)
    return {
        "bronze_s": bronze_s * expected / before,
        "tables_s": [tables_s * expected / before, *all_tables_s],
        **sorted(news, key=lambda each: each["new_s"])[len(news) // 2],
        **{name.replace("new_", "least_"): value for name, value in least.items()},
        "messages": sum(message_rows(path).values()),
        "parts": every,
        "all_tables_s": median(all_tables_s),
        "all_audit_s": median(all_audit_s),
        "rebuild_s": median(all_tables_s) + median(all_audit_s),
        "events_bytes": size_of(f"{path}/events"),
        "lake_bytes": size_of(path),
        "lake_bytes_most": most_bytes,
    }


def run_news(stores: Sequence[str], path: str, left: int | None = None) -> dict[str, float]:
    """Seconds of a run and an audit of one of so many parts that are left of each journal.

    Without a number, of one entry of each.
    """
    from penstock.spark.audit import audit
    from penstock.spark.bronze import events_table, ingest, lag
    from penstock.spark.lake import Lake
    from penstock.spark.update import update

    spark, lake = _spark["session"], Lake.open(path)
    before, made_before = events_table(lake).rows(), message_rows(path)
    clock = Laps()
    for store in stores:
        size = 1 if left is None else -(-lag(lake, store).behind_bytes // left)
        try:
            ingest(lambda: spark, lake, store, batch_bytes=size, on_batch=stop_ingest)
        except FirstBatchDone:
            continue
    ingest_s = clock.lap_s()
    parts = update(lambda: spark, lake).parts
    tables_s = clock.lap_s()
    made = message_rows(path)
    clock.lap_s()
    judged = audit(lambda: spark, lake).judged_parts
    audit_s = clock.lap_s()
    return {
        "new_events": events_table(lake).rows() - before,
        "new_ingest_s": ingest_s,
        "new_tables_s": tables_s,
        "new_audit_s": audit_s,
        "new_s": ingest_s + tables_s + audit_s,
        "new_parts": parts,
        "new_judged": judged,
        "new_messages": sum(rows for file, rows in made.items() if file not in made_before),
    }


def bare_by_spark(path: str) -> float:
    """The seconds of the bare job."""
    return bare_job(_spark["session"], path)


def fold_alone(path: str) -> float:
    """The seconds of the aggregate of `messages`, without anything else."""
    return fold_by_spark(_spark["session"], path)


def audit_by_spark(path: str, held: Mapping[str, int], expected: int) -> float:
    """The seconds of judging everything. Raises Void if it finds anything."""
    from penstock.spark.audit import audit
    from penstock.spark.lake import Lake

    start_s = time.perf_counter()
    verdict = audit(lambda: _spark["session"], Lake.open(path), held, everything=True)
    took_s = time.perf_counter() - start_s
    agree("the audit", verdict.events, expected)
    if not verdict.holds:
        raise Void(f"the audit found {verdict.counts}; the first is {verdict.findings[0]}")
    return took_s


def run_commands(directory: Path, events: int) -> dict[str, float]:
    """The seconds of each command, from a store to a verdict and again. Raises Void."""
    made = Child()
    store = made.call(chaos.make_store, directory / "store", 0, events)
    made.close()
    words = {
        "run": ["run", "--journal", str(store.path)],
        "audit": ["audit"],
        "run, nothing new": ["run", "--journal", str(store.path)],
        "audit, nothing new": ["audit"],
    }
    took_s = {name: run_command(directory, name, action) for name, action in words.items()}
    run_command(directory, "warm", ["warm"])
    try:
        # Its first command starts what Spark starts when it is used.
        run_command(directory, "first", KEPT["sql, session kept"])
        took_s |= {name: run_command(directory, name, action) for name, action in KEPT.items()}
    finally:
        run_command(directory, "warm --stop", ["warm", "--stop"])
    return took_s


def run_command(directory: Path, name: str, action: Sequence[str]) -> float:
    """The seconds of a command on the lake there. Raises Void."""
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "pipeline", *action, "--lake", "lake"],
        cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Void(f"`{name}` ended with {done.returncode}: {done.stdout}{done.stderr}")
    return time.perf_counter() - start_s


def write_rows(form: str, rows: int, options: Mapping[str, str]) -> float:
    """Writes a cached DataFrame with keys by this data source; rows a second."""
    body = f"rpad(CAST(id AS string), {BODY_BYTES}, 'x') AS body"
    frame = _spark["session"].range(rows).repartition(CORES).selectExpr(body, "id AS key").cache()
    agree("the rows to be written", frame.count(), rows)
    start_s = time.perf_counter()
    frame.write.format(form).options(**options).mode("append").save()
    took_s = time.perf_counter() - start_s
    frame.unpersist()
    return rows / took_s


def push_by_sink(url: str, queue: str, rows: int) -> float:
    """Writes the rows into a queue; rows a second."""
    return write_rows("penstock", rows, {"url": url, "queue": queue})


def discard_by_sink(rows: int) -> float:
    """Writes the rows into a sink in Python that counts and discards them; rows a second."""
    from benchmarks.discard import Discard

    _spark["session"].dataSource.register(Discard)
    return write_rows("discard", rows, {})


def push_by_frames(url: str, queue: str, rows: int) -> float:
    """The same rows in bulk pushes that are made beforehand, from as many threads as cores."""
    from penstock.service import PushMany
    from penstock.spark.sink import FRAME_ROWS_MAX

    frames = [
        PushMany(
            queue,
            [b"%d" % n + b"x" * (BODY_BYTES - len(str(n))) for n in numbers],
            [str(n) for n in numbers],
        )
        for at in range(0, rows, FRAME_ROWS_MAX)
        for numbers in [range(at, min(at + FRAME_ROWS_MAX, rows))]
    ]
    with penstock.connect(url) as queues:

        def body(number: int) -> None:
            for frame in frames[number::CORES]:
                queues.service.execute(frame)

        return rows / timed_in_threads(CORES, body)


def push_by_client(url: str, queue: str, rows: int) -> float:
    """The same rows by the blocking client, ten a call; rows a second."""
    bodies = [f"{number:x<{BODY_BYTES}}" for number in range(rows)]
    with penstock.connect(url) as queues:
        start_s = time.perf_counter()
        for at in range(0, rows, BATCH):
            queues.push_many(queue, bodies[at : at + BATCH])
        return rows / (time.perf_counter() - start_s)


def race_sink(directory: Path, spark: Child, rounds: int, rows: int) -> dict[str, list[float]]:
    """Has both push the same rows, each into a new queue in every round. Raises Void."""
    store = directory / "queues"
    url = f"file:{store}?durability=os"
    client = Child()
    pushed: list[str] = []

    def pushing(child: Child, push: Callable[[str, str, int], float]) -> Callable[[], float]:
        def run() -> float:
            queue = f"bench-{len(pushed)}"
            with penstock.connect(url) as queues:
                queues.create(queue)
                pushed.append(queue)
                rate = child.call(push, url, queue, rows)
                agree(f"the queue of {push.__name__}", queues.stats(queue).messages, rows)
                # With its remembered ids, so that all rounds begin with the same state.
                queues.remove(queue)
            return rate

        return run

    runs = {
        "sink": pushing(spark, push_by_sink),
        "client": pushing(client, push_by_client),
        "discard": lambda: spark.call(discard_by_sink, rows),
        "frames": pushing(client, push_by_frames),
    }
    try:
        # The first write includes the start of Spark's workers.
        for name in ("sink", "discard"):
            runs[name]()
        return interleave(rounds, runs)
    finally:
        client.close()
        stop_daemon(store)


class SparkFigures(NamedTuple):
    """Everything that was measured."""

    small: WrittenJournals
    large: WrittenJournals
    start: dict[str, float]
    source: dict[str, list[float]]
    lake: dict[str, Any]
    audit: dict[str, list[float]]
    commands: dict[str, float]
    sink: dict[str, list[float]]


def measure(directory: Path, events: int, rounds: int, rows: int) -> SparkFigures:
    """Runs all of it. Raises Void."""
    small, large = (
        write_journals(_made(directory / f"journals-{size}"), size)
        for size in (events // 10, events)
    )
    print(f"{large.events:,} events in {len(large.stores)} journals, {large.bytes / 1e6:,.0f} MB")
    spark, bare, duck = Child(), Child(), Child()
    lakes = {size: str(directory / f"lake-{size}") for size in ("small", "large")}
    try:
        start = spark.call(start_spark, str(_made(directory / "scratch")))
        spark.call(count_by_source, small.stores, small.events)
        source = interleave(
            rounds,
            {
                "source": lambda: spark.call(read_source, large.stores, large.events),
                "bare": lambda: bare.call(decode_bare, large.stores, large.events),
                "narrow": lambda: spark.call(read_source, large.stores, large.events, NARROW),
                "prebuilt": lambda: spark.call(read_prebuilt, large.stores[0], large.events),
            },
        )
        # The first run includes the compilation of code that both use.
        first = spark.call(fill_lake, small.stores, lakes["small"], small.events)
        lake = spark.call(fill_lake, large.stores, lakes["large"], large.events)
        lake["tenth_s"] = median(first["tables_s"])
        beside = interleave(
            min(rounds, 2),
            {
                "bare_s": lambda: spark.call(bare_by_spark, lakes["large"]),
                "fold_s": lambda: spark.call(fold_alone, lakes["large"]),
                "duckdb_s": lambda: duck.call(fold_by_duckdb, lakes["large"]),
            },
        )
        lake |= {name: median(times) for name, times in beside.items()}
        lake["driver_bytes"] = spark.call(driver_bytes)
        spark.call(audit_by_spark, lakes["small"], small.held, small.events)
        # Two rounds: an audit takes long enough to vary little, and the whole run at most minutes.
        audit = interleave(
            min(rounds, 2),
            {
                f"spark {size}": _auditing(spark, audit_by_spark, lakes[size], journals)
                for size, journals in (("small", small), ("large", large))
            },
        )
        command_events = min(COMMAND_EVENTS, events)
        commands = run_commands(_made(directory / "commands"), command_events)
        sink = race_sink(directory, spark, rounds, rows)
        spark.call(stop_spark)
    finally:
        for child in (spark, bare, duck):
            child.close()
    return SparkFigures(small, large, start, source, lake, audit, commands, sink)


def _auditing(
    child: Child, function: Callable[..., float], lake: str, journals: WrittenJournals
) -> Callable[[], float]:
    return lambda: child.call(function, lake, journals.held, journals.events)


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def targets(run: SparkFigures) -> list[Target]:
    """The goals of the project."""
    audit = run.audit
    # The journals have slightly more or fewer events than requested.
    scale = 10 * run.small.events / run.large.events
    grown = scale * ratio(audit["spark large"], audit["spark small"])
    rate = run.large.events / median(audit["spark large"])
    lake, commands = run.lake, run.commands
    return [
        Target(
            "source / prebuilt into Spark", ratio(run.source["source"], run.source["prebuilt"]), 0.9
        ),
        Target("source, six columns / all", ratio(run.source["narrow"], run.source["source"]), 1),
        Target(
            "lake to tables, thousand events/s",
            run.large.events / median(lake["tables_s"]) / 1e3,
            250,
        ),
        Target("lake to tables / bare job", lake["bare_s"] / median(lake["tables_s"]), 0.35),
        Target("journal to lake, million events/s", run.large.events / lake["bronze_s"] / 1e6, 1),
        Target("audit, thousand events/s", rate / 1e3, 400),
        Target("audit, time of all / of a tenth", grown, 11, False),
        Target(
            "tables, time of all / of a tenth",
            scale * median(lake["tables_s"]) / lake["tenth_s"],
            11,
            False,
        ),
        Target(
            "60,000 messages: run and audit, seconds",
            commands["run"] + commands["audit"],
            20,
            False,
        ),
        Target("run, nothing new, seconds", commands["run, nothing new"], 1, False),
        Target("audit, nothing new, seconds", commands["audit, nothing new"], 1, False),
        Target(
            "session kept: slowest of sql, report and audit, seconds",
            max(commands[name] for name in KEPT),
            2,
            False,
        ),
        Target("an entry new: run and audit, seconds", lake["least_s"], 2, False),
        Target("1% new, time / rebuild", lake["new_s"] / lake["rebuild_s"], 0.2, False),
        Target("memory of the driver, GiB", lake["driver_bytes"] / (1 << 30), 4, False),
        Target("sink / client in tens", ratio(run.sink["sink"], run.sink["client"]), 5),
    ]


def source_bound(source: Mapping[str, Sequence[float]]) -> float:
    """Events a second if reading cost no more than Spark and the bare decode by themselves.

    Spark by itself keeps all cores busy, the bare decode one of them.
    """
    return 1 / (1 / median(source["prebuilt"]) + 1 / (CORES * median(source["bare"])))


def sink_bound(sink: Mapping[str, Sequence[float]]) -> float:
    """Rows a second if Spark and the daemon took no longer than each by itself.

    Spark by itself keeps all cores busy, the daemon one of them.
    """
    return 1 / (1 / median(sink["discard"]) + 1 / (CORES * median(sink["frames"])))


def show(run: SparkFigures) -> None:
    """Prints what was measured."""

    def row(name: str, rates: Sequence[float]) -> tuple[str, ...]:
        return (name, *(f"{each:,.0f}" for each in (median(rates), min(rates), max(rates))))

    head = ("", "median", "lowest", "highest")
    events = run.large.events
    audits = {
        name: [(events if "large" in name else run.small.events) / took_s for took_s in times]
        for name, times in run.audit.items()
    }
    print_table(
        f"events a second, {CORES} cores",
        head,
        [
            row("source into Spark", run.source["source"]),
            row("source, six columns", run.source["narrow"]),
            row("bare decode, one core", run.source["bare"]),
            row("prebuilt into Spark", run.source["prebuilt"]),
            row("upper bound of the source, from both", [source_bound(run.source)]),
            row("journal to lake", [events / run.lake["bronze_s"]]),
            row("lake to its tables", [events / took_s for took_s in run.lake["tables_s"]]),
            row("bare Spark job", [events / run.lake["bare_s"]]),
            row("the aggregate of messages alone", [events / run.lake["fold_s"]]),
            row("the same text by DuckDB", [events / run.lake["duckdb_s"]]),
            row("1% new: run and audit", [run.lake["new_events"] / run.lake["new_s"]]),
            *(row(f"audit, {name}", rates) for name, rates in audits.items()),
        ],
    )
    print_table(
        "rows a second into a queue",
        head,
        [
            row("sink", run.sink["sink"]),
            row(f"blocking client, {BATCH} a call", run.sink["client"]),
            row("Spark into a sink that discards", run.sink["discard"]),
            row("daemon, frames made beforehand", run.sink["frames"]),
            row("upper bound of the sink, from both", [sink_bound(run.sink)]),
        ],
    )
    lake = run.lake
    show_ratios(run)
    show_news(run)
    print_table(
        f"{COMMAND_EVENTS:,} events from the command line",
        ("", "seconds"),
        [(name, f"{took_s:.2f}") for name, took_s in run.commands.items()],
    )
    print(
        f"\ndisk: journals {run.large.bytes / 1e9:.2f} GB, lake {lake['lake_bytes'] / 1e9:.2f} GB, "
        f"of that events {lake['events_bytes'] / 1e9:.2f} GB; during a rebuild "
        f"{lake['lake_bytes_most'] / 1e9:.2f} GB"
    )
    print(
        f"start-up: {run.start['session_s']:.1f} s to a session, "
        f"{run.start['first_query_s']:.1f} s more to the first answer"
    )


def show_ratios(run: SparkFigures) -> None:
    """Prints each rate beside those of the bare job and of DuckDB in this run."""
    lake = run.lake
    audit_s = median(run.audit["spark large"])
    print_table(
        "events a second of one / of the other",
        ("", "ratio"),
        [
            (name, f"{value:.2f}")
            for name, value in {
                "journal to lake / bare Spark job": lake["bare_s"] / lake["bronze_s"],
                "lake to its tables / bare Spark job": lake["bare_s"] / median(lake["tables_s"]),
                "audit / bare Spark job": lake["bare_s"] / audit_s,
                "aggregate of messages / bare Spark job": lake["bare_s"] / lake["fold_s"],
                "aggregate of messages / the same by DuckDB": lake["duckdb_s"] / lake["fold_s"],
            }.items()
        ],
    )


def show_news(run: SparkFigures) -> None:
    """Prints what a few new events cost, and all of them."""
    lake = run.lake
    # A part is made as a whole: the share of its messages is the least that the news can cost.
    lines = {
        "events": ("events", ",.0f"),
        "journal to lake, seconds": ("ingest_s", ".2f"),
        "tables, seconds": ("tables_s", ".2f"),
        "audit, seconds": ("audit_s", ".2f"),
        "parts made": ("parts", ".0f"),
        "parts judged": ("judged", ".0f"),
        "messages in them": ("messages", ",.0f"),
    }
    every = {
        "events": run.large.events,
        "ingest_s": lake["bronze_s"],
        "tables_s": lake["all_tables_s"],
        "audit_s": lake["all_audit_s"],
        "parts": lake["parts"],
        "judged": lake["parts"],
        "messages": lake["messages"],
    }
    print_table(
        "new events, and all of them again",
        ("", "an entry", "1%", "all"),
        [
            (line, *(format(value, form) for value in
                     (lake[f"least_{name}"], lake[f"new_{name}"], every[name])))
            for line, (name, form) in lines.items()
        ],
    )  # fmt: skip


def _rounded(value: float | list[float]) -> float | list[float]:
    return [round(each, 2) for each in value] if isinstance(value, list) else round(value, 2)


def figures(run: SparkFigures) -> dict[str, Any]:
    """What was measured, for the last line."""
    return {
        "events": {"small": run.small.events, "large": run.large.events},
        "journal_bytes": run.large.bytes,
        "start": {name: round(value, 2) for name, value in run.start.items()},
        "source_per_s": {name: list(map(round, rates)) for name, rates in run.source.items()},
        "lake_s": {name: _rounded(value) for name, value in run.lake.items()},
        "audit_s": {name: [round(each, 2) for each in times] for name, times in run.audit.items()},
        "commands_s": {name: round(value, 2) for name, value in run.commands.items()},
        "sink_rows_per_s": {name: list(map(round, rates)) for name, rates in run.sink.items()},
    }


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(prog="make bench NAME=spark ARGS=…")
    events = QUICK_EVENTS if is_quick() else EVENTS
    parser.add_argument("--events", type=int, default=events, help="how many events in all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rows = 2_000 if is_quick() else ROWS
    parser.add_argument("--rows", type=int, default=rows, help="how many rows go into a queue")
    return parser.parse_args(words)


def main() -> None:
    """Runs everything and prints it."""
    arguments = read_arguments(sys.argv[1:])
    start_s = time.monotonic()
    line = machine()
    directory = disk_directory()
    disk = filesystem_of(directory)
    print(f"{line}; {disk} in {directory.parent}")
    try:
        run = measure(directory, arguments.events, arguments.rounds, arguments.rows)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(run)
    took_s = round(time.monotonic() - start_s)
    finish(
        "spark",
        targets(run),
        {"machine": line, "filesystem": disk, "took_s": took_s, **figures(run)},
    )


if __name__ == "__main__":
    run_benchmark(main, has_options=True)
