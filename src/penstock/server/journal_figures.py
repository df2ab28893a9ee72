"""Metrics: the disk under a journal: its size, what is not synced yet, and how long syncs take."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from penstock.journal.file_journal import FileJournal
from penstock.server.metrics import FigureSource, MetricFamily
from penstock.server.readers import ReaderFigures


class JournalFigures:
    """The figures of one store's journal and its disk."""

    def __init__(self, journal: FileJournal, has_failed: Callable[[], bool]) -> None:
        self._journal = journal
        self._has_failed = has_failed

    def families(self) -> Iterator[MetricFamily]:
        """The sizes, the syncs, and whether upkeep works."""
        segments = self._journal.segments
        figures = [
            (
                "penstock_journal_bytes",
                "Bytes of the journal that are kept.",
                segments.end_offset - segments.first_offset,
            ),
            (
                "penstock_journal_unsynced_bytes",
                "Bytes of the journal that are not durable yet.",
                segments.end_offset - segments.durable_offset,
            ),
            (
                "penstock_upkeep_failed",
                "1 while snapshots cannot be taken or files not be dropped, else 0.",
                int(self._has_failed()),
            ),
        ]
        # If the disk cannot be asked, a monitor needs the others all the more.
        with suppress(OSError):
            disk = os.statvfs(segments.path)
            free_bytes, size_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
            figures += [
                (
                    "penstock_disk_free_bytes",
                    "Free bytes of the disk that holds the store.",
                    free_bytes,
                ),
                ("penstock_disk_bytes", "Size of the disk that holds the store.", size_bytes),
            ]
        for name, text, value in figures:
            family = MetricFamily(name, "gauge", text)
            family.add(value)
            yield family
        syncs = MetricFamily(
            "penstock_sync_seconds", "histogram", "How long syncs of the journal took."
        )
        syncs.add_durations(self._journal.syncs)
        yield syncs


def journal_figures(
    journal: object, store: str, has_failed: Callable[[], bool]
) -> list[FigureSource]:
    """The figures of a journal and of its readers; none if it has no files.

    `has_failed` tells whether the store's upkeep works.
    """
    if not isinstance(journal, FileJournal):
        return []
    segments = journal.segments
    return [
        JournalFigures(journal, has_failed),
        ReaderFigures(Path(store), lambda: segments.durable_offset),
    ]
