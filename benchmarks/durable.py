"""The durable engine beside its peers: `make bench NAME=durable`.

Three durabilities are compared separately: `os`, `interval` and `sync` (synced before the answer).
`benchmarks.stores` describes what each store does for each of them. A race is a comparison of
several stores at the same work. Every store is opened once for a race and keeps its directory
through the rounds; at the end it is closed, opened again and emptied, and each body pushed must
have been pulled exactly once.

The raw limits are loops that write the same bytes to a file whose blocks are allocated. The first
calls fdatasync once for as many messages as a call pushes. The second calls it once for as many as
one sync of Penstock's group commit had just before: the limit for a program that syncs as rarely.
The third has as many threads as the race and shares its syncs as Penstock does, without a queue:
the limit for callers that are Python threads.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import backlog
from benchmarks.durable_beside import compare
from benchmarks.harness import (
    Child,
    Target,
    check_ledger,
    count_for,
    disk_directory,
    filesystem_of,
    finish,
    install_package,
    install_peer,
    interleave,
    machine,
    print_table,
    ratio,
    run_benchmark,
    timed_in_threads,
)
from benchmarks.stores import PEER_OF, STORES, Store
from penstock.journal.commit import GroupCommit

BODY_BYTES = 256
ROUNDS = 5
ROUND_S = 0.4
PRODUCERS = 16
BATCH = 10
BACKLOG = 1_000_000
QUIET_S = 3.0
HELD = 500_000
BODY_SIZES = (16, 256, 2_000)
RAW_FILE_BYTES = 64 * 1024 * 1024
PEERS = {"litequeue": ["litequeue==0.9"], "persist-queue": ["persist-queue>=1.1,<2"]}
DURABILITIES = ("os", "interval", "sync")
OURS, DAEMON = "penstock embedded", "penstock daemon"
RAW_CALLS, RAW_GROUPS = "raw, a sync a call", "raw, our groups"
RAW_THREADS = "raw, in threads"
RAWS = (RAW_CALLS, RAW_GROUPS, RAW_THREADS)
LIBRARIES = ("litequeue", "persist-queue SQLite")


class StoreRow(NamedTuple):
    """A store at one durability; it is compared only with rows of the same durability."""

    store: str
    durability: str


class Measured(NamedTuple):
    """One timed run."""

    took_s: float
    messages: int
    written_bytes: int
    syncs: int
    appended_bytes: int

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.took_s


class HeldStore:
    """A store that stays open in this process for all rounds, and its ledger."""

    def __init__(self, name: str, path: Path, durability: str) -> None:
        self.name = name
        self.path = path
        self.store: Store = STORES[name](path, durability)
        self.pushed: list[bytes] = []
        self.pulled: list[bytes] = []

    def bodies(self, count: int) -> list[bytes]:
        """This many new bodies, which are added to the ledger."""
        start = len(self.pushed)
        made = [b"%0*d" % (BODY_BYTES, number) for number in range(start, start + count)]
        self.pushed += made
        return made

    def push(self, count: int, threads: int, batch: int) -> Measured:
        """Pushes from several threads at once."""
        shares = split_among(self.bodies(count), threads, batch)
        pushers = [self.store.pusher(batch) for _ in shares]

        def body(number: int) -> None:
            push = pushers[number]
            for part in shares[number]:
                push(part)

        return self.timed(count, lambda: timed_in_threads(len(shares), body))

    def cycle(self, count: int, threads: int, batch: int) -> Measured:
        """One thread pushes, pulls and deletes."""
        (parts,) = split_among(self.bodies(count), 1, batch)
        cycle = self.store.cycler(batch)
        pulled: list[Sequence[bytes]] = [()] * len(parts)

        def body(_: int) -> None:
            for i, part in enumerate(parts):
                pulled[i] = cycle(part)

        measured = self.timed(count, lambda: timed_in_threads(1, body))
        self.pulled += [body for some in pulled for body in some]
        return measured

    def timed(self, count: int, run: Callable[[], float]) -> Measured:
        """Runs it and returns what it cost."""
        before = self.store.counters()
        took_s = run()
        after = self.store.counters()
        return Measured(
            took_s,
            count,
            after.written - before.written,
            after.syncs - before.syncs,
            after.appended - before.appended,
        )

    def close_and_check(self) -> None:
        """Closes the store, opens it again, empties it and checks the ledger. Raises Void."""
        if self.name != "memory":
            self.store.close()
            self.store = STORES[self.name](self.path, "os")
        self.pulled += self.store.drain()
        check_ledger(self.pushed, self.pulled)
        self.store.close()


def split_among(bodies: list[bytes], threads: int, batch: int) -> list[list[Any]]:
    """Each thread's part: single bodies, or lists of `batch`."""
    if batch == 1:
        parts: list[Any] = bodies
    else:
        parts = [bodies[at : at + batch] for at in range(0, len(bodies), batch)]
    return [parts[number::threads] for number in range(min(threads, len(parts)))]


