"""Reads and checks the values of `option(…)` of `format("penstock")`, which are texts."""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from penstock.errors import InvalidField
from penstock.service import check_number
from penstock.url import read_url

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def read_options(given: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The options by their names in lower case; `known` maps these to their usual spelling.

    Raises InvalidField for one that is unknown.
    """
    found = {name.lower(): value for name, value in given.items()}
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise InvalidField(f"option {unknown[0]!r}: unknown; there are {', '.join(known.values())}")
    return found


def usual_spelling(names: Collection[str]) -> dict[str, str]:
    """The usual spelling of options, by their names in lower case."""
    return {name.lower(): name for name in names}


def required(options: Mapping[str, str], name: str, what: str) -> str:
    """The value of a required option. Raises InvalidField if it is missing."""
    if not options.get(name):
        raise InvalidField(f"option {name!r}: missing; name {what}")
    return options[name]


def listed(text: str) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def whole(options: Mapping[str, str], name: str) -> int | None:
    """A whole number, if given. Raises InvalidField."""
    text = options.get(name.lower())
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidField(f"option {name!r}: {text!r} is not a whole number")
    return int(text)


def within(options: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """A whole number between two others, both included. Raises InvalidField."""
    given = whole(options, name)
    return check_number(f"option {name!r}", default if given is None else given, low, high)


def instant_ms(options: Mapping[str, str], name: str) -> int | None:
    """An instant, if given; in UTC unless it says otherwise. Raises InvalidField."""
    text = options.get(name.lower())
    if text is None:
        return None
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidField(f"option {name!r}: {text!r} is not an ISO time") from None
    return int(instant.replace(tzinfo=instant.tzinfo or UTC).timestamp() * 1_000)


def check_columns(schema: "StructType", columns: Collection[str]) -> "StructType":
    """The schema, if all of its columns exist. Raises InvalidField."""
    for name in schema.fieldNames():
        if name not in columns:
            raise InvalidField(
                f"schema: there is no column {name!r}; there are {', '.join(columns)}"
            )
    return schema


def shared_url(options: Mapping[str, str]) -> str:
    """The URL of queues that every task can reach. Raises InvalidField."""
    url = required(options, "url", "the place of the queues, file:PATH or penstock://HOST:PORT")
    found = read_url(url)
    if found.is_in_this_process:
        raise InvalidField(
            f"option 'url': {url!r} is within one process, and Spark's tasks run in others; "
            "use file:PATH or penstock://HOST:PORT"
        )
    if found.scheme == "file":
        _ = found.path  # raises if there is none
    return url
