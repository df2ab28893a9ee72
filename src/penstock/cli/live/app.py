"""`penstock top` as an app: its first screen has every queue, those that need attention first."""

import asyncio
import time
from typing import ClassVar, Final

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Input, Static

from penstock.cli.live.board import (
    DELETED,
    PUSHED,
    RETURNED,
    SORTS,
    Board,
    BoardRow,
    age,
    few,
    level_mark,
    rate,
    spark,
)
from penstock.cli.live.message_screen import TopScreen
from penstock.cli.live.queue_screen import AGAIN_S, QueueScreen
from penstock.cli.live.rows import Column, RowList, escaped, line_of
from penstock.cli.live.source import StatusSource
from penstock.errors import PenstockError
from penstock.server.console.status import STUCK, WATCH

# Below this width the last hour is left out, so that names can be read.
_WIDE: Final = 110
_LINE_CELLS: Final = 20
_SHOWN_LACKS: Final = frozenset({"rates", "oldest age", "stored bytes"})


class QueuesScreen(TopScreen):
    """Every queue in a row, those that need attention first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._board = Board()
        self._rows: list[BoardRow] = []
        self._columns: list[Column] = []
        self._is_wide = False
        self._now_ms = 0
        self._shown_s = time.monotonic()

    def compose(self) -> ComposeResult:
        yield Static("Looking …", id="verdict")
        yield Static("", id="totals")
        yield Input(placeholder="a part of a queue's name", id="search")
        yield Static("", id="heads")
        yield RowList(self._line, "queues")
        yield Static("", id="more")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#search").display = False
        self._lay_out()
        self.query_one(RowList).focus()
        self.set_interval(1.0, self._tick)
        self._follow()

    def on_resize(self) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        """The columns for this width."""
        width = self.app.size.width
        self._is_wide = width >= _WIDE
        columns = [Column("Visible", 7, "right"), Column("Held", 6, "right")]
        columns += [Column(head, 6, "right") for head in ("Oldest", "In", "Out")]
        if self._is_wide:
            columns += [Column("Delayed", 7, "right"), Column("Back", 6, "right")]
            columns.insert(0, Column("Depth, last hour", _LINE_CELLS))
        columns.append(Column("Dead", 6, "right"))
        name_cells = width - 6 - sum(each.cells + 1 for each in columns)
        self._columns = [Column("", 1), Column("Queue", max(12, name_cells)), *columns]
        heads = line_of(self._columns, [Text(each.head) for each in self._columns])
        self.query_one("#heads", Static).update(heads)
        self.query_one(RowList).refresh()

    @work(exclusive=True)
    async def _follow(self) -> None:
        """Reads everything, then takes changes; after an error, from the beginning again."""
        while True:
            try:
                changes = self.app.source.changes()
                self._board.load(await self.app.source.read("queues"))
                self._show()
                async for change in changes:
                    self._board.change(change)
                    self._show()
            except PenstockError as error:
                self.say_error(error)
                await asyncio.sleep(AGAIN_S)

    def _tick(self) -> None:
        """What changes by time alone: ages, rates, the line."""
        self._now_ms = self._board.at_ms + int((time.monotonic() - self._shown_s) * 1_000)
        for row in self._rows:
            row.pass_time(self._now_ms)
        self.query_one(RowList).refresh()

    def _show(self) -> None:
        self._shown_s, self._now_ms = time.monotonic(), self._board.at_ms
        self.say(*self._board.verdict())
        where = f" · {self.app.source.shown}" if self._is_wide else ""
        totals = f"{self._board.totals()} · by {self._board.sort}{where}"
        self.query_one("#totals", Static).update(escaped(totals))
        lacks = _SHOWN_LACKS & self._board.lacking.keys()
        more = "; ".join(f"no {name}: {self._board.lacking[name]}" for name in sorted(lacks))
        self.query_one("#more", Static).update(escaped(more))
        self._arrange()

    def _arrange(self) -> None:
        """Shows the rows in their order; the same queue stays chosen."""
        rows = self.query_one(RowList)
        chosen = self._rows[rows.chosen].name if self._rows else ""
        self._rows = self._board.shown()
        places = (place for place, row in enumerate(self._rows) if row.name == chosen)
        # Until somebody has moved, the first row is chosen, whichever that is.
        rows.show(len(self._rows), next(places, None) if rows.chosen else 0)

    def _line(self, place: int) -> Text:
        row = self._rows[place]
        style = {STUCK: "bold red", WATCH: "yellow"}.get(row.level, "")
        name = escaped(row.name, style)
        if row.queue["why"]:
            name.append_text(escaped(f"  {row.queue['why']}", "dim"))
        back = row.per_s(RETURNED, self._now_ms)
        figures = {
            "Visible": few(row.queue["visible"]),
            "Held": few(row.queue["in_flight"]),
            "Oldest": age(row.queue["oldest_at_ms"], self._now_ms),
            "In": rate(row.per_s(PUSHED, self._now_ms)),
            "Out": rate(row.per_s(DELETED, self._now_ms)),
            "Delayed": few(row.queue["delayed"]),
            "Back": rate(back),
            "Dead": self._board.dead(row),
        }
        cells = {
            "": Text(level_mark(row.level), style),
            "Queue": name,
            "Depth, last hour": Text(spark(row.line, _LINE_CELLS), "cyan"),
            **{head: Text(figure) for head, figure in figures.items()},
        }
        if back:
            cells["Back"].stylize("yellow")
        return line_of(self._columns, [cells[each.head] for each in self._columns])

    @on(RowList.Opened)
    def _open(self, event: RowList.Opened) -> None:
        self.app.push_screen(QueueScreen(self._rows[event.place].name))

    def action_sort(self) -> None:
        """Takes the next order."""
        self._board.sort = SORTS[(SORTS.index(self._board.sort) + 1) % len(SORTS)]
        self._show()

    def action_search(self) -> None:
        """Asks for a part of a name."""
        search = self.query_one("#search", Input)
        search.display = True
        search.focus()

    @on(Input.Changed)
    def _search(self, event: Input.Changed) -> None:
        self._board.search = event.value
        self._arrange()

    @on(Input.Submitted)
    def _found(self) -> None:
        self.query_one(RowList).focus()

    def key_escape(self) -> None:
        """Ends the search."""
        search = self.query_one("#search", Input)
        search.value = ""
        search.display = False
        self.query_one(RowList).focus()


class TopApp(App[None]):
    """`penstock top` over one source."""

    CSS = """
    Screen { layers: base; }
    #verdict, #totals, #more, #figures { height: auto; padding: 0 1; }
    #totals, #more { color: $text-muted; }
    #figures { padding: 0 1 1 1; }
    #search { height: 3; }
    #heads { height: 1; padding: 0 1; text-style: bold; background: $panel; }
    #message { padding: 1; }
    #body { padding-top: 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("t", "light_or_dark", "Light, dark")]

    def __init__(self, source: StatusSource, *, light: bool) -> None:
        super().__init__()
        self.source = source
        self.theme = "textual-light" if light else "textual-dark"

    def on_mount(self) -> None:
        self.push_screen(QueuesScreen())

    def action_light_or_dark(self) -> None:
        """Changes between light and dark."""
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    async def action_quit(self) -> None:
        self.exit()
