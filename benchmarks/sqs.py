"""The SQS endpoint beside other SQS servers and a bare loop: `make bench NAME=sqs`.

Every server gets the same load from the same two scripts, one after the other, while all others
idle; nothing is pinned to a core. `sqs_servers` lists them, `sqs_load` is the load.
With `ARGS="--beside PATH"` only Penstock is run, from this checkout and the one at PATH.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import (
    Child,
    Target,
    Void,
    disk_directory,
    filesystem_of,
    finish,
    install_package,
    interleave,
    machine,
    print_table,
    ratio,
    run_benchmark,
)
from benchmarks.sqs_beside import compare
from benchmarks.sqs_load import Cell, QueueEmptied, Work, boto3_lifecycles, run_wrk
from benchmarks.sqs_servers import (
    BARE,
    DURABLE,
    KINDS,
    MEMORY,
    OLD_BOTO3,
    PEER_NAMES,
    Absent,
    PeerServer,
)

ROUNDS = 4
ROUND_S = 1
WARM_S = 1
BOTO3_ROUNDS = 3
BOTO3_S = 0.8
STARTS = 7
BACKLOG = 1_000_000
FILL_S = 4
TRIES_MAX = 5
FEW, MANY = 1, 32
CONNECTIONS = (FEW, MANY)
# In this order: the receives need messages that were sent before.
WORKS = (Work("send", 1), Work("send", 10), Work("receive", 1), Work("receive", 10))


class ServerRow(NamedTuple):
    """A server, with an empty queue or with a backlog of `waiting` messages."""

    server: str
    waiting: int = 0

    def __str__(self) -> str:
        return f"{self.server}, {self.waiting:,} waiting" if self.waiting else self.server


class ServerRace(NamedTuple):
    """All rows do the same work with the same number of connections."""

    work: Work
    connections: int

    def __str__(self) -> str:
        many = "connection" if self.connections == 1 else "connections"
        return f"{self.work}, {self.connections} {many}"


Figures = dict[ServerRace, dict[ServerRow, list[Cell]]]


class Contestant:
    """A running server and the queue that is used now."""

    def __init__(self, row: ServerRow, directory: Path) -> None:
        self.server = PeerServer(row.server, directory)
        self._numbers = count()
        self._fixed = bool(row.waiting)
        self.queue_url = self.server.create_queue("bench")
        if row.waiting:
            self._fill(row.waiting)

    def _fill(self, waiting: int) -> None:
        while self.server.depth(self.queue_url).visible < waiting:
            self.run(ServerRace(Work("send", 10), MANY), FILL_S)

    def renew(self) -> None:
        """Replaces the queue by an empty one, unless the row has a backlog."""
        if not self._fixed:
            self.server.delete_queue(self.queue_url)
            self.queue_url = self.server.create_queue(f"bench-{next(self._numbers)}")

    def run(self, race: ServerRace, seconds: int) -> Cell:
        """Loads the server for `seconds`. Raises Void."""
        for _ in range(TRIES_MAX):
            try:
                return run_wrk(self.server, self.queue_url, race.work, race.connections, seconds)
            except QueueEmptied:
                self.run(ServerRace(Work("send", 10), race.connections), seconds)
        raise Void(f"{self.server.name}, {race}: the queue became empty {TRIES_MAX} times")


def run_races(contestants: Mapping[ServerRow, Contestant], rounds: int, seconds: int) -> Figures:
    """Interleaved rounds of all races; each row's figures, round by round. Raises Void."""
    figures: Figures = {}
    for number in range(rounds):
        for connections in CONNECTIONS:
            rows = [row for row in contestants if connections == MANY or not row.waiting]
            for row in rows:
                contestants[row].renew()
            for work in WORKS:
                race = ServerRace(work, connections)
                found = figures.setdefault(race, {row: [] for row in rows})
                for row in rows if number % 2 == 0 else reversed(rows):
                    found[row].append(contestants[row].run(race, seconds))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return figures


def run_boto3(contestants: Mapping[ServerRow, Contestant]) -> dict[ServerRow, list[float]]:
    """Lifecycles a second through boto3, one client. Raises Void."""
    rows = [row for row in contestants if not row.waiting and KINDS[row.server].keeps_messages]
    numbers = count()

    def run(row: ServerRow, child: Child) -> Callable[[], float]:
        server = contestants[row].server
        by_queue = server.kind.protocol == "query"
        return lambda: child.call(
            boto3_lifecycles, server.url, f"boto3-{next(numbers)}", BOTO3_S, by_queue
        )

    with ExitStack() as stack:
        runs = {}
        for row in rows:
            child = Child(OLD_BOTO3 if KINDS[row.server].protocol == "query" else None)
            stack.callback(child.close)
            runs[str(row)] = run(row, child)
            runs[str(row)]()
        rates = interleave(BOTO3_ROUNDS, runs)
    return dict(zip(rows, rates.values(), strict=True))


def start_times(directory: Path) -> dict[str, list[float]]:
    """Seconds from starting `penstock serve` on an empty store to its first answer."""
    numbers = count()

    def run(name: str) -> Callable[[], float]:
        def start() -> float:
            server = PeerServer(name, directory / f"start-{next(numbers)}")
            server.stop()
            return server.start_s

        return start

    return interleave(STARTS, {name: run(name) for name in (MEMORY, DURABLE)})


