"""Names abandoned readers of a journal in lines: nothing that a reader has not read is dropped.

So a reader that nobody uses any more fills the disk. It is named when the server starts, or when it
is first found so, and then once a day.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.errors import StoreUnusable
from penstock.journal import reader_positions
from penstock.journal.file_journal import FileJournal
from penstock.journal.reader_positions import Reader
from penstock.server.lines import READER_ABANDONED, ServerLines
from penstock.service import DAY_MS

_WATCH_S: Final = 600.0


def registered_readers(store: Path) -> list[Reader]:
    """The readers of a store; none if they cannot be read."""
    try:
        return reader_positions.registered(store)
    except StoreUnusable:
        return []


class ReaderWatch:
    """Looks for abandoned readers of a store from time to time."""

    def __init__(self, store: Path, durable_offset: Callable[[], int], lines: ServerLines) -> None:
        self._store = store
        self._durable_offset = durable_offset
        self._lines = lines
        self._told_at_ms: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, journal: object, store: str, lines: ServerLines) -> "ReaderWatch | None":
        """The watch over a journal; None if it has no files."""
        if not isinstance(journal, FileJournal):
            return None
        segments = journal.segments
        return cls(Path(store), lambda: segments.durable_offset, lines)

    def start(self) -> None:
        """Looks now, and again every ten minutes."""
        self.look(time.time_ns() // 1_000_000)
        self._timer = asyncio.get_running_loop().call_later(_WATCH_S, self.start)

    def stop(self) -> None:
        """Ends looking."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self, now_ms: int) -> None:
        """Writes a line for each abandoned reader that had none within a day."""
        durable = self._durable_offset()
        for each in registered_readers(self._store):
            told_at_ms = self._told_at_ms.get(each.name)
            if not each.is_abandoned(durable, now_ms):
                self._told_at_ms.pop(each.name, None)
            elif told_at_ms is None or now_ms - told_at_ms >= DAY_MS:
                self._told_at_ms[each.name] = now_ms
                self._lines.tell(
                    READER_ABANDONED,
                    reader=each.name,
                    kept_bytes=each.behind_bytes(durable),
                    not_moved_s=(now_ms - each.moved_at_ms) // 1_000,
                    remedy=f"penstock readers {self._store} --forget {each.name}",
                )
