"""Messages for the console: pages of a queue, searches, one message and its life.

Nothing here claims a message. A search reads a queue page by page, as many messages in one request
as take a fraction of a second, and says where to go on; other requests are answered in between.
"""

from base64 import b64encode
from collections.abc import Callable
from typing import Any, Final

import msgspec

from penstock.backends.loop import LoopService, Steps
from penstock.errors import InvalidField
from penstock.life import in_words, life
from penstock.server.console.visitor import Refused
from penstock.service import HistoryEvent, Message, Peek, PeekFrom, PeekIds, State

PAGE_MAX: Final = 200
PREVIEW_BYTES: Final = 400
FOUND_MAX: Final = 200
# What one request of a search reads at most, and in one turn of the event loop.
SEARCHED_MAX: Final = 20_000
_SLICE: Final = 200
_SLICE_BYTES: Final = 1024 * 1024
# The events of one message that are shown.
EVENTS_MAX: Final = 2_000
_STATES: Final[tuple[State, ...]] = ("visible", "in_flight", "delayed")


class MessageViews:
    """Reads messages of one service. With `mask`, bodies and attributes stay in the server."""

    def __init__(self, service: LoopService, *, mask: bool) -> None:
        self._service = service
        self._mask = mask

    def page(self, given: dict[str, str]) -> Steps[dict[str, Any]]:
        """A page of a queue's messages in one state, after the message of a sequence."""
        queue, state = given.get("queue", ""), _state(given.get("state", "visible"))
        limit = min(given_number(given, "limit", 50), PAGE_MAX)
        after = given_number(given, "after", 0)
        if "peek" in self._service.LACKS:
            raise Refused(400, f"Messages cannot be shown: {self._service.LACKS['peek']}.")
        has_pages = "peek pages" not in self._service.LACKS
        if has_pages:
            found: list[Message] = yield PeekFrom(queue, after, limit + 1, state)
        else:
            found = yield Peek(queue, PAGE_MAX, state)
        shown = found[:limit] if has_pages else found
        return {
            "messages": [self.row(each) for each in shown],
            "has_more": len(found) > len(shown),
            "has_pages": has_pages,
        }

    def search(self, given: dict[str, str]) -> Steps[dict[str, Any]]:
        """Messages that have a text in their body, an attribute or their id, from a place on."""
        queue, state = given.get("queue", ""), _state(given.get("state", "visible"))
        after, text = given_number(given, "after", 0), given.get("text", "")
        if self._mask:
            raise Refused(403, "This server masks messages: only ids can be searched for.")
        if "peek pages" in self._service.LACKS:
            raise Refused(400, f"Not searchable: {self._service.LACKS['peek pages']}.")
        matches = _matcher(text)
        found: list[dict[str, Any]] = []
        searched, is_done = 0, False
        while searched < SEARCHED_MAX and len(found) < FOUND_MAX and not is_done:
            page: list[Message] = yield PeekFrom(queue, after, _SLICE, state, _SLICE_BYTES)
            is_done = not page
            for message in page:
                after = message.sequence
                searched += 1
                if matches(message):
                    found.append(self.row(message))
            yield None
        return {"messages": found, "searched": searched, "after": after, "is_done": is_done}

    def by_id(self, given: dict[str, str]) -> Steps[dict[str, Any]]:
        """One message of a queue, whole; None if it is not there any more."""
        queue, message_id = given.get("queue", ""), given.get("id", "")
        if "peek pages" in self._service.LACKS:
            raise Refused(400, f"Not shown: {self._service.LACKS['peek pages']}.")
        found: list[Message] = yield PeekIds(queue, [message_id])
        return {"message": self._whole(found[0]) if found else None}

    def row(self, message: Message) -> dict[str, Any]:
        """A message in a table: the beginning of its body."""
        return self._shown(message, PREVIEW_BYTES)

    def _whole(self, message: Message) -> dict[str, Any]:
        return self._shown(message, None) | {
            "first_pulled_at_ms": message.first_pulled_at_ms,
            "dedup_id": message.dedup_id,
            "context": None if self._mask else message.context,
        }

    def _shown(self, message: Message, bytes_max: int | None) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "id": message.id,
            "queue": message.queue,
            "sequence": message.sequence,
            "bytes": len(message.body),
            "pushed_at_ms": message.pushed_at_ms,
            "receives": message.receives,
            "priority": message.priority,
            "group": message.group,
            "source": message.source,
        }
        if self._mask:
            return shown | {"is_masked": True, "attributes": dict.fromkeys(message.attributes)}
        body = message.body if bytes_max is None else message.body[:bytes_max]
        try:
            # A character that is cut in two at the end is left out.
            shown["body"] = body.decode(errors="strict" if bytes_max is None else "ignore")
            message.body[: 4 * PREVIEW_BYTES].decode(errors="strict")
        except UnicodeDecodeError as error:
            if bytes_max is None or error.end < 4 * PREVIEW_BYTES - 4:
                shown["body"] = b64encode(body).decode()
                shown["is_binary"] = True
        shown["attributes"] = {
            name: value if isinstance(value, str) else {"base64": b64encode(value).decode()}
            for name, value in message.attributes.items()
        }
        return shown


class LifeParts:
    """Takes the events of a message's history; its result is the message's life."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._events: list[HistoryEvent] = []
        self._left_out = 0

    def add(self, events: list[HistoryEvent]) -> None:
        """Takes the next events."""
        self._events += events
        if len(self._events) > EVENTS_MAX:
            self._left_out += len(self._events) - EVENTS_MAX
            half = EVENTS_MAX // 2
            del self._events[half : len(self._events) - half]

    def result(self) -> dict[str, Any]:
        """The life, and the events that it was told from."""
        told: dict[str, Any] = msgspec.to_builtins(life(self._events, self._now_ms()))
        events = [msgspec.to_builtins(each) | {"words": in_words(each)} for each in self._events]
        return told | {"events": events, "left_out": self._left_out, "now_ms": self._now_ms()}


def _matcher(text: str) -> Callable[[Message], bool]:
    """Whether a message has this text: `name=value` is an attribute, too."""
    wanted = text.casefold()
    if not wanted:
        raise Refused(400, "text: what to search for is missing")
    name, equals, value = text.partition("=")
    in_bytes = text.encode()

    def matches(message: Message) -> bool:
        if in_bytes in message.body or text == message.id or text == message.group:
            return True
        if equals and str(message.attributes.get(name.strip())) == value.strip():
            return True
        for key, given in message.attributes.items():
            if wanted in key.casefold() or (isinstance(given, str) and wanted in given.casefold()):
                return True
        return wanted in message.body.decode(errors="ignore").casefold()

    return matches


def _state(text: str) -> State:
    for state in _STATES:
        if text == state:
            return state
    raise InvalidField(f"state: {text[:40]!r} is none of {', '.join(_STATES)}")


def given_number(given: dict[str, str], name: str, default: int) -> int:
    """A number that the page gave. Raises InvalidField."""
    text = given.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidField(f"{name}: expected a number")
    return int(text)
