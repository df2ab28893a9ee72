"""Metrics: how far the named readers of a journal, such as mirrors and pipelines, are behind."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.backends.engine.engine import Engine
from penstock.errors import StoreUnusable
from penstock.journal import readers
from penstock.journal.file import FileJournal
from penstock.server.metrics import FigureSource, MetricFamily


class ReaderFigures:
    """The figures of one store's readers, read from their files when the page is requested."""

    def __init__(self, store: Path, durable_offset: Callable[[], int]) -> None:
        self._store = store
        self._durable_offset = durable_offset

    def families(self) -> Iterator[MetricFamily]:
        """Two families; the second shows whether a reader has stopped or is only slow."""
        behind = MetricFamily(
            "penstock_reader_behind_bytes",
            "gauge",
            "Durable bytes of the journal that a named reader has not read.",
        )
        moved = MetricFamily(
            "penstock_reader_moved_age_seconds",
            "gauge",
            "Time since a named reader last reported how far it has read.",
        )
        now_ms = time.time_ns() // 1_000_000
        durable = self._durable_offset()
        try:
            registered = readers.registered(self._store)
        except StoreUnusable:
            registered = []
        for each in registered:
            behind.add(max(0, durable - each.floor_offset), reader=each.name)
            moved.add(max(0, now_ms - each.moved_at_ms) / 1_000, reader=each.name)
        yield from (behind, moved)


def reader_figures(engine: Engine, store: str) -> list[FigureSource]:
    """The figures of the readers of an engine's journal; none if it has no files."""
    journal = engine.journal
    if not isinstance(journal, FileJournal):
        return []
    return [ReaderFigures(Path(store), lambda: journal.segments.durable_offset)]
