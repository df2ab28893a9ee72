"""A slice of a journal: what happened in one queue for some time, as lines of JSON.

The first line is a `SliceHeader`, each other line a `SliceStep`: a message was pushed, claimed,
extended, released or deleted, or its claim ran out. Messages are numbered within the slice. Those
that were in the queue before its beginning are pushed at the beginning.

Redacted, every text, number and body is replaced by another one of its length. The same value has
the same replacement throughout a slice, so that what was equal still is; names of fields stay.
"""

import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from penstock.core.events import (
    AnyEvent,
    Carried,
    Claimed,
    ClaimExpired,
    Deleted,
    Expired,
    Extended,
    Moved,
    Pushed,
    QueueConfigured,
    QueueCreated,
    QueuePurged,
    QueueRemoved,
    QueueStated,
    Released,
)
from penstock.errors import InvalidField, QueueNotFound
from penstock.service import QueueSettings

VERSION: Final = 1
# What a step can be.
PUSHED: Final = "pushed"
CLAIMED: Final = "claimed"
EXTENDED: Final = "extended"
RELEASED: Final = "released"
DELETED: Final = "deleted"
RAN_OUT: Final = "ran out"
_ENDS: Final[dict[type, str]] = {Deleted: DELETED, ClaimExpired: RAN_OUT}


class SliceHeader(msgspec.Struct):
    """Which queue a slice is of, and its time."""

    slice_version: int
    queue: str
    from_ms: int
    fifo: bool = False
    is_redacted: bool = False


class SliceStep(msgspec.Struct, omit_defaults=True):
    """One thing that happened. `after_ms` counts from the beginning of the slice.

    `for_ms` is how long a claim, an extension, or the delay of a push or release lasts. A body that
    is no text is `body_base64`; so are attributes.
    """

    after_ms: int
    event: str
    message: int
    for_ms: int = 0
    body: str | None = None
    body_base64: str | None = None
    attributes: dict[str, str] = {}
    attributes_base64: dict[str, str] = {}
    priority: int = 0
    group: str | None = None
    dedup_id: str | None = None

    @property
    def content(self) -> bytes:
        """The body of a push."""
        if self.body_base64 is not None:
            return b64decode(self.body_base64)
        return (self.body or "").encode()

    @property
    def all_attributes(self) -> dict[str, str | bytes]:
        """The attributes of a push."""
        raw = {name: b64decode(value) for name, value in self.attributes_base64.items()}
        return {**self.attributes, **raw}


class Slice(msgspec.Struct):
    """A header and its steps, in the order in which they happened."""

    header: SliceHeader
    steps: list[SliceStep]

    def encode(self) -> bytes:
        """The slice as lines of JSON."""
        return b"".join(msgspec.json.encode(each) + b"\n" for each in [self.header, *self.steps])


def read_slice(text: bytes) -> Slice:
    """A slice from its lines. Raises InvalidField."""
    lines = text.splitlines()
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=SliceHeader)
        steps = [msgspec.json.decode(line, type=SliceStep) for line in lines[1:]]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(f"slice: {error}; penstock capture writes one") from None
    if header.slice_version != VERSION:
        raise InvalidField(
            f"slice: version {header.slice_version} is unknown here; this is {VERSION}"
        )
    return Slice(header, steps)