_held: list[HeldStore] = []


def start(name: str, path: Path, durability: str) -> str:
    """Opens a store in this process; returns the reason if it is not available."""
    path.mkdir(parents=True)
    try:
        _held.append(HeldStore(name, path, durability))
    except NotImplementedError as lack:
        return str(lack)
    return ""


def push(count: int, threads: int, batch: int) -> Measured:
    """Runs in a store's process."""
    return _held[0].push(count, threads, batch)


def cycle(count: int, threads: int, batch: int) -> Measured:
    """Runs in a store's process."""
    return _held[0].cycle(count, threads, batch)


def close_and_check() -> None:
    """Runs in a store's process, last. Raises Void."""
    _held.pop().close_and_check()


def raw(path: Path, message_bytes: int, group: int, seconds: float) -> Measured:
    """Writes groups of messages, each with one fdatasync, over allocated blocks."""
    data = bytes(message_bytes * group)
    written = 0
    with open(path, "w+b", buffering=0) as file:
        fd = file.fileno()
        os.pwrite(fd, bytes(RAW_FILE_BYTES), 0)
        os.fsync(fd)
        start_s = time.perf_counter()
        while (took_s := time.perf_counter() - start_s) < seconds:
            os.pwrite(fd, data, written % (RAW_FILE_BYTES - len(data)))
            os.fdatasync(fd)
            written += len(data)
    groups = written // len(data)
    return Measured(took_s, groups * group, written, groups, written)


def raw_in_threads(
    path: Path, call_bytes: int, batch: int, threads: int, seconds: float
) -> Measured:
    """Threads write a call's bytes each, and wait for a sync that they share."""
    data = bytes(call_bytes)
    calls = syncs = 0
    writing = threading.Lock()
    with open(path, "w+b", buffering=0) as file:
        fd = file.fileno()
        os.pwrite(fd, bytes(RAW_FILE_BYTES), 0)
        os.fsync(fd)

        def sync() -> int:
            nonlocal syncs
            syncs += 1
            written = calls
            os.fdatasync(fd)
            return written

        def push_until(end_s: float) -> None:
            nonlocal calls
            while time.perf_counter() < end_s:
                with writing:
                    os.pwrite(fd, data, calls * call_bytes % (RAW_FILE_BYTES - call_bytes))
                    calls += 1
                    own = calls
                commit.wait(own)

        commit = GroupCommit(sync)
        commit.start()
        end_s = time.perf_counter() + seconds
        took_s = timed_in_threads(threads, lambda _: push_until(end_s))
        commit.close()
    return Measured(took_s, calls * batch, calls * call_bytes, syncs, calls * call_bytes)


def sync_us(directory: Path) -> float:
    """Microseconds of a small write and its fdatasync, as a measure of the disk."""
    measured = raw(directory / "probe", 512, 1, ROUND_S)
    return measured.took_s / measured.syncs * 1e6