def targets(figures: Figures) -> Iterator[Target]:
    """The goals for the rates of each kind of work, with many connections."""
    memory, durable = ServerRow(MEMORY), ServerRow(DURABLE)
    for work in WORKS:
        found = figures[ServerRace(work, MANY)]
        rates = {row: [cell.per_s for cell in cells] for row, cells in found.items()}
        peers = [row for row in rates if row.server in PEER_NAMES]
        if peers:
            best = max(peers, key=lambda row: median(rates[row]))
            yield Target(f"{work}: memory / {best}", ratio(rates[memory], rates[best]), 3)
            yield Target(f"{work}: durable / {best}", ratio(rates[durable], rates[best]), 1.5)
        yield Target(
            f"{work}: memory / bare loop", ratio(rates[memory], rates[ServerRow(BARE)]), 0.4
        )
        for row in rates:
            if row.waiting:
                value = ratio(rates[row], rates[ServerRow(row.server)])
                yield Target(f"{work}: {row} / empty", value, 0.8)


def print_race(race: ServerRace, found: Mapping[ServerRow, Sequence[Cell]]) -> None:
    """Messages a second and latencies of requests, as medians over the rounds."""
    ours = [cell.per_s for cell in found[ServerRow(MEMORY)]]
    rows = []
    for row, cells in found.items():
        rates = [cell.per_s for cell in cells]
        rows.append(
            (
                str(row),
                f"{median(rates):,.0f}",
                f"{min(rates):,.0f}",
                f"{max(rates):,.0f}",
                f"{ratio(ours, rates):.2f} ×",
                f"{median(cell.p50_ms for cell in cells):.2f}",
                f"{median(cell.p99_ms for cell in cells):.2f}",
            )
        )
    head = ("", "median", "lowest", "highest", "memory is", "p50 ms", "p99 ms")
    print_table(f"messages a second: {race}", head, rows)


def print_boto3(rates: Mapping[ServerRow, Sequence[float]]) -> None:
    """The same for the boto3 script."""
    ours = rates[ServerRow(MEMORY)]
    rows = [
        (str(row), f"{median(each):,.0f}", f"{ratio(ours, each):.2f} ×")
        for row, each in rates.items()
    ]
    print_table(
        "send, receive, delete a second: one boto3 client", ("", "median", "memory is"), rows
    )


def as_json(figures: Figures) -> dict[str, Any]:
    """The medians of everything."""
    return {
        str(race): {
            str(row): {
                "per_s": round(median(cell.per_s for cell in cells), 1),
                "p50_ms": round(median(cell.p50_ms for cell in cells), 3),
                "p99_ms": round(median(cell.p99_ms for cell in cells), 3),
            }
            for row, cells in found.items()
        }
        for race, found in figures.items()
    }


def contest(
    stack: ExitStack, directory: Path, rows: Sequence[ServerRow]
) -> tuple[dict[ServerRow, Contestant], dict[str, str]]:
    """Starts all servers; returns those that run, and the reasons of those that do not."""
    contestants: dict[ServerRow, Contestant] = {}
    absent: dict[str, str] = {}
    for number, row in enumerate(rows):
        try:
            contestants[row] = Contestant(row, directory / str(number))
        except Absent as reason:
            absent[str(row)] = str(reason)
            print(f"absent: {row}: {reason}", flush=True)
            continue
        stack.callback(contestants[row].server.stop)
    return contestants, absent


def main() -> None:
    """Runs everything and prints it."""
    start_s = time.monotonic()
    if not install_package("wrk", "wrk"):
        sys.exit("benchmark: there is no wrk, and the Debian package cannot be installed")
    line = machine()
    directory = disk_directory()
    disk = filesystem_of(directory)
    print(f"{line}; {disk} in {directory.parent}", flush=True)
    rows = [*map(ServerRow, KINDS), ServerRow(MEMORY, BACKLOG), ServerRow(DURABLE, BACKLOG)]
    try:
        starts = start_times(directory)
        with ExitStack() as stack:
            contestants, absent = contest(stack, directory, rows)
            for contestant in contestants.values():
                for work in WORKS:
                    # The first requests are slower on all servers, on some much slower.
                    contestant.run(ServerRace(work, MANY), WARM_S)
            figures = run_races(contestants, ROUNDS, ROUND_S)
            lifecycles = run_boto3(contestants)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for race, found in figures.items():
        print_race(race, found)
    print_boto3(lifecycles)
    seconds = {name: median(each) for name, each in starts.items()}
    print("\nfrom start to first answer, empty store, median of", STARTS)
    for name, each in seconds.items():
        print(f"  {name}: {each:.3f} s")
    slowest_s = max(seconds.values())
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")
    finish(
        "sqs",
        [*targets(figures), Target("start to first answer, s", slowest_s, 0.5, at_least=False)],
        {
            "machine": line,
            "filesystem": disk,
            "took_s": round(time.monotonic() - start_s),
            "absent": absent,
            "races": as_json(figures),
            "boto3_per_s": {str(row): round(median(each), 1) for row, each in lifecycles.items()},
            "start_s": {name: round(each, 3) for name, each in seconds.items()},
        },
    )


if __name__ == "__main__":
    run_benchmark(main, compare)
