"""Durations, sizes, counts and pairs: from the text of an argument, and as text for people.

Each `read_…` function is an argparse type: it takes text and raises ArgumentTypeError. Each
`show_…` function returns text for people; `read_duration` reads what `show_duration` returns.
"""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from itertools import pairwise
from typing import Final, TypeVar

from penstock.clock import duration_ms
from penstock.errors import InvalidField
from penstock.service import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

_UNITS_MS: Final = {"d": DAY_MS, "h": HOUR_MS, "m": MINUTE_MS, "s": SECOND_MS, "ms": 1}
_SIZE: Final = re.compile(r"(-?[0-9]+)(B|KiB|MiB|GiB)?", re.ASCII)
_UNITS_BYTES: Final = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024, "B": 1}
# Longer than any valid number; it also keeps an error to one short line.
_CHARS_MAX: Final = 30
N = TypeVar("N", int, float)


def read_duration(text: str) -> float:
    """Seconds, from `30`, `1.5`, `30s`, `5m`, `2h` or `4d`."""
    try:
        return duration_ms(text) / SECOND_MS
    except InvalidField as error:
        raise ArgumentTypeError(str(error)) from None


def read_size(text: str) -> int:
    """Bytes, from `256`, `64KiB` or `1MiB`."""
    found = _SIZE.fullmatch(text) if len(text) <= _CHARS_MAX else None
    if found is None:
        raise ArgumentTypeError(f"{_short(text)} is not a size; use 256, 64KiB, 1MiB or 2GiB")
    number, unit = found.groups()
    return int(number) * _UNITS_BYTES[unit or "B"]


def read_count(text: str) -> int:
    """A whole number; the store checks its limits."""
    if len(text) > _CHARS_MAX or not re.fullmatch(r"-?[0-9]+", text, re.ASCII):
        raise ArgumentTypeError(f"{_short(text)} is not a whole number")
    return int(text)


def within(read: Callable[[str], N], least: str, most: str) -> Callable[[str], N]:
    """The same reader for values from `least` to `most`, which are texts that it reads."""

    def read_within(text: str) -> N:
        value = read(text)
        if not read(least) <= value <= read(most):
            raise ArgumentTypeError(f"{_short(text)} is outside {least} to {most}")
        return value

    return read_within


def read_pair(text: str) -> tuple[str, str]:
    """A name and its value, from `NAME=VALUE`; the value may contain further equals signs."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ArgumentTypeError(f"{_short(text)} is not of the form NAME=VALUE")
    return name, value


def _short(text: str) -> str:
    return repr(text if len(text) <= _CHARS_MAX else text[:_CHARS_MAX] + "…")


def show_duration(ms: int) -> str:
    """The duration in the largest unit that expresses it exactly, such as `90s`, `1.5s` or `4d`."""
    for unit, unit_ms in _UNITS_MS.items():
        if ms and ms % unit_ms == 0 and unit != "ms":
            return f"{ms // unit_ms}{unit}"
    return f"{ms / SECOND_MS:g}s" if abs(ms) < MINUTE_MS else f"{ms}ms"


def show_age(ms: int) -> str:
    """About how long ago, in the two largest units: `3.2s`, `4m 10s`, `2d 5h`."""
    ms = max(0, ms)
    if ms < MINUTE_MS:
        return f"{ms / SECOND_MS:.1f}s"
    units = [*_UNITS_MS.items()][:4]
    for (unit, unit_ms), (part, part_ms) in pairwise(units):
        if ms >= unit_ms:
            return f"{ms // unit_ms}{unit} {ms % unit_ms // part_ms}{part}"
    raise AssertionError("a minute or more is at least one minute")


def show_size(size_bytes: int) -> str:
    """About how large: `256 B`, `1.5 KiB`, `20.0 MiB`."""
    for unit, unit_bytes in _UNITS_BYTES.items():
        if size_bytes >= unit_bytes > 1:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes} B"
