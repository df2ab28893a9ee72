"""The figures of a server for Prometheus: its queues' depths, its answers and its faults.

Counts are kept as plain numbers where they arise; everything else is read by commands when the
page is asked for.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from penstock.backends.engine.engine import Engine
from penstock.backends.loop import Steps
from penstock.errors import QueueNotFound, StoreUnusable
from penstock.journal import readers
from penstock.journal.file import FileJournal
from penstock.server.faults import Faults
from penstock.service import ListQueues, QueueStats, Stats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Each queue shown costs a command, and six lines of the page.
QUEUES_MAX: Final = 10_000


class FigureSource(Protocol):
    """A part of a server that has figures."""

    def collect(self) -> Iterator[object]:
        """The families of its figures."""
        ...


class ReaderFigures:
    """How far the named readers of a store's journal are behind: mirrors and pipelines."""

    def __init__(self, store: Path, durable_offset: Callable[[], int]) -> None:
        self._store = store
        self._durable_offset = durable_offset

    def collect(self) -> Iterator[object]:
        """Two families; the second tells a reader that stands still from one that is slow."""
        from prometheus_client.core import GaugeMetricFamily

        behind = GaugeMetricFamily(
            "penstock_reader_behind_bytes",
            "Durable bytes of the journal that a named reader has not read.",
            labels=["reader"],
        )
        moved = GaugeMetricFamily(
            "penstock_reader_moved_age_seconds",
            "Time since a named reader last said how far it has read.",
            labels=["reader"],
        )
        now_ms = time.time_ns() // 1_000_000
        durable = self._durable_offset()
        try:
            registered = readers.registered(self._store)
        except StoreUnusable:
            registered = []
        for each in registered:
            behind.add_metric([each.name], max(0, durable - each.floor_offset))
            moved.add_metric([each.name], max(0, now_ms - each.moved_at_ms) / 1_000)
        yield from (behind, moved)


def reader_figures(engine: Engine, store: str) -> list[FigureSource]:
    """The figures of the readers of an engine's journal; none if it has no files."""
    journal = engine.journal
    if not isinstance(journal, FileJournal):
        return []
    return [ReaderFigures(Path(store), lambda: journal.segments.durable_offset)]


class Metrics:
    """A collector of the figures of a service's queues, and of its server."""

    def __init__(
        self,
        answered: Counter[tuple[str, int]],
        queues_max: int = QUEUES_MAX,
        faults: Faults | None = None,
        more: Sequence[FigureSource] = (),
    ) -> None:
        """`more` are other parts of the server with figures of their own."""
        self._answered = answered
        self._queues_max = queues_max
        self._faults = faults if faults is not None else Faults()
        self._more = more
        self._stats: list[QueueStats] = []

    def page(self) -> Steps[bytes]:
        """All figures in the form Prometheus reads, of the first `queues_max` queues."""
        found: list[QueueStats] = []
        for name in (yield ListQueues(limit=self._queues_max)):
            try:
                found.append((yield Stats(name)))
            except QueueNotFound:
                continue  # deleted since
        self._stats = found
        # Imported late: it takes longer to load than the rest of the server.
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # type: ignore[arg-type]
        return generate_latest(registry)

    def collect(self) -> Iterator[object]:
        """The figures, one family after another; called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        states = GaugeMetricFamily(
            "penstock_messages", "Messages in a queue, by state.", labels=["queue", "state"]
        )
        stored = GaugeMetricFamily(
            "penstock_stored_bytes", "Bytes of messages in a queue.", labels=["queue"]
        )
        oldest = GaugeMetricFamily(
            "penstock_oldest_message_age_seconds",
            "Age of the oldest message in a queue.",
            labels=["queue"],
        )
        waiting = GaugeMetricFamily(
            "penstock_waiting_pulls", "Pulls that wait for a message.", labels=["queue"]
        )
        for stats in self._stats:
            name = stats.queue
            states.add_metric([name, "visible"], stats.visible)
            states.add_metric([name, "delayed"], stats.delayed)
            states.add_metric([name, "in_flight"], stats.in_flight)
            stored.add_metric([name], stats.stored_bytes)
            oldest.add_metric([name], (stats.oldest_age_ms or 0) / 1_000)
            waiting.add_metric([name], stats.waiting_pulls)
        requests = CounterMetricFamily(
            "penstock_requests", "Requests answered, by action.", labels=["action", "status"]
        )
        for (action, status), count in sorted(self._answered.items()):
            requests.add_metric([action or "unknown", str(status)], count)
        faults = CounterMetricFamily(
            "penstock_faults", "Exceptions that no code expected: each is a mistake in Penstock."
        )
        faults.add_metric([], self._faults.total)
        yield from (states, stored, oldest, waiting, requests, faults)
        for part in self._more:
            yield from part.collect()
