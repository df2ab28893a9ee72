"""Reports of a store that cannot be reached: one for all commands that fail meanwhile."""

from collections.abc import Mapping
from time import monotonic
from typing import ClassVar, Final, TypeVar

from penstock.errors import BackendLost
from penstock.output import logger
from penstock.service import AsyncQueueService, Command

R = TypeVar("R")

REMINDER_S: Final = 60.0
_logger: Final = logger("penstock.tasks")


class OutageReporter:
    """A service whose outages go to `logging`: at their begin, every minute, and at their end."""

    LACKS: ClassVar[Mapping[str, str]] = {}

    def __init__(self, service: AsyncQueueService) -> None:
        self._service = service
        vars(self)["LACKS"] = service.LACKS
        self.redrive_max = service.redrive_max
        self._began_s: float | None = None
        self._reported_s = 0.0

    async def execute(self, command: Command[R]) -> R:
        """Executes the command. Raises what the service raises."""
        try:
            reply = await self._service.execute(command)
        except BackendLost as error:
            self._report(error)
            raise
        if self._began_s is not None:
            took_s, self._began_s = monotonic() - self._began_s, None
            _logger.warning("the store answers again, after %.2g s", took_s)
        return reply

    async def close(self) -> None:
        """Closes the service."""
        await self._service.close()

    def _report(self, error: BackendLost) -> None:
        now_s = monotonic()
        if self._began_s is None:
            self._began_s = now_s
        elif now_s - self._reported_s < REMINDER_S:
            return
        self._reported_s = now_s
        _logger.warning("%s; trying again until the store answers", error)