class SliceCutter:
    """Takes the events of a journal in order, and keeps those of one queue and time."""

    def __init__(self, queue: str, from_ms: int) -> None:
        self._name = queue
        self._from_ms = from_ms
        self._queue: int | None = None
        self._settings = QueueSettings()
        # The content of each message of the queue that has not ended.
        self._pushed: dict[int, Pushed] = {}
        # Messages that are in the slice, by their numbers in the journal.
        self._numbers: dict[int, int] = {}
        self._steps: list[SliceStep] = []

    def add(self, event: AnyEvent) -> None:
        """Takes the next event."""
        if isinstance(event, QueueCreated | QueueStated) and event.name == self._name:
            self._queue, self._settings = event.queue, event.settings
        elif isinstance(event, Carried):
            self._pushed.setdefault(event.number, event.pushed)
        elif isinstance(event, Moved):
            self._move(event)
        elif event.queue == self._queue:
            self._add_own(event)

    def _add_own(self, event: AnyEvent) -> None:
        if isinstance(event, QueueConfigured):
            self._settings = event.settings
        elif isinstance(event, QueueRemoved | QueuePurged):
            self._pushed.clear()
        elif isinstance(event, Pushed):
            self._pushed[event.number] = event
            if event.at_ms >= self._from_ms:
                self._note_push(event, event.at_ms)
        elif isinstance(event, Claimed | Extended):
            name = CLAIMED if isinstance(event, Claimed) else EXTENDED
            self._note(event.at_ms, name, event.number, event.deadline_ms - event.at_ms)
        elif isinstance(event, Released):
            delay_ms = max(0, event.visible_at_ms - event.at_ms) if event.visible_at_ms else 0
            self._note(event.at_ms, RELEASED, event.number, delay_ms)
        elif isinstance(event, Deleted | ClaimExpired):
            self._note(event.at_ms, _ENDS[type(event)], event.number, 0)
        if isinstance(event, Deleted | Expired):
            self._pushed.pop(event.number, None)

    def _move(self, event: Moved) -> None:
        """A message that comes from another queue is pushed; one that leaves is no more."""
        if event.to == self._queue and event.number in self._pushed:
            self._note_push(self._pushed[event.number], event.at_ms)
        elif event.queue == self._queue:
            self._numbers.pop(event.number, None)

    def _note(self, at_ms: int, name: str, number: int, for_ms: int) -> None:
        if at_ms < self._from_ms:
            return
        if number not in self._numbers:
            known = self._pushed.get(number)
            if known is None:
                # Its content was dropped from the journal.
                return
            self._note_push(known, self._from_ms)
        self._steps.append(
            SliceStep(at_ms - self._from_ms, name, self._numbers[number], max(0, for_ms))
        )

    def _note_push(self, event: Pushed, at_ms: int) -> None:
        self._numbers[event.number] = number = len(self._numbers) + 1
        step = SliceStep(max(0, at_ms - self._from_ms), PUSHED, number)
        if event.visible_at_ms > at_ms:
            step.for_ms = event.visible_at_ms - at_ms
        try:
            step.body = event.body.decode()
        except UnicodeDecodeError:
            step.body_base64 = b64encode(event.body).decode()
        for name, value in (event.attributes or {}).items():
            if isinstance(value, bytes):
                step.attributes_base64 |= {name: b64encode(value).decode()}
            else:
                step.attributes |= {name: value}
        step.priority, step.group, step.dedup_id = event.priority, event.group, event.dedup_id
        self._steps.append(step)

    def cut(self) -> Slice:
        """The slice. Raises QueueNotFound if the journal knows no queue of this name."""
        if self._queue is None:
            raise QueueNotFound(f"queue: the journal has no queue {self._name!r}")
        # Messages from before the beginning were noted when something first happened to them.
        steps = sorted(self._steps, key=lambda step: (step.after_ms, 0))
        header = SliceHeader(VERSION, self._name, self._from_ms, self._settings.fifo)
        return Slice(header, steps)


def cut_slice(events: Iterable[AnyEvent], queue: str, from_ms: int) -> Slice:
    """What these events tell of a queue since that time. Raises QueueNotFound."""
    cutter = SliceCutter(queue, from_ms)
    for event in events:
        cutter.add(event)
    return cutter.cut()


class Redactor:
    """Replaces values by others of their length; equal ones by equal ones."""

    def __init__(self, key: bytes | None = None) -> None:
        """Nobody who has not the key, which is kept nowhere, can test a guess."""
        self._key = key or secrets.token_bytes(32)

    def redacted(self, cut: Slice) -> Slice:
        """The slice without anything that a message said."""
        header = msgspec.structs.replace(cut.header, is_redacted=True)
        return Slice(header, [*map(self._step, cut.steps)])

    def _step(self, step: SliceStep) -> SliceStep:
        return msgspec.structs.replace(
            step,
            body=None if step.body is None else self._body(step.body),
            body_base64=self._raw(step.body_base64),
            attributes={name: self._text(value) for name, value in step.attributes.items()},
            attributes_base64={
                name: self._raw(value) or "" for name, value in step.attributes_base64.items()
            },
            group=None if step.group is None else self._text(step.group),
            dedup_id=None if step.dedup_id is None else self._text(step.dedup_id),
        )

    def _body(self, body: str) -> str:
        try:
            value = msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return self._text(body)
        return msgspec.json.encode(self._value(value)).decode()

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._value(each) for name, each in value.items()}
        if isinstance(value, list):
            return [*map(self._value, value)]
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            text = str(abs(value))
            return self._number(text, len(text))
        return self._number(repr(value), 6) + 0.5

    def _number(self, text: str, digits: int) -> int:
        limit: int = 10**digits
        return int.from_bytes(self._bytes(text.encode(), digits), "big") % limit

    def _text(self, text: str) -> str:
        return self._bytes(text.encode(), (len(text) + 1) // 2).hex()[: len(text)]

    def _raw(self, encoded: str | None) -> str | None:
        if encoded is None:
            return None
        content = b64decode(encoded)
        return b64encode(self._bytes(content, len(content))).decode()

    def _bytes(self, value: bytes, count: int) -> bytes:
        found = b""
        while len(found) < count:
            found += hmac.digest(self._key, value + len(found).to_bytes(8, "big"), "sha256")
        return found[:count]


def messages_of(cut: Slice) -> Sequence[int]:
    """The numbers of the messages of a slice."""
    return [step.message for step in cut.steps if step.event == PUSHED]
