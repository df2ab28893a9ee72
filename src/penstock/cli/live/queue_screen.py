"""The screen of one queue in `penstock top`: its figures, its last hour, and its messages."""

import asyncio
import time
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Static

from penstock.cli.live.board import age, few, spark
from penstock.cli.live.message_screen import MessageScreen, TopScreen, body_preview
from penstock.cli.live.rows import Column, RowList, escaped, line_of
from penstock.cli.values import show_size
from penstock.errors import PenstockError
from penstock.output import counted, printable
from penstock.server.console.status import BUCKET_MS, STUCK, WATCH

_PAGE: Final = 100
AGAIN_S: Final = 1.0
_STATES: Final = ("visible", "in_flight", "delayed")


class QueueScreen(TopScreen):
    """One queue as it is now, and its messages in one state, page by page."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "state('visible')", "Visible"),
        Binding("i", "state('in_flight')", "In flight"),
        Binding("d", "state('delayed')", "Delayed"),
        Binding("n", "next", "Next page"),
        Binding("p", "first", "First page"),
        Binding("escape,u", "app.pop_screen", "Back", key_display="esc"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, queue: str) -> None:
        super().__init__()
        self._queue = queue
        self._state = _STATES[0]
        self._after = 0
        self._messages: list[dict[str, Any]] = []
        self._has_more = False
        self._columns: list[Column] = []

    def compose(self) -> ComposeResult:
        yield Static("Looking …", id="verdict")
        yield Static("", id="figures")
        yield Static("", id="heads")
        yield RowList(self._line, "messages")
        yield Static("", id="more")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(RowList).focus()
        self._follow()
        self._load()

    def on_resize(self) -> None:
        self._show_messages()

    @work(exclusive=True, group="figures")
    async def _follow(self) -> None:
        while True:
            try:
                changes = self.app.source.changes(self._queue)
                self._show(await self.app.source.read("queue", name=self._queue))
                async for _ in changes:
                    self._show(await self.app.source.read("queue", name=self._queue))
            except PenstockError as error:
                self.say_error(error)
                await asyncio.sleep(AGAIN_S)

    def _show(self, page: dict[str, Any]) -> None:
        queue, settings, series = page["queue"], page["settings"], page["series"]
        kind = {STUCK: "bad", WATCH: "warn"}.get(queue["level"], "good")
        self.say(kind, self._queue, queue["why"] or "Nothing needs attention.")
        lines = [
            f"visible {queue['visible']:,} · in flight {queue['in_flight']:,} · "
            f"delayed {queue['delayed']:,} · oldest {age(queue['oldest_at_ms'], page['at_ms'])}"
            f" · {counted(queue['waiting'], 'waiting pull')}"
            + ("" if queue["bytes"] is None else f" · {show_size(queue['bytes'])}"),
            f"claims last {settings['visibility_ms'] / 1_000:g} s · "
            + ("FIFO · " if settings["fifo"] else "")
            + (
                f"after {counted(settings['max_receives'], 'delivery', 'deliveries')} "
                f"to {settings['dead_letter']}"
                if settings["dead_letter"]
                else "no dead-letter queue"
            ),
        ]
        text = Text(printable("\n".join(lines), "\n"))
        cells = max(10, min(60, self.app.size.width - 48))
        for name, label in (("depth", "depth"), ("pushed", "in"), ("deleted", "out")):
            if name in series:
                line = series[name]
                minutes = BUCKET_MS / 60_000
                most = max(line) if name == "depth" else max(line) / minutes
                unit = "" if name == "depth" else "/min"
                text.append(f"\n{label:<6}")
                text.append(spark(line, cells), "cyan")
                text.append(f"  at most {few(round(most))}{unit} in the last hour")
        self.query_one("#figures", Static).update(text)

    @work(exclusive=True, group="messages")
    async def _load(self) -> None:
        given = {"queue": self._queue, "state": self._state, "limit": str(_PAGE)}
        try:
            page = await self.app.source.read("messages", **given, after=str(self._after))
        except PenstockError as error:
            self._messages, self._has_more = [], False
            self._show_messages()
            self.query_one("#more", Static).update(Text(printable(str(error)), "bold red"))
            return
        self._messages = page["messages"]
        self._has_more = page["has_more"]
        self._show_messages(0)
        which = self._state.replace("_", " ")
        more = f"{counted(len(self._messages), 'message')} {which}"
        more += ", and more: n shows the next page" if page["has_more"] else ""
        self.query_one("#more", Static).update(Text(more, "dim"))

    def _show_messages(self, chosen: int | None = None) -> None:
        width = self.app.size.width - 6 - 8 - 9 - 13 - 4
        self._columns = [Column("Age", 8), Column("Pulled", 9), Column("Group", 13),
                         Column("Body", max(10, width))]  # fmt: skip
        heads = line_of(self._columns, [Text(each.head) for each in self._columns])
        self.query_one("#heads", Static).update(heads)
        self.query_one(RowList).show(len(self._messages), chosen)

    def _line(self, place: int) -> Text:
        message = self._messages[place]
        cells = [
            age(message["pushed_at_ms"], int(time.time() * 1_000)),
            counted(message["receives"], "time"),
            message["group"] or "–",
            body_preview(message),
        ]
        return line_of(self._columns, [escaped(cell) for cell in cells])

    def action_state(self, state: str) -> None:
        """Shows the messages in another state."""
        self._state, self._after = state, 0
        self._load()

    def action_next(self) -> None:
        """Shows the next page."""
        if self._messages and self._has_more:
            self._after = self._messages[-1]["sequence"]
            self._load()

    def action_first(self) -> None:
        """Shows the first page as it is now."""
        self._after = 0
        self._load()

    @on(RowList.Opened)
    def _open(self, event: RowList.Opened) -> None:
        self.app.push_screen(MessageScreen(self._queue, self._messages[event.place]["id"]))
