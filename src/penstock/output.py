"""Writes text for people: lines on a terminal, entries of `logging`. Whatever is in it is escaped.

Names, ids, bodies and errors come from others. Printed as they are they could begin a line of
their own, move the cursor, hide what follows or reverse it. So all output goes through this module,
which `tools/tidy.py` checks: a character that Python does not count as printable is written as its
escape, such as `\\x1b` or `\\u202e`. JSON stays what it is: there, too, it is written as an escape.
"""

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    import logging

_LINE_BREAKS: Final = "\n\t"
# What JSON allows as it is, and a terminal must not get: DEL and the C1 controls, the characters
# that change the direction of text or are invisible, line and paragraph separators.
_RAW_IN_JSON: Final = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0001-\U000e007f]"
)


def printable(text: str, keep: str = "") -> str:
    """The text with an escape for each character that is not printable; `keep` are left."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def printable_json(text: str) -> str:
    """JSON with an escape for each character that a terminal acts on; its value is the same."""
    return _RAW_IN_JSON.sub(lambda found: _json_escape(found[0]), text)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number of things: `1 entry`, `2,000 entries`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


class Lines(str):
    """Several lines that were made of escaped parts, as by `cli.show.table`."""

    __slots__ = ()


def print_text(text: str) -> None:
    """Prints a line: line breaks in it are escaped, too, except those of `Lines`."""
    _write(printable(text, _LINE_BREAKS if isinstance(text, Lines) else "") + "\n", False)


def print_json(text: str) -> None:
    """Prints one line of JSON."""
    _write(printable_json(text) + "\n", False)


def print_prompt(text: str) -> None:
    """Prints a text after which the answer is typed."""
    _write(printable(text), False)
    flush()


def flush() -> None:
    """Shows what was printed now: stdout may be a pipe to a program that waits for it."""
    if sys.stdout is not None:
        sys.stdout.flush()


# Whether lines on stderr are JSON, for programs that collect them.
_lines_are_json = False
_BARE: Final = re.compile(r"[\w.:/@+,-]+", re.ASCII)


def use_json_lines(is_on: bool = True) -> None:
    """From now on every line on stderr is a JSON object, entries of loggers included."""
    global _lines_are_json
    _lines_are_json = is_on
    if is_on:
        import logging

        logging.basicConfig(handlers=[_entries_as_lines()], force=True)


def _entries_as_lines() -> "logging.Handler":
    import logging

    class EntryLines(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            report(entry.getMessage(), entry.name)

    return EntryLines(logging.WARNING)


def report_event(event: str, fields: Mapping[str, object]) -> None:
    """Prints a line on stderr: the instant, what happened, and `name=value` for each field.

    A value that is not plain is written as JSON writes it, so that none can end its line or pass
    for another field.
    """
    now_ns = time.time_ns()
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns // 1_000_000_000))
    at = f"{seconds}.{now_ns // 1_000_000 % 1_000:03d}Z"
    if _lines_are_json:
        line = json.dumps({"at": at, "event": event, **fields}, ensure_ascii=False, default=str)
        _write(printable_json(line) + "\n", True)
    else:
        shown = "".join(f" {name}={_shown_field(value)}" for name, value in fields.items())
        _write(f"penstock: {at} {event}{shown}\n", True)
    if sys.stderr is not None:
        sys.stderr.flush()


def _shown_field(value: object) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def report(text: str, who: str = "penstock") -> None:
    """Prints a line on stderr, with the name of the program before it."""
    if _lines_are_json:
        report_event("message", {"who": who, "text": text})
        return
    clear = "\r\x1b[K" if sys.stderr is not None and sys.stderr.isatty() else ""
    _write(f"{clear}{printable(f'{who}: {text}')}\n", True)
    if sys.stderr is not None:
        sys.stderr.flush()


def overwrite_line(text: str) -> None:
    """Replaces the last line of the terminal at stderr by a text; no new line follows it."""
    _write(f"\r\x1b[K{printable(text)}", True)
    if sys.stderr is not None:
        sys.stderr.flush()


def _write(text: str, on_stderr: bool) -> None:
    # A process that was started without one of them has None.
    stream: TextIO | None = sys.stderr if on_stderr else sys.stdout
    if stream is not None:
        stream.write(text)


def logger(name: str) -> "logging.Logger":
    """A logger whose entries have escaped texts, whatever writes them."""
    import logging

    found = logging.getLogger(name)
    # The filter of a logger, unlike one of a handler, is asked for its own entries only.
    if _escape_entry not in found.filters:
        found.addFilter(_escape_entry)
    return found


def _escape_entry(entry: "logging.LogRecord") -> bool:
    if isinstance(entry.args, tuple):
        entry.args = tuple(map(_escaped, entry.args))
    if entry.exc_info:
        import traceback

        # Formatters take the text that is there. Indented, no line of it can pass for an entry.
        lines = "".join(traceback.format_exception(*entry.exc_info)).rstrip().split("\n")
        entry.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
    return True


def _escaped(value: object) -> object:
    if isinstance(value, str | BaseException | os.PathLike):
        return printable(str(value), _LINE_BREAKS if isinstance(value, Lines) else "")
    return value
