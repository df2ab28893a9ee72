"""What a command waits for at the moment: the steps that it has named, and Spark's own status.

A step is a name, such as a table's, for the Spark jobs that run within it. Spark's pages show it as
the description of these jobs. Whoever shows progress asks for `status`: how much of the innermost
step is done, by the tasks of Spark's stages or, if the step counts something itself, by that.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.session import is_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DESCRIPTION: Final = "spark.job.description"


def _ignore_change() -> None:
    """What is called on a change while nobody shows progress."""


@dataclass
class WaitStep:
    """A piece of work that somebody waits for."""

    name: str
    spark: "SparkSession | None" = None
    done: float | None = None
    of: float | None = None
    expected_s: float | None = None
    began_s: float = field(default_factory=lambda: time.monotonic())

    def reached(self, done: float, of: float | None = None) -> None:
        """Says how much is done, in any unit."""
        self.done = done
        self.of = self.of if of is None else of
        _on_change()


@dataclass(frozen=True)
class StepStatus:
    """How far the innermost step is."""

    name: str
    # None while nothing of it is known.
    part: float | None = None
    rows: int = 0
    left_s: float | None = None
    # Whether a cluster has no executor for it.
    waits: bool = False


# The steps of this process: a streaming query calls back in another thread than the one that began.
_steps: Final[list[WaitStep]] = []
_lock: Final = threading.Lock()
_on_change: Callable[[], None] = _ignore_change
# Of the operations of Spark Connect that run: tasks that are done, and all of those known so far.
_remote: Final[dict[str, tuple[int, int]]] = {}


def show_steps(on_change: Callable[[], None] = _ignore_change) -> None:
    """Has this called whenever a step begins, reaches more, or ends."""
    global _on_change
    _on_change = on_change


@contextmanager
def step(
    spark: "SparkSession | None",
    name: str,
    done: float | None = None,
    of: float | None = None,
    *,
    expected_s: float | None = None,
) -> Iterator[WaitStep]:
    """Names the work within it: for whoever waits, and in Spark's pages."""
    begun = WaitStep(name, spark, done, of, expected_s)
    with _lock:
        _steps.append(begun)
    try:
        _describe(spark, name)
        _on_change()
        yield begun
    finally:
        with _lock:
            _steps.remove(begun)
            outer = _steps[-1].name if _steps else None
        _describe(spark, outer)
        _on_change()


def status() -> StepStatus | None:
    """How far the innermost step is; None if there is none."""
    with _lock:
        if not _steps:
            return None
        current = _steps[-1]
        spark = next((each.spark for each in reversed(_steps) if each.spark is not None), None)
    now_s = time.monotonic()
    if current.expected_s:
        left_s = current.began_s + current.expected_s - now_s
        return StepStatus(current.name, min(0.95, 1 - left_s / current.expected_s), 0, left_s)
    tasks = _tasks(spark)
    if current.done is not None:
        part = min(1.0, current.done / current.of) if current.of else None
        return _estimate.of(current.name, (id(current),), current.began_s, part, tasks, now_s)
    part = tasks.done / tasks.of if tasks.of else None
    return _estimate.of(current.name, (id(current), *tasks.stages), None, part, tasks, now_s)


@dataclass(frozen=True)
class _Tasks:
    """The tasks of Spark's stages that run at the moment, and the rows that they have read."""

    done: int = 0
    of: int = 0
    rows: int = 0
    stages: tuple[int, ...] = ()
    waits: bool = False


class _Estimate:
    """When a piece of work will end, if it goes on as it did up to the last time it got further."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._began_s = 0.0
        self._at_s = 0.0
        self._part = 0.0

    def of(
        self, name: str, key: tuple[int, ...], began_s: float | None, part: float | None,
        tasks: _Tasks, now_s: float,
    ) -> StepStatus:  # fmt: skip
        """The status of the work with this key, of which this part is done."""
        if part is None:
            return StepStatus(name, None, tasks.rows, None, tasks.waits)
        if key != self._key:
            self._key, self._began_s, self._part = key, began_s or now_s, 0.0
        if part != self._part:
            self._part, self._at_s = part, now_s
        left_s = None
        if part > 0:
            left_s = self._began_s + (self._at_s - self._began_s) / part - now_s
        return StepStatus(name, part, tasks.rows, left_s, tasks.waits)


_estimate: Final = _Estimate()


def follow_remote(spark: "SparkSession") -> None:
    """Has a session of Spark Connect report its tasks."""
    # PySpark's type of a handler has no place for the keywords that it says to accept.
    spark.registerProgressHandler(_take_progress)  # type: ignore[arg-type]


def _take_progress(
    stages: Any, inflight_tasks: int, operation_id: str | None, done: bool, **_: Any
) -> None:
    if done or operation_id is None:
        _remote.pop(operation_id or "", None)
        return
    tasks = [(stage.num_completed_tasks, stage.num_tasks) for stage in stages or ()]
    _remote[operation_id] = sum(each[0] for each in tasks), sum(each[1] for each in tasks)


def _tasks(spark: "SparkSession | None") -> _Tasks:
    if spark is None:
        return _Tasks()
    if is_remote(spark):
        found = list(_remote.values())
        return _Tasks(sum(each[0] for each in found), sum(each[1] for each in found))
    # Imported here: progress is drawn without Spark, too, and py4j comes with it.
    from py4j.protocol import Py4JError

    done = of = rows = active = 0
    numbers = []
    try:
        context = spark.sparkContext
        stages = context._jsc.sc().statusStore().activeStages()
        for number in range(stages.size()):
            stage = stages.apply(number)
            numbers.append(stage.stageId())
            done += stage.numCompleteTasks()
            of += stage.numTasks()
            active += stage.numActiveTasks()
            rows += stage.inputRecords() + stage.shuffleReadRecords()
        waits = bool(of) and not active and not str(context.master).startswith("local")
    except (Py4JError, OSError):
        # The session is ending: whoever uses it gets the error.
        return _Tasks()
    return _Tasks(done, of, rows, tuple(numbers), waits)


def _describe(spark: "SparkSession | None", name: str | None) -> None:
    if spark is not None and not is_remote(spark):
        spark.sparkContext.setLocalProperty(_DESCRIPTION, name)  # type: ignore[arg-type]
