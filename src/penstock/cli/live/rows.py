"""A list of rows in a terminal of which only those on the screen are made.

`textual.widgets.DataTable` makes every cell of every row, which takes it seconds for a thousand.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Literal, NamedTuple

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from penstock.output import printable

_GAP: Final = " "


class Column(NamedTuple):
    """A column's heading, width in cells, and the side to which its text is moved."""

    head: str
    cells: int
    justify: Literal["left", "right"] = "left"


def line_of(columns: Sequence[Column], texts: Sequence[Text]) -> Text:
    """One line of cells, each cut or filled to its column's width, which is counted in cells."""
    line = Text(no_wrap=True, end="")
    for column, text in zip(columns, texts, strict=True):
        text.truncate(column.cells, overflow="ellipsis")
        text.align(column.justify, column.cells)
        line.append_text(text)
        line.append(_GAP)
    return line


def escaped(text: str, style: str = "") -> Text:
    """Text of others for a cell: escaped, and not read as markup."""
    return Text(printable(text), style, end="")


class RowList(ScrollView, can_focus=True):
    """Rows under each other, one of which is chosen; `line(place)` makes the text of one."""

    class Opened(Message):
        """Enter was pressed on a row, or it was clicked."""

        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place

    COMPONENT_CLASSES: ClassVar[set[str]] = {"row-list--chosen"}
    DEFAULT_CSS = """
    RowList { height: 1fr; padding: 0 1; }
    RowList .row-list--chosen { background: $panel; }
    RowList:focus .row-list--chosen { background: $primary 60%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open"),
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    def __init__(self, line: Callable[[int], Text], name: str) -> None:
        super().__init__(id=name)
        self._line = line
        self._count = 0
        self.chosen = 0

    def show(self, count: int, chosen: int | None = None) -> None:
        """Shows so many rows, as `line` makes them now."""
        self._count = count
        self.virtual_size = Size(0, count)
        self._choose(self.chosen if chosen is None else chosen)

    def _choose(self, place: int) -> None:
        self.chosen = max(0, min(place, self._count - 1))
        self.scroll_to_region(Region(0, self.chosen, 1, 1), animate=False, force=True)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line of the screen."""
        place = self.scroll_offset.y + y
        width = self.scrollable_content_region.width
        style = self.rich_style
        if place >= self._count:
            return Strip.blank(width, style)
        if place == self.chosen:
            style += self.get_component_rich_style("row-list--chosen")
        strip = Strip(self._line(place).render(self.app.console))
        return strip.apply_style(style).adjust_cell_length(width, style)

    def action_move(self, by: int) -> None:
        """Chooses another row."""
        self._choose(self.chosen + by)

    def action_page(self, by: int) -> None:
        """Moves by what fits on the screen."""
        self._choose(self.chosen + by * max(1, self.size.height - 1))

    def action_open(self) -> None:
        """Opens the chosen row."""
        if self._count:
            self.post_message(self.Opened(self.chosen))

    def on_click(self, event: events.Click) -> None:
        """Opens the row under the mouse."""
        offset = event.get_content_offset(self)
        place = -1 if offset is None else offset.y + self.scroll_offset.y
        if 0 <= place < self._count:
            self._choose(place)
            self.action_open()
