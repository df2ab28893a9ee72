"""Runs a function of Python over many pieces of work: each is one task of Spark.

A piece of work holds all that its task needs, and the result holds all that it did, so a task may
be run again on any machine, as when its executor is lost. Files that the lost run wrote are in no
result. A small number of pieces is done in this process: starting Spark would take longer.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from penstock.spark.workers import spare_modules

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

# Up to so many pieces are done in this process.
LOCAL_MAX: Final = 16
_POLL_S: Final = 0.3

W = TypeVar("W")
R = TypeVar("R")
Progress = Callable[[float], None]
OpenSpark = Callable[[], "SparkSession"]


def no_progress(part: float) -> None:
    """Ignores progress."""


def distribute(
    open_spark: OpenSpark,
    function: Callable[[W, int], R],
    work: Sequence[W],
    result: type[R],
    scratch: Path,
    progress: Progress = no_progress,
    *,
    local_max: int | None = None,
    size: int | None = None,
) -> list[R]:
    """What the function returns for each piece of work and a number of threads, in any order.

    Results are of the type `result` and travel as msgpack. `scratch` is a directory that every
    executor sees; what tasks leave there to show progress is removed. Up to `local_max` pieces are
    done in this process; `size` is the number to be compared if pieces hold several parts each.
    """
    if (len(work) if size is None else size) <= (LOCAL_MAX if local_max is None else local_max):
        return _run_here(function, work, progress)
    spark = open_spark()
    scratch.mkdir(parents=True, exist_ok=True)
    marks = tempfile.mkdtemp(prefix="progress-", dir=scratch)
    ended = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(Path(marks), len(work), ended, progress), daemon=True
    )
    watcher.start()
    try:
        frame = spark.range(0, len(work), 1, len(work))
        rows = frame.mapInArrow(_body(function, list(work), marks), "result binary").collect()
    finally:
        ended.set()
        watcher.join()
        shutil.rmtree(marks, ignore_errors=True)
    return [msgspec.msgpack.decode(row["result"], type=result) for row in rows]


def _run_here(function: Callable[[W, int], R], work: Sequence[W], progress: Progress) -> list[R]:
    """Runs the function in threads of this process, a piece each while there are enough pieces."""
    cores = len(os.sched_getaffinity(0))
    at_once = max(1, min(cores, len(work)))
    results = []
    with threads_until_error(at_once) as pool:
        pieces = [pool.submit(function, piece, cores // at_once) for piece in work]
        for done in as_completed(pieces):
            results.append(done.result())
            progress(len(results) / len(work))
    return results


@contextmanager
def threads_until_error(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads; after an error in the block, what they have not begun is left undone."""
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _body(
    function: Callable[[W, int], R], work: Sequence[W], marks: str
) -> Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]:
    def body(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        spare_modules()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                result = msgspec.msgpack.encode(function(work[number], 1))
                Path(marks, str(number)).touch()
                yield pa.RecordBatch.from_pydict({"result": pa.array([result], pa.binary())})

    return body


def _watch(marks: Path, total: int, ended: threading.Event, progress: Progress) -> None:
    shown = -1
    while not ended.wait(_POLL_S):
        done = len(os.listdir(marks))
        if done != shown:
            progress(done / total)
            shown = done
