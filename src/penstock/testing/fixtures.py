"""What the fixtures of `pytest_penstock` give: a clock of all places, and tasks of one app."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from penstock.errors import PenstockError
from penstock.tasks import TaskApp
from penstock.testing.awaiting import story_text
from penstock.testing.places import QueuePlace, TestQueues


class TestClock:
    """The clock of every place that a test uses: moved together, they stay as far apart."""

    __test__ = False

    def __init__(self, places: list[QueuePlace]) -> None:
        self._places = places

    @property
    def _used(self) -> list[QueuePlace]:
        if not self._places:
            raise RuntimeError(
                "penstock_clock: the test uses no queues yet; use penstock_server, penstock_sqs, "
                "penstock_endpoint, penstock_queues or penstock_tasks, too"
            )
        return self._places

    def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """Moves time forward, and returns when all that is due has been done."""
        step = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        for each in self._used:
            each.advance(step)

    @property
    def now(self) -> datetime:
        """The time."""
        return self._used[0].now

    def set_mode(self, mode: str) -> None:
        """Stands still (manual), moves when somebody waits (auto), or flows (system)."""
        for each in self._used:
            each.set_mode(mode)


class TestTasks:
    """Tasks on the queues of a test, run in its thread; `app` is a new TaskApp on them."""

    __test__ = False

    def __init__(self, queues: TestQueues) -> None:
        self._queues = queues
        self._leave: list[Any] = []
        self.app = self.use(TaskApp("memory:"))

    def use(self, app: TaskApp) -> TaskApp:
        """Lets an app of the code under test use these queues until the test ends."""
        self._leave.append(app.use_service(self._queues.service, self._queues.movable))
        self.app = app
        return app

    def run(self, *queues: str) -> int:
        """Runs tasks until none is left; time moves to the next delayed task or retry.

        Returns how many attempts ran.
        """
        clock = self._queues.movable
        before = clock.mode
        clock.set_mode("auto")
        try:
            return self.app.run_until_empty(*queues)
        finally:
            clock.set_mode(before)

    def close(self) -> None:
        """Gives each app its own store again."""
        while self._leave:
            self._leave.pop()()


def sections_of(places: Sequence[QueuePlace]) -> list[tuple[str, str]]:
    """The sections of a failed test's report: what happened to the messages of each queue."""
    sections = []
    for place in places:
        try:
            told = place.stories()
        except (PenstockError, OSError) as error:
            told = {f"cannot be told: {error}": []}
        if told:
            sections.append(("Penstock: what happened to each message", story_text(told)))
    return sections
