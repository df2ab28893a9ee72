"""Messages, claims and tables as text for people and as JSON for programs."""

import time
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Final

from penstock.cli.values import show_age, show_duration
from penstock.service import Claim, Message

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


def message_as_text(message: Message) -> str:
    """A message or claim for people: one label for each line, the body last."""
    now_ms = time.time_ns() // 1_000_000
    rows = [("id", message.id), ("age", show_age(now_ms - message.pushed_at_ms))]
    rows.append(("receives", str(message.receives)))
    if isinstance(message, Claim):
        left_ms = max(0, message.deadline_ms - now_ms)
        rows.append(("receipt", message.receipt))
        rows.append(("ends in", show_duration(round(left_ms, -3))))
    if message.priority:
        rows.append(("priority", str(message.priority)))
    named = [("group", message.group), ("dedup id", message.dedup_id), ("source", message.source)]
    rows += [(label, value) for label, value in named if value is not None]
    rows += [("attribute", f"{k}={printable(v)}") for k, v in message.attributes.items()]
    rows.append(("body", printable(message.body)))
    return labelled(rows)


def as_text(body: bytes) -> str | None:
    """The bytes as text, if they are UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def printable(value: bytes | str) -> str:
    """Text for a terminal: control characters, which could change its state, are escaped."""
    text = value if isinstance(value, str) else as_text(value)
    if text is None:
        assert isinstance(value, bytes)
        return f"base64:{b64encode(value).decode()}"
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def labelled(rows: Sequence[tuple[str, str]]) -> str:
    """Labels and values in two columns; the further lines of a value are aligned with its first."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(
        f"{label:<{width}}  " + value.replace("\n", "\n" + " " * (width + 2))
        for label, value in rows
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows in aligned columns: the first `left` to the left, the others, numbers, to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
