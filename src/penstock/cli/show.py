"""Messages, claims and tables as text for people and as JSON for programs."""

import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from penstock.cli.values import show_age, show_duration
from penstock.life import DeadLetterMove, moment
from penstock.output import Lines, printable
from penstock.service import Claim, Message, PushReply

_MESSAGE_NAMES: Final = (
    "priority",
    "group",
    "dedup_id",
    "pushed_at_ms",
    "sequence",
    "receives",
    "first_pulled_at_ms",
    "source",
    "context",
)
_CLAIM_NAMES: Final = (*_MESSAGE_NAMES, "receipt", "epoch", "deadline_ms")


def message_as_json(message: Message) -> dict[str, Any]:
    """A message or claim for JSON: bytes that are not UTF-8 have a name that ends in `_base64`."""
    shown: dict[str, Any] = {"id": message.id, "queue": message.queue}
    text = as_text(message.body)
    if text is None:
        shown["body_base64"] = b64encode(message.body).decode()
    else:
        shown["body"] = text
    attributes = message.attributes.items()
    shown["attributes"] = {k: v for k, v in attributes if isinstance(v, str)}
    raw = {k: b64encode(v).decode() for k, v in attributes if isinstance(v, bytes)}
    if raw:
        shown["attributes_base64"] = raw
    names = _CLAIM_NAMES if isinstance(message, Claim) else _MESSAGE_NAMES
    return shown | {name: getattr(message, name) for name in names}


def reply_as_json(queue: str, reply: PushReply) -> dict[str, Any]:
    """The reply to a push for JSON."""
    return {
        "queue": queue,
        "id": reply.id,
        "sequence": reply.sequence,
        "duplicate": reply.duplicate,
    }


class Told(NamedTuple):
    """What the history of a message adds to it: the end of its delay, its move as a dead letter."""

    visible_at_ms: int | None = None
    move: DeadLetterMove | None = None

    def as_json(self) -> dict[str, Any]:
        """The parts that are known."""
        known: dict[str, Any] = {}
        if self.visible_at_ms is not None:
            known["visible_at_ms"] = self.visible_at_ms
        if self.move is not None:
            known |= {
                "moved_at_ms": self.move.moved_at_ms,
                "deliveries": self.move.deliveries,
                "held_by": self.move.held_by,
            }
        return known


NOTHING_TOLD: Final = Told()


def message_as_text(message: Message, told: Told = NOTHING_TOLD) -> str:
    """A message or claim for people: one label for each line, the body last."""
    now_ms = time.time_ns() // 1_000_000
    rows = [("id", message.id), ("age", show_age(now_ms - message.pushed_at_ms))]
    rows.append(("receives", str(message.receives)))
    if told.visible_at_ms is not None:
        left = show_age(told.visible_at_ms - now_ms)
        rows.append(("visible at", f"{moment(told.visible_at_ms)} UTC, in {left}"))
    if message.source is not None:
        why = f"dead letter of {message.source}, where no claim of it ended with a delete"
        if told.move is not None:
            why = f"dead letter: {told.move.text} (UTC)"
        rows.append(("why here", why))
    if isinstance(message, Claim):
        left_ms = max(0, message.deadline_ms - now_ms)
        rows.append(("receipt", message.receipt))
        rows.append(("ends in", show_duration(round(left_ms, -3))))
    if message.priority:
        rows.append(("priority", str(message.priority)))
    named = [("group", message.group), ("dedup id", message.dedup_id), ("source", message.source)]
    rows += [(label, value) for label, value in named if value is not None]
    rows += [("attribute", f"{k}={_content(v)}") for k, v in message.attributes.items()]
    rows.append(("body", _content(message.body)))
    return labelled(rows)


def as_text(body: bytes) -> str | None:
    """The bytes as text, if they are UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _content(value: bytes | str) -> str:
    """A body or the value of an attribute; bytes that are not UTF-8 in base64."""
    text = value if isinstance(value, str) else as_text(value)
    if text is None:
        assert isinstance(value, bytes)
        return f"base64:{b64encode(value).decode()}"
    return text


def labelled(rows: Sequence[tuple[str, str]]) -> Lines:
    """Labels and values in two columns; the further lines of a value are aligned with its first."""
    width = max(len(label) for label, _ in rows)
    return Lines(
        "\n".join(
            f"{label:<{width}}  " + value.replace("\n", "\n" + " " * (width + 2))
            for label, value in rows
        )
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Lines:
    """Rows in aligned columns: the first `left` to the left, the others, numbers, to the right."""
    lines = [[printable(cell) for cell in line] for line in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return joined(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def joined(lines: Iterable[str]) -> Lines:
    """Lines one below the other; a line break within one of them is escaped."""
    return Lines("\n".join(map(printable, lines)))
