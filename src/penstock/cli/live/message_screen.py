"""The screen of one message in `penstock top`: its life, its attributes and its body.

Names, bodies and errors come from others: each is escaped, and never read as markup.
"""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from penstock.cli.values import show_size
from penstock.errors import PenstockError, RequestError, UnavailableError
from penstock.life import moment
from penstock.output import printable

if TYPE_CHECKING:
    from penstock.cli.live.app import TopApp

_BODY_CHARS_MAX: Final = 100_000
_AGAIN_S: Final = 1.0
_STYLES: Final = {"good": "bold green", "warn": "bold yellow", "bad": "bold red"}


class TopScreen(Screen[None]):
    """What all screens share: the line at the top, and how errors are shown."""

    app: "TopApp"

    def say(self, kind: str, title: str, more: str = "") -> None:
        """Writes the line at the top."""
        shown = Text(f"{printable(title)} ", _STYLES[kind])
        shown.append(printable(more), "none")
        self.query_one("#verdict", Static).update(shown)

    def say_error(self, error: PenstockError) -> None:
        """Says what failed, in the place of what is shown otherwise."""
        self.say("bad", "No answer." if isinstance(error, UnavailableError) else "", str(error))


class MessageScreen(TopScreen):
    """One message: what happened to it, its attributes and its body."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "again", "Look again"),
        Binding("escape,u", "app.pop_screen", "Back", key_display="esc"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, queue: str, message_id: str) -> None:
        super().__init__()
        self._queue = queue
        self._message_id = message_id

    def compose(self) -> ComposeResult:
        yield Static("Looking …", id="verdict")
        with VerticalScroll(id="message"):
            yield Static("", id="life")
            yield Static("", id="body")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#message").focus()
        self.action_again()

    @work(exclusive=True)
    async def action_again(self) -> None:
        """Reads the message and its life."""
        read = self.app.source.read
        self.say("good", self._queue, self._message_id)
        try:
            life = await read("life", id=self._message_id)
            told = "\n".join(map(printable, life["sentences"]))
        except RequestError as error:
            # A store without histories, or whose journal has dropped this one.
            told = printable(str(error))
        except PenstockError as error:
            # Or the store still reads what was before its opening, and says how far it is.
            self.say_error(error)
            self.set_timer(_AGAIN_S, self.action_again)
            return
        self.query_one("#life", Static).update(Text(told))
        try:
            message = (await read("message", queue=self._queue, id=self._message_id))["message"]
        except PenstockError as error:
            message = None
            self.say_error(error)
        shown = message_text(message) if message is not None else Text("It is not there any more.")
        self.query_one("#body", Static).update(shown)


def body_preview(message: dict[str, Any]) -> str:
    """The beginning of a body on one line."""
    if message.get("is_masked"):
        return "masked by the server"
    if message.get("is_binary"):
        return f"{message['bytes']:,} bytes, not text"
    return str(message["body"])


def message_text(message: dict[str, Any]) -> Text:
    """A whole message: what is set on it, its attributes and its body."""
    text = Text()
    names = ("group", "dedup_id", "priority", "source", "receives")
    rows = [(name.replace("_", " "), message[name]) for name in names if message[name]]
    for name, value in [*rows, ("size", show_size(message["bytes"])),
                        ("pushed", f"{moment(message['pushed_at_ms'])} UTC"),
                        *message["attributes"].items()]:  # fmt: skip
        shown = "masked" if value is None else value["base64"] if isinstance(value, dict) else value
        text.append(f"{printable(str(name)):<16} ", "bold")
        text.append(f"{printable(str(shown))}\n")
    body = body_preview(message) if message.get("is_masked") else str(message["body"])
    # What is not JSON, or is too deep for it, is shown as it is.
    with suppress(ValueError, RecursionError):
        body = json.dumps(json.loads(body), indent=2, ensure_ascii=False)
    if len(body) > _BODY_CHARS_MAX:
        body = f"{body[:_BODY_CHARS_MAX]}\n… and {len(body) - _BODY_CHARS_MAX:,} more characters"
    text.append("\n")
    text.append(printable(body, "\n\t"))
    return text
