"""Writes the public surface into tests/surface.txt, so that a change of it shows in review.

    python -m tools.surface

tests/test_surface.py compares the file with the code. What is in it is what docs/explanation/
versions.md promises to keep: names, parameters with their defaults, fields of results, commands and
options, settings of a server. Types are left out; the reference has them.
"""

import inspect
from argparse import Action, ArgumentParser, _HelpAction, _SubParsersAction
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from penstock import Queues
from penstock.cli.parser import Parser, make_parser
from penstock.errors import PenstockError
from penstock.public import Settings
from penstock.service import HistoryEvent, QueueCounts
from penstock.settings import ServerSettings
from penstock.url import SCHEMES

FILE: Final = Path(__file__).parents[1] / "tests" / "surface.txt"
MODULES: Final = (
    "penstock",
    "penstock.aio",
    "penstock.tasks",
    "penstock.testing",
    "penstock.carrot",
)
# Of modules without __all__: the names that a program uses.
NAMES: Final = {
    "penstock.aio": ("AsyncQueues", "connect"),
    "penstock.carrot": ("CarrotClient", "CarrotMessage", "connect"),
}
# Results that are parts of other results.
PARTS: Final = (Settings, QueueCounts, HistoryEvent)
# What other parts of Penstock call, with commands of `service` or parts of a worker: not promised.
NOT_PROMISED: Final = frozenset(
    {
        *("Backoff.delay_ms", "PreparedTask.as_step", "PreparedTask.encoded", "Task.push_of"),
        *("TaskApp.now_ms", "TaskApp.push", "TaskApp.push_batch", "TaskApp.push_many"),
        *("TaskApp.queues", "TaskApp.run_steps", "TaskApp.service", "TaskApp.start_over"),
        *("TaskApp.use_service", "TaskApp.using", "TaskContext.start", "TestAccount.ask"),
        *("TestAccount.depths", "TestAccount.done", "TestAccount.find"),
        *("TestAccount.go_to_next_due", "TestQueues.depths", "TestQueues.find"),
        *("TestQueues.go_to_next_due", "TestQueues.movable"),
    }
)
SHARED_OPTIONS: Final = ("--url", "--json")


def surface() -> str:
    """The whole surface as text."""
    parts = [(name, [*module_lines(import_module(name))]) for name in MODULES]
    parts.append(("parts of results", [line for part in PARTS for line in object_lines(part)]))
    parts.append(("penstock.errors", [*error_lines(PenstockError)]))
    parts.append(("URLs", [scheme.form for scheme in SCHEMES.values()]))
    parts.append(("command line", [*command_lines(make_parser(), "penstock")]))
    defaults = ServerSettings()
    settings = [f"{name}={getattr(defaults, name)!r}" for name in ServerSettings.__struct_fields__]
    parts.append(("settings of a server: TOML, PENSTOCK_ variables, arguments", settings))
    parts.append(
        ("settings of a queue: Python, flags, [queues.NAME]", [*Settings.__struct_fields__])
    )
    return "\n".join("\n".join([f"# {title}", *lines, ""]) for title, lines in parts)


def module_lines(module: ModuleType) -> Iterator[str]:
    """The names that a module exports, each with what a program can use of it."""
    for name in NAMES.get(module.__name__, getattr(module, "__all__", ())):
        value = getattr(module, name)
        if isinstance(value, type) and issubclass(value, BaseException):
            yield f"{name} ({value.__base__.__name__})"  # type: ignore[union-attr]
        else:
            yield from object_lines(value)


def object_lines(value: Any) -> Iterator[str]:
    """A function with its parameters, or a class with its fields and methods."""
    name = value.__name__
    if not isinstance(value, type):
        yield f"{name}{parameters(value)}"
        return
    fields: Sequence[str] = getattr(value, "__struct_fields__", ())
    above = f" ({Queues.__name__})" if issubclass(value, Queues) and value is not Queues else ""
    yield f"{name}: {', '.join(fields)}" if fields else f"{name}{parameters(value)}{above}"
    for base in reversed(value.__mro__[:-1]):
        if not base.__module__.startswith("penstock") or (above and base is Queues):
            continue
        for member, found in sorted(vars(base).items()):
            if member.startswith("_") or member in fields or getattr(value, member) is None:
                continue
            if f"{name}.{member}" in NOT_PROMISED:
                continue
            if isinstance(found, staticmethod | classmethod):
                found = found.__func__
            if inspect.isfunction(found):
                awaited = "await " if inspect.iscoroutinefunction(found) else ""
                yield f"{name}.{awaited}{member}{parameters(found)}"
            elif isinstance(found, property) or not fields:
                yield f"{name}.{member}"


def parameters(function: Any) -> str:
    """The parameters with their kinds and defaults, without types and `self`."""
    signature = inspect.signature(function)
    plain = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    return str(inspect.Signature(plain)).replace("<function ", "<").partition(" at 0x")[0]


def error_lines(kind: type[PenstockError], depth: int = 0) -> Iterator[str]:
    """The tree of the errors."""
    yield "  " * depth + kind.__name__
    for below in sorted(kind.__subclasses__(), key=lambda each: each.__name__):
        if below.__module__ == "penstock.errors":
            yield from error_lines(below, depth + 1)


def command_lines(parser: ArgumentParser, path: str) -> Iterator[str]:
    """A command with its arguments, then its actions."""
    if isinstance(parser, Parser):
        parser.load()
    below = [each for each in parser._actions if isinstance(each, _SubParsersAction)]
    words = [
        text
        for each in parser._actions
        if each not in below and not isinstance(each, _HelpAction) and (text := argument(each))
    ]
    if not below or words:
        yield " ".join([path, *words])
    for actions in below:
        for name, inner in actions.choices.items():
            yield from command_lines(inner, f"{path} {name}")


def argument(action: Action) -> str:
    """An option with its value, or a positional argument."""
    choices = "|".join(map(str, action.choices)) if action.choices else ""
    value = str(action.metavar or choices or action.dest.upper())
    if not action.option_strings:
        return {"?": f"[{value}]", "*": f"[{value} …]"}.get(str(action.nargs), value)
    if action.option_strings[0] in SHARED_OPTIONS:
        return ""
    flags = ", ".join(action.option_strings)
    text = flags if action.nargs == 0 else f"{flags} {value}"
    return text if action.required else f"[{text}]"


if __name__ == "__main__":
    FILE.write_text(surface())
    print(f"{FILE.name} is written")
