"""The figures of a server for Prometheus: its queues' depths, its answers and its faults.

Nothing here is on the path of a request: counts are kept as plain numbers where they arise, and
everything else is read from the engine when the figures are asked for.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from penstock.backends.engine.engine import Engine
from penstock.server.faults import Faults
from penstock.service import ListQueues, Stats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """A collector of one engine's figures, and of its server's."""

    def __init__(
        self, engine: Engine, answered: Counter[tuple[str, int]], faults: Faults | None = None
    ) -> None:
        self._engine = engine
        self._answered = answered
        self._faults = faults if faults is not None else Faults()

    def text(self) -> bytes:
        """All figures, in the form Prometheus reads."""
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
        for name in self._engine.submit(ListQueues(limit=2**31)):
            stats = self._engine.submit(Stats(name))
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
