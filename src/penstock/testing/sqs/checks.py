"""What a check is, and the comparisons that it makes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from penstock.testing.sqs.target import CheckedServer


class Failed(AssertionError):
    """The server does not keep the rule; the text says what was found and what was wanted."""


class Check(NamedTuple):
    """One rule."""

    # The sentence that holds, with underscores in place of spaces.
    name: str
    feature: str
    # What Amazon's documentation says, and where.
    rule: str
    # How long it waits at least, on a server whose clock cannot be moved.
    wait_s: float
    run: "Callable[[CheckedServer], None]"

    @property
    def sentence(self) -> str:
        """The name for people."""
        return self.name.replace("_", " ")


CHECKS: dict[str, Check] = {}


def check(
    feature: str, wait_s: float = 0
) -> "Callable[[Callable[[CheckedServer], None]], Callable[[CheckedServer], None]]":
    """Makes a check of a function whose name is the sentence and whose docstring is the rule."""

    def add(function: "Callable[[CheckedServer], None]") -> "Callable[[CheckedServer], None]":
        name = function.__name__
        rule = " ".join((function.__doc__ or "").split())
        if name in CHECKS or not rule:
            raise ValueError(f"a check needs a docstring and a name of its own: {name}")
        CHECKS[name] = Check(name, feature, rule, wait_s, function)
        return function

    return add


def expect(found: Any, wanted: Any, what: str = "it") -> None:
    """Raises Failed unless both are equal."""
    if found != wanted:
        raise Failed(f"{what} is {_short(found)}, not {_short(wanted)}")


def require(holds: object, what: str) -> None:
    """Raises Failed with this text unless it holds."""
    if not holds:
        raise Failed(what)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:150]}… ({len(text)} characters)"
