"""The queues of the first screen: their rates, their order, and the sentence above them.

The words and the order are those of the console (`server/console/static/queues.js`).
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal

from penstock.output import counted
from penstock.server.console.status import CALM, STUCK, WATCH
from penstock.service import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

PUSHED, PULLED, DELETED, RETURNED = range(4)
SORTS: Final = ("attention", "name", "depth", "age", "rate")
# Over how long a rate is measured, once this program has looked for so long.
_RATES_MS: Final = 10_000
_NAMED_MAX: Final = 3
_BARS: Final = "▁▂▃▄▅▆▇█"
Kind = Literal["good", "warn", "bad"]


class BoardRow:
    """One queue: its values as they were last sent, its last hour, and its rates."""

    def __init__(self, queue: dict[str, Any], at_ms: int, points: int, point_ms: int) -> None:
        self.queue = queue
        self.is_beside = False
        self._minute: list[int] = queue.get("minute") or []
        self._since_ms = at_ms
        self._seen: deque[tuple[int, list[int]]] = deque()
        line: list[int | None] = list(queue.get("line") or [self.depth] * points)
        # Before it was first read, nothing is known.
        known = at_ms // point_ms - queue["since_ms"] // point_ms
        unknown = max(0, points - 1 - known)
        self.line: list[int | None] = [*[None] * unknown, *line[unknown:]]
        self._point_ms = point_ms
        self._point = at_ms // point_ms
        self._count(queue, at_ms)

    @property
    def name(self) -> str:
        """The name of the queue."""
        return str(self.queue["name"])

    @property
    def depth(self) -> int:
        """Every message that it holds."""
        return int(self.queue["visible"] + self.queue["delayed"] + self.queue["in_flight"])

    @property
    def level(self) -> int:
        """Whether it needs attention: STUCK, WATCH or CALM."""
        return int(self.queue["level"])

    def update(self, queue: dict[str, Any], at_ms: int) -> None:
        """Takes newer values."""
        self.pass_time(at_ms)
        self.queue = queue
        self.line[-1] = max(self.line[-1] or 0, self.depth)
        self._count(queue, at_ms)

    def pass_time(self, now_ms: int) -> None:
        """The line goes on: a new point for each minute."""
        point = now_ms // self._point_ms
        for _ in range(min(point - self._point, len(self.line))):
            self.line = [*self.line[1:], self.depth]
        self._point = max(point, self._point)

    def _count(self, queue: dict[str, Any], at_ms: int) -> None:
        counts = queue["counts"]
        if counts is None:
            return
        if self._seen and any(map(int.__lt__, counts, self._seen[-1][1])):
            self._seen.clear()  # the server began anew
        self._seen.append((at_ms, counts))

    def per_s(self, kind: int, now_ms: int) -> float | None:
        """How often a second something happens; None if the store does not count it."""
        seen = self._seen
        if not seen:
            return None
        from_ms = now_ms - _RATES_MS
        while len(seen) > 1 and seen[1][0] <= from_ms:
            seen.popleft()
        if now_ms - self._since_ms < _RATES_MS // 2 and self._minute:
            return self._minute[kind] / 60
        began_ms = max(seen[0][0], from_ms)
        return (seen[-1][1][kind] - seen[0][1][kind]) / max(1.0, (now_ms - began_ms) / 1_000)


class Board:
    """All queues, as the first screen shows them."""

    def __init__(self) -> None:
        self.rows: dict[str, BoardRow] = {}
        self.sort = SORTS[0]
        self.search = ""
        self.error = ""
        self.at_ms = 0
        self.lacking: dict[str, str] = {}
        self._points, self._point_ms = 60, MINUTE_MS

    def load(self, overview: dict[str, Any]) -> None:
        """Takes everything anew."""
        self.at_ms, self.error = overview["at_ms"], overview["error"]
        self.lacking = overview["lacking"]
        self._points, self._point_ms = overview["points"], overview["point_ms"]
        self.rows = {queue["name"]: self._row(queue) for queue in overview["queues"]}

    def _row(self, queue: dict[str, Any]) -> BoardRow:
        return BoardRow(queue, self.at_ms, self._points, self._point_ms)

    def change(self, change: dict[str, Any]) -> None:
        """Applies a change that the server sent."""
        self.at_ms, self.error = change["at_ms"], change.get("error", "")
        for name in change.get("gone", ()):
            self.rows.pop(name, None)
        for queue in change["queues"]:
            known = self.rows.get(queue["name"])
            if known is None:
                self.rows[queue["name"]] = self._row(queue)
            else:
                known.update(queue, self.at_ms)

    def shown(self) -> list[BoardRow]:
        """The rows to show, in their order."""
        beside = {each.queue.get("dead_letter") for each in self.rows.values()}
        words = self.search.casefold().split()
        found = []
        for each in self.rows.values():
            each.is_beside = each.name in beside
            # A dead-letter queue is beside its sources, until somebody looks for it.
            hides = each.is_beside and self.sort == "attention" and each.level != STUCK
            text = f"{each.name} {each.queue['why']}".casefold()
            if all(word in text for word in words) and (words or not hides):
                found.append(each)
        return sorted(found, key=self._order)

    def _order(self, row: BoardRow) -> tuple[float, str]:
        if self.sort == "attention":
            first: float = -row.level
        elif self.sort == "depth":
            first = -row.depth
        elif self.sort == "age":
            first = row.queue["oldest_at_ms"] or float("inf")
        elif self.sort == "rate":
            first = -sum(row.per_s(kind, self.at_ms) or 0 for kind in (PUSHED, PULLED))
        else:
            first = 0
        return first, row.name

    def verdict(self) -> tuple[Kind, str, str]:
        """Is anything stuck? A sentence, and what belongs to it."""
        rows = list(self.rows.values())
        if self.error:
            return "bad", "The store does not answer.", self.error
        if not rows:
            return "good", "No queues yet.", "penstock create orders makes one."
        self.shown()
        stuck = [each for each in rows if each.level == STUCK]
        watch = [each for each in rows if each.level == WATCH and not each.is_beside]
        dead = sum(each.depth for each in rows if each.is_beside)
        more = [f"To look at: {_some(watch)}"] if watch else []
        if dead:
            more.append(counted(dead, "dead letter"))
        if stuck:
            title = f"{counted(len(stuck), 'queue')} {'is' if len(stuck) == 1 else 'are'} stuck."
            return "bad", title, " · ".join([_some(stuck), *more])
        if more:
            return "warn", "Nothing is stuck.", " · ".join(more)
        are = "moves or is empty" if len(rows) == 1 else "move or are empty"
        return "good", "Nothing is stuck.", f"All {counted(len(rows), 'queue')} {are}."

    def totals(self) -> str:
        """What all queues are together."""
        rows = self.rows.values()
        text = f"{counted(len(rows), 'queue')} · {few(sum(each.depth for each in rows))} messages"
        known = [each for each in rows if each.queue["counts"] is not None]
        if known:
            came = sum(each.per_s(PUSHED, self.at_ms) or 0 for each in known)
            left = sum(each.per_s(DELETED, self.at_ms) or 0 for each in known)
            text += f" · {rate(came)} in, {rate(left)} out"
        return text

    def dead(self, row: BoardRow) -> str:
        """How many dead letters of this queue wait."""
        name = row.queue.get("dead_letter")
        if name is None:
            return "–"
        queue = self.rows.get(name)
        return "?" if queue is None else few(queue.depth)


def _some(rows: Sequence[BoardRow]) -> str:
    names = ", ".join(each.name for each in rows[:_NAMED_MAX])
    more = len(rows) - _NAMED_MAX
    return f"{names} and {more} more" if more > 0 else names


def level_mark(level: int) -> str:
    """A sign for a level that does not need colour."""
    return {CALM: " ", WATCH: "·", STUCK: "!"}[level]


def spark(line: Sequence[int | None], cells: int) -> str:
    """The last points of a line in so many characters; each is the most of its points."""
    per_cell = max(1, len(line) // cells)
    tail = line[-cells * per_cell :]
    parts = [tail[at : at + per_cell] for at in range(0, len(tail), per_cell)]
    most = max((each for each in tail if each is not None), default=0)
    text = ""
    for part in parts:
        known = [each for each in part if each is not None]
        if not known:
            text += " "
        elif not most:
            text += _BARS[0]
        else:
            # The most is the full bar, and one message is not nothing.
            text += _BARS[max(0, -(-max(known) * len(_BARS) // most) - 1)]
    return text.rjust(cells)


def _trim(number: float) -> str:
    return f"{number:.{1 if number < 10 else 0}f}".removesuffix(".0")


def few(number: int) -> str:
    """A count in at most six characters."""
    if number < 10_000:
        return f"{number:,}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{_trim(number / size)}{unit}"
    raise AssertionError("a number of 10,000 or more is at least 1,000")


def rate(per_s: float | None) -> str:
    """How often a second, or a minute."""
    if per_s is None:
        return "?"
    if not per_s:
        return "–"
    if per_s >= 0.95:
        return f"{_trim(per_s) if per_s < 10 else few(round(per_s))}/s"
    return f"{_trim(60 * per_s)}/m" if 60 * per_s >= 0.95 else "<1/m"


def age(at_ms: int | None, now_ms: int) -> str:
    """About how long ago, in at most five characters."""
    if at_ms is None:
        return "–"
    passed_ms = max(0, now_ms - at_ms)
    for size_ms, unit in ((DAY_MS, "d"), (HOUR_MS, "h"), (MINUTE_MS, "m")):
        if passed_ms >= size_ms:
            return f"{_trim(passed_ms / size_ms)}{unit}"
    return f"{passed_ms // SECOND_MS}s"
