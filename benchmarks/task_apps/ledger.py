"""Which calls have run: one byte for each, in a file that the worker and the benchmark map."""

import mmap
import os
from pathlib import Path

LEDGER = "BENCHMARK_LEDGER"
REDIS = "BENCHMARK_REDIS"


class Ledger:
    """A count for each number, shared by processes. A call costs a fraction of a microsecond."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._seen = mmap.mmap(file.fileno(), 0)
        self.size = len(self._seen)

    def note(self, number: int) -> None:
        """Counts one run of a call."""
        self._seen[number] += 1

    def counts(self) -> bytes:
        """How often each call has run."""
        return self._seen[:]

    def clear(self) -> None:
        """Sets every count to 0, for every process that has mapped the file."""
        self._seen[:] = bytes(self.size)

    def missing(self, count: int) -> int:
        """How many of the first calls have not run."""
        return self._seen[:count].count(0)

    def repeated(self, count: int) -> int:
        """How many of the first calls have run more than once."""
        return count - self.missing(count) - self._seen[:count].count(1)


def make_ledger(path: Path, size: int) -> Ledger:
    """A new ledger in which nothing has run."""
    path.write_bytes(bytes(size))
    return Ledger(path)


def opened() -> Ledger:
    """The ledger of this run."""
    return Ledger(Path(os.environ[LEDGER]))


def redis_url() -> str:
    """The store of this run."""
    return os.environ[REDIS]
