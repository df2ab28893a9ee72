"""What the console changes: each action is a generator of ordinary commands, and says what it did.

A long action is done in parts: each request does one, and the page asks for the next. So the page
can show how far it is and stop, and nothing goes on when the page is closed.
"""

from base64 import b64decode
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from penstock.backends.loop import LoopService, Steps
from penstock.errors import InvalidField
from penstock.server.console.visitor import Refused
from penstock.service import (
    PUSHER,
    Batch,
    Claim,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    PullIds,
    Purge,
    Push,
    PushReply,
    Redrive,
    RedriveIds,
    ReturnIds,
)

# How many messages one request moves or deletes.
PART_MAX: Final = 1_000
_IDS_MAX: Final = 100
_HOLD_MS: Final = 60_000


class Performed(NamedTuple):
    """The result of an action for the page, and the line for the server's output."""

    result: dict[str, Any]
    told: str


Action = Callable[[dict[str, Any], str], Steps[Performed]]


class Actions:
    """The actions on one service, by name."""

    def __init__(self, service: LoopService) -> None:
        self._service = service
        self.by_name: dict[str, Action] = {
            "send": self._send,
            "delete": self._delete,
            "release": self._release,
            "redrive": self._redrive,
            "purge": self._purge,
            "create-queue": self._create,
            "configure-queue": self._configure,
            "delete-queue": self._delete_queue,
        }

    def _send(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        queue = _text(given, "queue")
        if given.get("is_binary"):
            try:
                body = b64decode(_text(given, "body"), validate=True)
            except ValueError:
                raise InvalidField("body: is not base64") from None
        else:
            body = _text(given, "body").encode()
        attributes = given.get("attributes") or None
        reply: PushReply = yield Push(
            queue,
            body,
            given.get("delay_ms"),
            given.get("priority") or 0,
            given.get("ttl_ms"),
            given.get("dedup_id") or None,
            given.get("group") or None,
            attributes,
            {PUSHER: _holder(who)},
        )
        told = f"sent message {reply.id} to {queue}"
        return Performed({"id": reply.id, "is_duplicate": reply.duplicate}, told)

    def _delete(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        """Claims messages by their ids and deletes them; those that others hold are left."""
        queue, ids = _text(given, "queue"), _ids(given)
        self._check("by id")
        done = 0
        for start in range(0, len(ids), _IDS_MAX):
            holder = _holder(who)
            part = ids[start : start + _IDS_MAX]
            claims: list[Claim] = yield PullIds(queue, part, _HOLD_MS, holder)
            if claims:
                deleted: list[Any] = yield Batch([Delete(queue, each.receipt) for each in claims])
                done += sum(each is True for each in deleted)
            yield None
        return Performed(
            {"count": done, "left": len(ids) - done}, f"deleted {done} messages of {queue}"
        )

    def _release(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        queue, ids = _text(given, "queue"), _ids(given)
        self._check("by id")
        count: int = yield ReturnIds(queue, ids)
        told = f"made {count} messages of {queue} visible"
        return Performed({"count": count, "left": len(ids) - count}, told)

    def _redrive(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        """Moves the messages of these ids, or the next ones of the queue."""
        queue = _text(given, "queue")
        to = given.get("to") or None
        target = "their source queues" if to is None else to
        if given.get("ids") is not None:
            ids = _ids(given)
            self._check("by id")
            moved: int = yield RedriveIds(queue, ids, to)
            return Performed(
                {"count": moved, "left": len(ids) - moved},
                f"moved {moved} messages of {queue} to {target}",
            )
        done = 0
        while done < PART_MAX:
            count: int = yield Redrive(queue, to, min(PART_MAX - done, self._service.redrive_max))
            done += count
            if not count:
                break
            yield None
        told = f"moved {done} messages of {queue} to {target}" if done else ""
        return Performed({"count": done, "is_done": done < PART_MAX}, told)

    def _purge(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        queue = _text(given, "queue")
        count: int = yield Purge(queue)
        return Performed({"count": count}, f"purged {queue}: {count} messages")

    def _create(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        queue = _text(given, "queue")
        yield CreateQueue(queue, _settings(given))
        return Performed({}, f"created queue {queue}")

    def _configure(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        queue, settings = _text(given, "queue"), _settings(given)
        yield ConfigureQueue(queue, settings)
        shown = ", ".join(f"{name}={value}" for name, value in settings.items())
        return Performed({}, f"configured {queue}: {shown}")

    def _delete_queue(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        queue = _text(given, "queue")
        yield DeleteQueue(queue)
        return Performed({}, f"deleted queue {queue}")

    def _check(self, behaviour: str) -> None:
        reason = self._service.LACKS.get(behaviour)
        if reason is not None:
            raise Refused(400, f"Not on this store: {reason}.")


def _holder(who: str) -> str:
    return f"the console ({who})"[:128]


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if type(value) is not str:
        raise InvalidField(f"{name}: expected text")
    return value


def _ids(given: dict[str, Any]) -> list[str]:
    ids = given.get("ids")
    if type(ids) is not list or not 1 <= len(ids) <= PART_MAX:
        raise InvalidField(f"ids: expected a list of 1 to {PART_MAX} ids")
    return ids


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Settings from the page; `annotations` belong to the protocols, and are not changed here."""
    settings = given.get("settings")
    if type(settings) is not dict or "annotations" in settings:
        raise InvalidField("settings: expected a map of settings other than annotations")
    return settings
