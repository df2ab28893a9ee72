"""Error texts for a wrong command line: which word is wrong, and what to write instead.

argparse takes the word after an unknown option for the command, and then lists every command. So
the words before the command are checked here first.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Final

# Options that may be before or after the command, and whether a value follows.
_SHARED: Final = {"--url": True, "--json": False}
_ENDING: Final = ("--help", "-h", "--version")
_WORD_CHARS_MAX: Final = 100
# How the URL of a store begins.
_SCHEME: Final = r"[a-z]+:"


def find_mistake(words: Sequence[str], commands: Collection[str]) -> str | None:
    """The error in the words up to the command; None if there is none."""
    if not words:
        return "the command is missing"
    place = 0
    while place < len(words):
        word = words[place]
        name, has_value, _ = word.partition("=")
        if name in _ENDING:
            return None
        if name in _SHARED:
            place += 2 if _SHARED[name] and not has_value else 1
        elif word.startswith("-") and word != "-":
            return _of_option(name, words[place + 1 :], commands)
        elif word in commands:
            return None
        else:
            return _of_command(word, words[place + 1 :], commands)
    return None


def _of_option(name: str, rest: Sequence[str], commands: Collection[str]) -> str:
    start = f"{_shown(name)}: only --url and --json may stand before the command"
    if near := _nearest(name, [*_SHARED, *_ENDING]):
        return f"{start}; did you mean {near}?"
    command = next((word for word in rest if word in commands), None)
    if command is None:
        return f"{start}, and no command follows"
    return (
        f"{start}; write it behind {command} if it is an option of {command}, "
        "and --url URL to name a store"
    )


def _of_command(word: str, rest: Sequence[str], commands: Collection[str]) -> str:
    start = f"{_shown(word)} is not a command"
    if word == "help":
        return f"{start}: write penstock --help, or penstock COMMAND --help"
    if near := _nearest(word, commands, 0.8):
        return f"{start}; did you mean {near}?"
    command = next((word for word in rest if word in commands), None)
    if re.match(_SCHEME, word):
        return f"{start}: to name a store, write penstock --url {_shown(word)} COMMAND"
    if command is not None:
        return f"{start}: the command comes first, as in penstock {command} {_shown(word)}"
    return start


def describe_surplus(words: Sequence[str], help_text: str) -> str:
    """The error for words that the command with this help does not take."""
    word = next((word for word in words if word.startswith("-")), words[0])
    if not word.startswith("-"):
        if re.match(_SCHEME, word):
            return f"{_shown(word)}: to name a store, write --url {_shown(word)}"
        return f"{_shown(word)} is one word too many; put a text of several words in quotes"
    name = word.partition("=")[0]
    near = _nearest(name, set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", help_text)))
    return f"unknown option {_shown(name)}" + (f"; did you mean {near}?" if near else "")


def describe_choice(word: str, choices: Iterable[str]) -> str:
    """The error for a word that is none of an argument's choices."""
    known = list(choices)
    near = _nearest(word, known)
    return f"{_shown(word)} is none of {', '.join(known)}" + (
        f"; did you mean {near}?" if near else ""
    )


def similar_queues(asked: Iterable[object], names: Collection[str]) -> str:
    """What to add to the error of a command that named a queue that does not exist."""
    # A field may hold something else, such as the number of a shard.
    texts = [each for each in asked if isinstance(each, str)]
    near = {_nearest(each, names) for each in texts if each not in names} - {None}
    return f"; did you mean {' or '.join(sorted(map(str, near)))}?" if near else ""


def _nearest(word: str, known: Iterable[str], likeness: float = 0.7) -> str | None:
    return next(iter(get_close_matches(word[:_WORD_CHARS_MAX], list(known), 1, likeness)), None)


def _shown(word: str) -> str:
    """A word as it was typed, if it can be printed and is not long."""
    short = word if len(word) <= _WORD_CHARS_MAX else word[:_WORD_CHARS_MAX] + "…"
    return short if short.isprintable() and short and " " not in short else repr(short)