class StoreRace:
    """Several rows, the same work, interleaved rounds."""

    def __init__(
        self,
        title: str,
        work: Callable[[int, int, int], Measured],
        rows: Sequence[StoreRow],
        threads: int = 1,
        batch: int = 1,
    ) -> None:
        self.title = title
        self.work = work
        self.rows = rows
        self.threads = threads
        self.batch = batch
        self.measured: dict[StoreRow, list[Measured]] = {}
        self.rates: dict[StoreRow, list[float]] = {}
        self.absent: dict[StoreRow, str] = {}

    def run(self, directory: Path) -> None:
        """Runs all rounds and checks the ledgers. Raises Void."""
        with self._children(directory) as children:
            runs: dict[StoreRow, Callable[[], float]] = {
                row: self._sized(row, child) for row, child in children.items()
            }
            for row in self.rows:
                if row.store in RAWS:
                    runs[row] = lambda row=row: self._raw(row, directory)  # type: ignore[misc]
            for seen in self.measured.values():
                seen.clear()
            named = {f"{row.store}/{row.durability}": run for row, run in runs.items()}
            rates = interleave(ROUNDS, named)
            self.rates = dict(zip(runs, rates.values(), strict=True))
            for child in children.values():
                child.call(close_and_check)

    @contextmanager
    def _children(self, directory: Path) -> Iterator[dict[StoreRow, Child]]:
        children: dict[StoreRow, Child] = {}
        try:
            for number, row in enumerate(self.rows):
                if row.store in RAWS:
                    continue
                child = Child(PEER_OF.get(row.store))
                lack = child.call(start, row.store, directory / str(number), row.durability)
                if lack:
                    self.absent[row] = lack
                    child.close()
                else:
                    children[row] = child
            yield children
        finally:
            for child in children.values():
                child.close()
            shutil.rmtree(directory, ignore_errors=True)

    def _sized(self, row: StoreRow, child: Child) -> Callable[[], float]:
        unit = self.threads * self.batch

        def run(units: int) -> float:
            measured = child.call(self.work, units * unit, self.threads, self.batch)
            self.measured.setdefault(row, []).append(measured)
            return measured.took_s

        units = count_for(ROUND_S, run, start=max(1, 320 // unit))

        def rate() -> float:
            run(units)
            return self.measured[row][-1].rate

        return rate

    def _raw(self, row: StoreRow, directory: Path) -> float:
        """The limit for what Penstock's last round did, a sync for each call or each group."""
        done = self.measured[StoreRow(OURS, row.durability)][-1]
        message_bytes = round(done.appended_bytes / done.messages)
        path = directory / "raw"
        if row.store == RAW_THREADS:
            call_bytes = message_bytes * self.batch
            found = raw_in_threads(path, call_bytes, self.batch, self.threads, ROUND_S)
        else:
            group = self.batch
            if row.store == RAW_GROUPS:
                group = max(1, round(done.messages / max(1, done.syncs)))
            found = raw(path, message_bytes, group, ROUND_S)
        self.measured.setdefault(row, []).append(found)
        return found.rate

    def ratio(self, ours: StoreRow, theirs: StoreRow) -> float | None:
        """The median ratio of two rows; none if one is absent."""
        if ours not in self.rates or theirs not in self.rates:
            return None
        return ratio(self.rates[ours], self.rates[theirs])

    def group(self, row: StoreRow) -> float:
        """Messages per sync, over all rounds; 0 if syncs were not counted."""
        syncs = sum(measured.syncs for measured in self.measured.get(row, ()))
        return sum(m.messages for m in self.measured.get(row, ())) / syncs if syncs else 0.0

    def written(self, row: StoreRow) -> float:
        """Bytes written to the disk for each message, over all rounds."""
        runs = self.measured[row]
        return sum(run.written_bytes for run in runs) / sum(run.messages for run in runs)

    def print(self) -> None:
        """One table for each durability."""
        for durability in DURABILITIES:
            mine = [row for row in self.rates if row.durability == durability]
            first = next((row for row in mine if row.store == OURS), None)
            if not mine:
                continue
            cells = [
                (
                    row.store,
                    f"{median(self.rates[row]):,.0f}",
                    f"{min(self.rates[row]):,.0f}",
                    f"{max(self.rates[row]):,.0f}",
                    f"{self.ratio(first, row):.2f} ×" if first else "",
                    f"{self.group(row):.1f}" if self.group(row) else "",
                    f"{self.written(row):,.0f}",
                )
                for row in mine
            ]
            head = ("", "median", "lowest", "highest", "embedded is", "a sync", "disk B each")
            print_table(f"{self.title}, {durability}", head, cells)

    def figures(self) -> dict[str, Any]:
        """Everything, for the JSON line."""
        return {
            f"{row.store}, {row.durability}": {
                "per_s": round(median(rates), 1),
                "disk_bytes_each": round(self.written(row)),
                **({"messages_a_sync": round(self.group(row), 1)} if self.group(row) else {}),
            }
            for row, rates in self.rates.items()
        }


def races() -> dict[str, StoreRace]:
    """Every race, by its name in the JSON line."""

    def rows(durability: str, *stores: str) -> list[StoreRow]:
        return [StoreRow(store, durability) for store in stores]

    served = (OURS, DAEMON, "beanstalkd")
    return {
        "lifecycles": StoreRace(
            "lifecycles a second, one thread, one at a time",
            cycle,
            rows("os", "memory", *served, *LIBRARIES, "persist-queue file")
            + rows("interval", *served)
            + rows("sync", *served, *LIBRARIES),
        ),
        "lifecycles_in_tens": StoreRace(
            "lifecycles a second, one thread, ten a call",
            cycle,
            rows("os", *served) + rows("interval", *served) + rows("sync", *served),
            batch=BATCH,
        ),
        "pushes": StoreRace(
            "pushes a second, 16 producers, one a call",
            push,
            rows("sync", *served, *LIBRARIES, *RAWS),
            PRODUCERS,
        ),
        "pushes_in_tens": StoreRace(
            "pushes a second, 16 producers, ten a call",
            push,
            rows("interval", *served)
            + rows("sync", *served, *LIBRARIES, "litequeue, own transactions")
            + rows("sync", *RAWS),
            PRODUCERS,
            BATCH,
        ),
    }


def race_targets(run: Mapping[str, StoreRace]) -> Iterator[Target]:
    """The targets on rates; those whose rows are absent are left out."""
    ours, daemon = StoreRow(OURS, "sync"), StoreRow(DAEMON, "sync")
    wanted: list[tuple[str, str, StoreRow, StoreRow, float]] = [
        (
            "os, embedded / in memory",
            "lifecycles",
            StoreRow(OURS, "os"),
            StoreRow("memory", "os"),
            0.5,
        )
    ]
    for race, goal, how in (("pushes", 5.0, "16 × 1"), ("pushes_in_tens", 20.0, "16 × 10")):
        wanted += [
            (f"sync, {how}, embedded / {peer}", race, ours, StoreRow(peer, "sync"), goal)
            for peer in LIBRARIES
        ]
        wanted += [
            (f"sync, {how}, embedded / {limit}", race, ours, StoreRow(limit, "sync"), 0.5)
            for limit in (RAW_CALLS, RAW_GROUPS)
        ]
    for race, how in (("lifecycles_in_tens", "1 × 10"), ("pushes_in_tens", "16 × 10")):
        for durability in ("sync", "interval"):
            daemon, theirs = StoreRow(DAEMON, durability), StoreRow("beanstalkd", durability)
            name = f"{durability}, {how}, daemon / beanstalkd"
            wanted.append((name, race, daemon, theirs, 1.0))
    for name, race, mine, theirs, goal in wanted:
        value = run[race].ratio(mine, theirs)
        if value is not None:
            yield Target(name, value, goal)


def measure_backlog(directory: Path) -> tuple[list[Target], dict[str, Any]]:
    """Restarts, pauses and memory: the targets and the figures. Raises Void."""
    store = directory / "backlog"
    starts = backlog.restarts(store, BACKLOG)
    child = Child()
    gaps = child.call(backlog.pauses, store, BACKLOG, QUIET_S)
    child.close()
    shutil.rmtree(store)
    memory = {}
    for size_bytes in BODY_SIZES:
        child = Child()
        held = directory / f"held-{size_bytes}"
        memory[f"{size_bytes} B"] = child.call(backlog.memory_each, held, HELD, size_bytes)
        child.close()
        shutil.rmtree(held)
    print_figures(f"seconds to the first pull of {BACKLOG:,} messages", starts, "{:.2f}")
    print_figures(f"gaps with {BACKLOG:,} messages", gaps, "{:,.2f}")
    print_figures(f"resident bytes each of {HELD:,} queued messages", memory, "{:,.0f}")
    most = max(each["VmRSS"] for each in memory.values())
    targets = [
        *(
            Target(f"first pull {when}, s", starts[when]["process_s"], 1, at_least=False)
            for when in ("after kill -9", "after a close")
        ),
        Target("longest gap during a pass, ms", gaps["a pass"]["max_ms"], 50, at_least=False),
        Target("resident bytes a message, at most", most, 300, at_least=False),
    ]
    figures = {"restart": starts, "pauses": gaps, "resident_bytes_each": memory}
    return targets, rounded(figures)


def print_figures(title: str, found: Mapping[str, Mapping[str, float]], form: str) -> None:
    """Prints a table with a row for each entry and a column for each figure."""
    head = next(iter(found.values())).keys()
    rows = [(name, *(form.format(value) for value in row.values())) for name, row in found.items()]
    print_table(title, ("", *head), rows)


def rounded(value: Any) -> Any:
    """The same figures, rounded."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, 4)


def main() -> None:
    """Runs everything and prints it."""
    start_s = time.monotonic()
    for name, requirements in PEERS.items():
        install_peer(name, requirements)
    install_package("beanstalkd", "beanstalkd")
    line = machine()
    directory = disk_directory()
    disk = filesystem_of(directory)
    print(f"{line}; {disk} in {directory.parent}")
    syncs = [sync_us(directory)]
    try:
        run = races()
        for name, race in run.items():
            race.run(directory / name)
            race.print()
        targets, figures = measure_backlog(directory)
        syncs.append(sync_us(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"\na bare fdatasync took {syncs[0]:.0f} µs before and {syncs[1]:.0f} µs after all this")
    absent = {
        f"{row.store}, {row.durability}": lack
        for race in run.values()
        for row, lack in race.absent.items()
    }
    for row, lack in absent.items():
        print(f"absent: {row}: {lack}")
    finish(
        "durable",
        [*race_targets(run), *targets],
        {
            "machine": line,
            "filesystem": disk,
            "fdatasync_us": [round(each) for each in syncs],
            "took_s": round(time.monotonic() - start_s),
            "absent": absent,
            **{name: race.figures() for name, race in run.items()},
            **figures,
        },
    )


if __name__ == "__main__":
    run_benchmark(main, compare)
