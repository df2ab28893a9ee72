"""Which calls have run: one byte for each, in a file that the worker and the benchmark map."""

import mmap
import os
import sys
from pathlib import Path

LEDGER = "BENCHMARK_LEDGER"
REDIS = "BENCHMARK_REDIS"


class CallLedger:
    """A count for each number, shared by processes. A call costs a fraction of a microsecond."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._seen = mmap.mmap(file.fileno(), 0)
        self.size = len(self._seen)

    def note(self, number: int) -> None:
        """Counts one run of a call."""
        self._seen[number] += 1

    def note_late_ms(self, number: int, late_ms: int) -> None:
        """Stores how late a call ran, once for each number, in two bytes of its own."""
        stored = min(late_ms + 1, 0xFFFF)
        self._seen[2 * number : 2 * number + 2] = stored.to_bytes(2, sys.byteorder)

    def late_ms(self) -> list[int]:
        """How late the calls ran that have run, sorted."""
        stored = memoryview(self._seen[:]).cast("H")
        return sorted(each - 1 for each in stored if each)

    def clear(self) -> None:
        """Sets every count to 0, for every process that has mapped the file."""
        self._seen[:] = bytes(self.size)

    def missing(self, count: int) -> int:
        """How many of the first calls have not run."""
        return self._seen[:count].count(0)

    def repeated(self, count: int) -> int:
        """How many of the first calls have run more than once."""
        return count - self.missing(count) - self._seen[:count].count(1)


def make_ledger(path: Path, size: int) -> CallLedger:
    """A new ledger in which nothing has run."""
    path.write_bytes(bytes(size))
    return CallLedger(path)


def opened() -> CallLedger:
    """The ledger of this run."""
    return CallLedger(Path(os.environ[LEDGER]))


def redis_url() -> str:
    """The store of this run."""
    return os.environ[REDIS]
