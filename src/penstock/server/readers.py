"""Metrics: how far the named readers of a journal, such as mirrors and pipelines, are behind."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.server.metrics import MetricFamily
from penstock.server.reader_watch import registered_readers


class ReaderFigures:
    """The figures of one store's readers, read from their files when the page is requested."""

    def __init__(self, store: Path, durable_offset: Callable[[], int]) -> None:
        self._store = store
        self._durable_offset = durable_offset

    def families(self) -> Iterator[MetricFamily]:
        """Three families; the second shows whether a reader has stopped or is only slow."""
        behind = MetricFamily(
            "penstock_reader_behind_bytes",
            "gauge",
            "Durable bytes of the journal that a named reader has not read, and that are kept.",
        )
        moved = MetricFamily(
            "penstock_reader_moved_age_seconds",
            "gauge",
            "Time since a named reader last reported how far it has read.",
        )
        abandoned = MetricFamily(
            "penstock_reader_abandoned",
            "gauge",
            "1 for a reader that has not moved for two days while 16 MiB or more are kept for it.",
        )
        now_ms = time.time_ns() // 1_000_000
        durable = self._durable_offset()
        for each in registered_readers(self._store):
            behind.add(each.behind_bytes(durable), reader=each.name)
            moved.add(max(0, now_ms - each.moved_at_ms) / 1_000, reader=each.name)
            abandoned.add(int(each.is_abandoned(durable, now_ms)), reader=each.name)
        yield from (behind, moved, abandoned)
