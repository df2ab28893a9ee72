"""The cost of a large backlog: restarts, pauses and memory.

`restarts` fills a store, kills the process that filled it, and opens it again in new processes, up
to the first pull. `pauses` then runs commands in one thread without a break while a pass of upkeep
covers the whole backlog, and measures the longest gap between two rounds; at the end everything is
pulled, and each body must be pulled exactly once.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock
from benchmarks.harness import Void, check_ledger, percentile, rss_bytes
from benchmarks.stores import QUEUE
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.store import open_engine
from penstock.backends.engine.upkeep import Upkeep

CHUNK = 1_000
BODY_BYTES = 256
# The process whose start is timed imports only Penstock.
OPENER = """
import time
begun_s = time.monotonic()
import json, sys
import penstock
imported_s = time.monotonic()
queues = penstock.connect(sys.argv[1])
opened_s = time.monotonic()
claim = queues.pull("bench")
pulled_s = time.monotonic()
queues.release(claim)
messages = queues.stats("bench").messages
closing_s = time.monotonic()
queues.close()
print(json.dumps({
    "begun_s": begun_s, "imported_s": imported_s, "opened_s": opened_s, "pulled_s": pulled_s,
    "close_s": time.monotonic() - closing_s, "messages": messages,
}))
"""


def url(path: Path) -> str:
    """An embedded engine with durability `os`: only the process is killed, not the machine."""
    return f"file:{path}?embedded=1&durability=os"


def bodies(start: int, count: int, size_bytes: int = BODY_BYTES) -> list[bytes]:
    """Distinct bodies."""
    return [b"%0*d" % (size_bytes, number) for number in range(start, start + count)]


def fill(queues: penstock.Queues, count: int, size_bytes: int = BODY_BYTES) -> None:
    """Pushes so many messages, a thousand in each call. Raises Void."""
    for start in range(0, count, CHUNK):
        try:
            queues.push_many(QUEUE, bodies(start, min(CHUNK, count - start), size_bytes))
        except penstock.BatchRefused as error:
            raise Void(f"a push was refused: {error}") from error


def fill_and_kill(path: Path, count: int) -> None:
    """Fills a store, and kills this process once all pushes are answered."""
    queues = penstock.connect(url(path))
    queues.create(QUEUE)
    fill(queues, count)
    os.kill(os.getpid(), signal.SIGKILL)


def restarts(path: Path, count: int) -> dict[str, dict[str, float]]:
    """Seconds to the first pull after a kill, after a close, and with no file in the page cache."""
    code = "import sys; from benchmarks import backlog; from pathlib import Path; "
    code += "backlog.fill_and_kill(Path(sys.argv[1]), int(sys.argv[2]))"
    filler = subprocess.run([sys.executable, "-c", code, str(path), str(count)], check=False)
    if filler.returncode != -signal.SIGKILL:
        raise Void(f"filling the store ended with status {filler.returncode}")
    found = {"after kill -9": first_pull(path, count), "after a close": first_pull(path, count)}
    drop_cached(path)
    return found | {"after a close, nothing cached": first_pull(path, count)}


def first_pull(path: Path, count: int) -> dict[str, float]:
    """Starts a process that opens the store and pulls; the seconds from its start to each step."""
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", OPENER, url(path)], stdout=subprocess.PIPE, check=True, text=True
    )
    report = json.loads(done.stdout)
    if report["messages"] != count:
        raise Void(f"after a restart the queue has {report['messages']} messages of {count}")
    return {
        "process_s": report["pulled_s"] - start_s,
        "import_s": report["imported_s"] - report["begun_s"],
        "open_s": report["opened_s"] - report["imported_s"],
        "pull_s": report["pulled_s"] - report["opened_s"],
        "close_s": report["close_s"],
    }


def drop_cached(path: Path) -> None:
    """Drops the files from the page cache, as after a reboot."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def pauses(path: Path, count: int, quiet_s: float) -> dict[str, dict[str, float]]:
    """The longest gaps without and with a pass, in milliseconds. Raises Void."""
    engine = open_engine(path, durability="os")
    queues = penstock.Queues(BlockingEngine(engine))
    upkeep = engine.upkeep
    assert isinstance(upkeep, Upkeep)
    # No other pass may begin before the one that is measured.
    upkeep._journal.growth_limit = 1 << 62
    # The cost of the first command after opening is measured by `restarts`.
    claim = queues.pull(QUEUE)
    assert claim is not None
    queues.release(claim)
    worker = TimedWorker(queues, count)
    found = {"no pass": worker.run(lambda: time.sleep(quiet_s))}
    found["a pass"] = worker.run(upkeep.run_pass)
    check_ledger(worker.pushed, worker.drained())
    queues.close()
    return found


class TimedWorker:
    """Pushes, pulls, deletes and reads the depth in one thread, and times each round."""

    def __init__(self, queues: penstock.Queues, count: int) -> None:
        self.queues = queues
        self.pushed = bodies(0, count)
        self.pulled: list[bytes] = []

    def run(self, meanwhile: Callable[[], object]) -> dict[str, float]:
        """Works until `meanwhile` has returned; the figures of the gaps."""
        gaps_s = array("d")
        over = threading.Event()
        thread = threading.Thread(target=self._work, args=(gaps_s, over))
        thread.start()
        start_s = time.perf_counter()
        try:
            meanwhile()
        finally:
            took_s = time.perf_counter() - start_s
            over.set()
            thread.join()
        ordered = sorted(gaps_s)
        return {
            "took_s": took_s,
            "rounds": len(ordered),
            "p50_ms": percentile(ordered, 50) * 1e3,
            "p99.9_ms": percentile(ordered, 99.9) * 1e3,
            "max_ms": ordered[-1] * 1e3,
        }

    def _work(self, gaps_s: "array[float]", over: threading.Event) -> None:
        queues, now = self.queues, time.perf_counter
        number = len(self.pushed)
        before_s = now()
        while not over.is_set():
            body = b"%0*d" % (BODY_BYTES, number)
            number += 1
            queues.push(QUEUE, body)
            claim = queues.pull(QUEUE)
            if claim is None or not queues.delete(claim):
                raise Void("a pull found no message, or a delete deleted nothing")
            queues.stats(QUEUE)
            after_s = now()
            gaps_s.append(after_s - before_s)
            before_s = after_s
            self.pushed.append(body)
            self.pulled.append(claim.body)

    def drained(self) -> Iterator[bytes]:
        """Everything pulled so far, and then all that remains."""
        yield from self.pulled
        while claims := self.queues.pull_many(QUEUE, CHUNK):
            if not all(deleted is True for deleted in self.queues.delete_many(claims)):
                raise Void("a delete deleted nothing")
            yield from (claim.body for claim in claims)


def memory_each(path: Path, count: int, size_bytes: int) -> dict[str, float]:
    """Resident bytes for each queued message, with and without mapped files."""
    with penstock.connect(url(path)) as queues:
        queues.create(QUEUE)
        fill(queues, 10 * CHUNK, size_bytes)
        before = {kind: rss_bytes(kind) for kind in ("VmRSS", "RssAnon")}
        fill(queues, count, size_bytes)
        grown: dict[str, Any] = {kind: rss_bytes(kind) - before[kind] for kind in before}
        there = queues.stats(QUEUE).messages
        if there != count + 10 * CHUNK:
            raise Void(f"{there} messages of {count + 10 * CHUNK} are there")
    return {kind: value / count for kind, value in grown.items()}
