"""What is read about the queues of one service: for the console's pages, and for `penstock top`."""

from collections.abc import Callable
from typing import Any

from penstock.backends.loop import LoopService, Pending, Steps
from penstock.server.console import views
from penstock.server.console.deadletters import DeadLetterGroups
from penstock.server.console.messages import LifeParts, MessageViews
from penstock.server.console.status import Status
from penstock.server.console.visitor import Refused
from penstock.service import History

Read = Callable[[dict[str, str]], Steps[dict[str, Any]]]


class Reads:
    """Each function in `by_name` makes the answer to one request, from what was given with it."""

    def __init__(self, service: LoopService, status: Status, *, mask: bool) -> None:
        self._service = service
        self._status = status
        messages = MessageViews(service, mask=mask)
        dead_letters = DeadLetterGroups(service, messages, mask=mask)
        self.by_name: dict[str, Read] = {
            "queues": self._queues,
            "queue": self._queue,
            "messages": messages.page,
            "search": messages.search,
            "message": messages.by_id,
            "dead-letters": dead_letters.part,
        }

    def life(self, message_id: str) -> Pending:
        """What happened to a message: read in slices, because it may be much of the journal."""
        return self._service.history(History(message_id), LifeParts(self._service.now_ms))

    def _queues(self, given: dict[str, str]) -> Steps[dict[str, Any]]:
        yield from self._status.fresh()
        return views.overview(self._status)

    def _queue(self, given: dict[str, str]) -> Steps[dict[str, Any]]:
        name = given.get("name", "")
        if name not in self._status.queues:
            self._status.expire()
        yield from self._status.fresh()
        queue = self._status.queues.get(name)
        if queue is None:
            raise Refused(404, f"There is no queue {name!r}.")
        return views.queue_page(queue, self._status)
