"""The settings of a queue as flags of the command line: one table, used by create and configure.

A setting's name is the keyword of `Queues.create`; its flag is that name with dashes.
"""

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from penstock.cli.values import read_count, read_duration, read_pair, read_size, show_duration
from penstock.public import QueueDescription
from penstock.service import SECOND_MS

Kind = Literal["duration", "size", "count", "queue", "switch", "pairs"]


class Setting(NamedTuple):
    """One setting: its keyword, its kind, and its help text."""

    name: str
    kind: Kind
    help: str
    optional: bool = False

    @property
    def flag(self) -> str:
        """The name as it is typed, without the leading dashes."""
        return self.name.replace("_", "-")

    def show(self, value: Any) -> str:
        """A value as text for people."""
        match value:
            case None | {}:
                return "none"
            case bool():
                return "yes" if value else "no"
            case dict():
                return " ".join(f"{name}={text}" for name, text in value.items())
            case int() | float() if self.kind == "duration":
                return show_duration(round(value * SECOND_MS))
            case _:
                return str(value)


SETTINGS: Final = (
    Setting("visibility_timeout", "duration", "how long a claim lasts"),
    Setting("delay", "duration", "how long a new message stays delayed"),
    Setting("wait", "duration", "how long a pull without a wait time waits"),
    Setting("retention", "duration", "how long a message is kept"),
    Setting("max_body_bytes", "size", "largest body with its attributes"),
    Setting("max_messages", "count", "the most messages a queue holds", True),
    Setting("max_bytes", "size", "the most bytes a queue holds", True),
    Setting("max_in_flight", "count", "the most claims at a time", True),
    Setting(
        "priority_age",
        "duration",
        "pull a message of this age before younger ones of any priority",
        True,
    ),
    Setting("dead_letter", "queue", "queue for messages pulled too often", True),
    Setting("max_receives", "count", "pulls before a message moves there", True),
    Setting("fifo", "switch", "strict order in each group; set at creation only"),
    Setting("dedup_by_content", "switch", "equal bodies are duplicates"),
    Setting("dedup_per_group", "switch", "dedup ids count within a group"),
    Setting("paused", "switch", "pulls get nothing; everything else goes on"),
    Setting("annotations", "pairs", "text stored with the queue, not interpreted"),
)
_READERS: Final[dict[Kind, tuple[Callable[[str], Any], str]]] = {
    "duration": (read_duration, "DURATION"),
    "size": (read_size, "SIZE"),
    "count": (read_count, "N"),
    "queue": (str, "QUEUE"),
}


def add_setting_flags(parser: ArgumentParser) -> None:
    """Adds a flag for every setting; a flag that is not given sets no attribute."""
    group = parser.add_argument_group("settings")
    for setting in SETTINGS:
        if setting.kind == "switch":
            group.add_argument(
                f"--{setting.flag}",
                dest=f"set_{setting.name}",
                action=BooleanOptionalAction,
                default=SUPPRESS,
                help=setting.help,
            )
        elif setting.kind == "pairs":
            group.add_argument(
                "--annotation",
                dest=f"set_{setting.name}",
                action="append",
                type=read_pair,
                metavar="NAME=VALUE",
                default=SUPPRESS,
                help=f"{setting.help} (repeatable)",
            )
        else:
            reader, metavar = _READERS[setting.kind]
            group.add_argument(
                f"--{setting.flag}",
                dest=f"set_{setting.name}",
                type=reader,
                metavar=metavar,
                default=SUPPRESS,
                help=setting.help,
            )


def given_settings(arguments: Namespace) -> dict[str, Any]:
    """The settings that were given, by their keywords."""
    given: dict[str, Any] = {}
    for setting in SETTINGS:
        if hasattr(arguments, f"set_{setting.name}"):
            value = getattr(arguments, f"set_{setting.name}")
            given[setting.name] = dict(value) if setting.kind == "pairs" else value
    return given


def settings_rows(info: QueueDescription) -> list[tuple[str, str]]:
    """Every setting of a queue with its value, as text for people."""
    return [
        (setting.flag, setting.show(getattr(info.settings, setting.name))) for setting in SETTINGS
    ]
