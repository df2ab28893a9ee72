"""The figures of a server for Prometheus: its queues' depths, its answers and its faults.

Counts are plain numbers, kept where the events occur; everything else is read by commands when the
page is requested. Ten thousand queues make a page of 3 MB, so it is made in slices, between which
the event loop answers other requests; a queue's figures are those at the time of its slice.

The page is text in the format 0.0.4: the lines of a family are together, its samples last.

    # HELP penstock_stored_bytes Bytes of messages in a queue.
    # TYPE penstock_stored_bytes gauge
    penstock_stored_bytes{queue="orders"} 5.0
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal, Protocol

from penstock.backends.loop import PAUSE, Steps
from penstock.errors import QueueNotFound
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.service import ListQueues, QueueStats, Stats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Each queue shown costs a command, and six lines of the page.
QUEUES_MAX: Final = 10_000
# How many queues are read in one slice: about a millisecond.
SLICE: Final = 100
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class MetricFamily:
    """The samples of one name, as lines of the page."""

    def __init__(self, name: str, kind: Literal["counter", "gauge"], text: str) -> None:
        self._name = name
        self.lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def add(self, value: float, **labels: str) -> None:
        """Adds the sample with these labels."""
        shown = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
        self.lines.append(f"{self._name}{f'{{{shown}}}' if shown else ''} {float(value)}")


class QueueFamilies:
    """The families that have samples for each queue."""

    def __init__(self) -> None:
        self._states = MetricFamily("penstock_messages", "gauge", "Messages in a queue, by state.")
        self._stored = MetricFamily(
            "penstock_stored_bytes", "gauge", "Bytes of messages in a queue."
        )
        self._oldest = MetricFamily(
            "penstock_oldest_message_age_seconds", "gauge", "Age of the oldest message in a queue."
        )
        self._waiting = MetricFamily(
            "penstock_waiting_pulls", "gauge", "Pulls that wait for a message."
        )
        self.all = (self._states, self._stored, self._oldest, self._waiting)

    def add(self, stats: QueueStats) -> None:
        """Adds the samples of one queue."""
        name = stats.queue
        self._states.add(stats.visible, queue=name, state="visible")
        self._states.add(stats.delayed, queue=name, state="delayed")
        self._states.add(stats.in_flight, queue=name, state="in_flight")
        self._stored.add(stats.stored_bytes, queue=name)
        self._oldest.add((stats.oldest_age_ms or 0) / 1_000, queue=name)
        self._waiting.add(stats.waiting_pulls, queue=name)


class FigureSource(Protocol):
    """A part of a server that has figures."""

    def families(self) -> Iterator[MetricFamily]:
        """Its figures."""
        ...


class Metrics:
    """The page about a service's queues and its server."""

    def __init__(
        self,
        answered: Counter[tuple[str, int]],
        queues_max: int = QUEUES_MAX,
        faults: Faults | None = None,
        commands: CommandCounts | None = None,
        more: Sequence[FigureSource] = (),
    ) -> None:
        """`more` are other parts of the server with figures of their own."""
        self._answered = answered
        self._queues_max = queues_max
        self._faults = faults if faults is not None else Faults()
        self._commands = commands if commands is not None else CommandCounts()
        self._more = more

    def page(self) -> Steps[bytes]:
        """All figures in the form Prometheus reads, of the first `queues_max` queues."""
        families = QueueFamilies()
        names: list[str] = yield ListQueues(limit=self._queues_max)
        for number, name in enumerate(names, 1):
            try:
                families.add((yield Stats(name)))
            except QueueNotFound:
                continue  # deleted since
            if number % SLICE == 0:
                yield PAUSE
        lines: list[str] = []
        for family in (*families.all, *self._server_families()):
            lines += family.lines
        lines.append("")
        return "\n".join(lines).encode()

    def _server_families(self) -> tuple[MetricFamily, ...]:
        requests = MetricFamily(
            "penstock_requests_total", "counter", "Requests answered by HTTP, by action."
        )
        for (action, status), count in sorted(self._answered.items()):
            requests.add(count, action=action or "unknown", status=str(status))
        commands = MetricFamily(
            "penstock_commands_total", "counter", "Commands answered by frames, by result."
        )
        for command, result, count in self._commands.items():
            commands.add(count, command=command, result=result)
        faults = MetricFamily(
            "penstock_faults_total",
            "counter",
            "Exceptions that no code expected: each is a mistake in Penstock.",
        )
        faults.add(self._faults.total)
        more = [family for part in self._more for family in part.families()]
        return requests, commands, faults, *more
