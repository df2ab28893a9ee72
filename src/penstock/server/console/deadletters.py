"""Dead letters for the console, in groups: by where they came from, their error, and their shape.

An error is what a consumer noted with the message: an attribute or a member of a JSON body whose
name is one of `ERROR_NAMES`. The shape of a JSON body is the names of its members. A queue is read
in parts, without claiming a message; the page joins the groups of all parts.
"""

from typing import Any, Final

import msgspec

from penstock.backends.loop import LoopService, Steps
from penstock.server.console.messages import MessageViews, given_number
from penstock.server.console.visitor import Refused
from penstock.service import Message, PeekFrom

ERROR_NAMES: Final = ("error", "exception", "reason", "error_message", "errormessage", "x-error")
# What one request reads.
PART_MAX: Final = 5_000
_SLICE: Final = 200
_SLICE_BYTES: Final = 1024 * 1024
# A larger body is not parsed: its shape is that it is large.
_PARSED_BYTES_MAX: Final = 64 * 1024
_MEMBERS_MAX: Final = 12
_TEXT_CHARS_MAX: Final = 160


class DeadLetterGroups:
    """Reads queues of dead letters of one service."""

    def __init__(self, service: LoopService, messages: MessageViews, *, mask: bool) -> None:
        self._service = service
        self._messages = messages
        self._mask = mask

    def part(self, given: dict[str, str]) -> Steps[dict[str, Any]]:
        """The groups among the next messages of a queue."""
        if "peek pages" in self._service.LACKS:
            raise Refused(400, f"Not shown: {self._service.LACKS['peek pages']}.")
        queue, after = given.get("queue", ""), given_number(given, "after", 0)
        groups: dict[tuple[str, str, str], dict[str, Any]] = {}
        read, is_done = 0, False
        while read < PART_MAX and not is_done:
            page: list[Message] = yield PeekFrom(queue, after, _SLICE, "visible", _SLICE_BYTES)
            is_done = not page
            for message in page:
                after = message.sequence
                read += 1
                self._add(groups, message)
            yield None
        return {"groups": [*groups.values()], "read": read, "after": after, "is_done": is_done}

    def _add(self, groups: dict[tuple[str, str, str], dict[str, Any]], message: Message) -> None:
        error, shape = ("", "masked") if self._mask else _kind_of(message)
        key = message.source or "", error, shape
        group = groups.get(key)
        if group is None:
            group = groups[key] = {
                "source": key[0],
                "error": error,
                "shape": shape,
                "oldest_ms": message.pushed_at_ms,
                "newest_ms": message.pushed_at_ms,
                "ids": [],
                "sample": self._messages.row(message),
            }
        group["ids"].append(message.id)
        group["oldest_ms"] = min(group["oldest_ms"], message.pushed_at_ms)
        group["newest_ms"] = max(group["newest_ms"], message.pushed_at_ms)


def _kind_of(message: Message) -> tuple[str, str]:
    """The error that is noted with a message, and the shape of its body."""
    error = _error_in(message.attributes)
    body = message.body
    if len(body) > _PARSED_BYTES_MAX:
        return error, "a large body"
    if not body:
        return error, "empty"
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return error, "text" if _is_text(body) else "binary"
    if isinstance(value, dict):
        error = error or _error_in(value)
        names = [name[:30] for name in sorted(value)[:_MEMBERS_MAX]]
        more = ", …" if len(value) > _MEMBERS_MAX else ""
        return error, f"{{{', '.join(names)}{more}}}"
    return error, "a JSON array" if isinstance(value, list) else "a JSON value"


def _error_in(values: dict[str, Any]) -> str:
    for name, value in values.items():
        if name.casefold() in ERROR_NAMES and value:
            if isinstance(value, dict):
                value = value.get("error") or value.get("message") or ""
            return str(value)[:_TEXT_CHARS_MAX]
    # A failed task: its envelope has the failure.
    failure = values.get("failure")
    if isinstance(failure, dict):
        return str(failure.get("error", ""))[:_TEXT_CHARS_MAX]
    return ""


def _is_text(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
