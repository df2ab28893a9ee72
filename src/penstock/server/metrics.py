"""The figures of a server for Prometheus: its queues, its answers and its faults.

Counts are plain numbers, kept where the events occur; everything else is read by commands when the
page is requested. Ten thousand queues make a page of 7 MB, so it is made in slices, between which
the event loop answers other requests; a queue's figures are those at the time of its slice.

A page has QUEUES_MAX queues at most, the first by name, and says how many it leaves out. Of a store
with more, `?queues=PREFIX` shows those whose names begin so. No other label has values that clients
choose.

The page is text in the format 0.0.4: the lines of a family are together, its samples last.

    # HELP penstock_stored_bytes Bytes of messages in a queue.
    # TYPE penstock_stored_bytes gauge
    penstock_stored_bytes{queue="orders"} 5.0
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, Protocol

from penstock import __version__
from penstock.backends.loop import Steps
from penstock.durations import Durations
from penstock.errors import QueueNotFound
from penstock.output import printable
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.service import QUEUES_LIMIT_MAX, ListQueues, QueueStats, Stats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Each queue shown costs a command, and eleven lines of the page.
QUEUES_MAX: Final = 10_000
# How many queues are read in one slice: about a millisecond.
SLICE: Final = 100
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class MetricFamily:
    """The samples of one name, as lines of the page."""

    def __init__(
        self, name: str, kind: Literal["counter", "gauge", "histogram"], text: str
    ) -> None:
        self._name = name
        self.lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def add(self, value: float, **labels: str) -> None:
        """Adds the sample with these labels."""
        shown = ",".join(
            f'{key}="{printable(text.translate(_ESCAPES))}"' for key, text in labels.items()
        )
        self.lines.append(f"{self._name}{f'{{{shown}}}' if shown else ''} {float(value)}")

    def add_durations(self, durations: Durations, **labels: str) -> None:
        """Adds the samples of a histogram with these labels."""
        name = self._name
        for bound, count in durations.cumulative():
            self._name = f"{name}_bucket"
            self.add(count, **labels, le=bound)
        self._name = f"{name}_sum"
        self.add(durations.sum_s, **labels)
        self._name = f"{name}_count"
        self.add(durations.total, **labels)
        self._name = name


# The fields of `QueueCounts`, each with its family.
_COUNT_FAMILIES: Final = (
    ("pushed", "penstock_pushes_total", "Messages pushed to a queue."),
    ("pulled", "penstock_deliveries_total", "Claims made on messages of a queue."),
    ("deleted", "penstock_deletes_total", "Messages deleted by their holders."),
    (
        "returned",
        "penstock_redeliveries_total",
        "Claims that ended without a delete: the message is delivered again, or is a dead letter.",
    ),
    ("dead", "penstock_dead_letters_total", "Messages that left for the dead-letter queue."),
)


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
        self._paused = MetricFamily(
            "penstock_queue_paused", "gauge", "1 for a queue whose delivery is paused."
        )
        self._counts = {
            field: MetricFamily(name, "counter", text) for field, name, text in _COUNT_FAMILIES
        }
        self.all = (
            self._states,
            self._stored,
            self._oldest,
            self._waiting,
            self._paused,
            *self._counts.values(),
        )

    def add(self, stats: QueueStats) -> None:
        """Adds the samples of one queue."""
        name = stats.queue
        self._states.add(stats.visible, queue=name, state="visible")
        self._states.add(stats.delayed, queue=name, state="delayed")
        self._states.add(stats.in_flight, queue=name, state="in_flight")
        if stats.stored_bytes is not None:
            self._stored.add(stats.stored_bytes, queue=name)
        self._oldest.add((stats.oldest_age_ms or 0) / 1_000, queue=name)
        self._waiting.add(stats.waiting_pulls, queue=name)
        if stats.paused:
            self._paused.add(1, queue=name)
        if stats.counts is not None:
            for field, family in self._counts.items():
                family.add(getattr(stats.counts, field), queue=name)


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
        times: Mapping[str, Durations] | None = None,
    ) -> None:
        """`answered` counts requests by action and status; those in `times` were answered with 200.

        `more` are other parts of the server with figures of their own.
        """
        self._answered = answered
        self._times = times or {}
        self._queues_max = queues_max
        # In this process a list of all names costs nothing; elsewhere one more says "at least one".
        self._listed_max = QUEUES_LIMIT_MAX if queues_max == QUEUES_MAX else queues_max + 1
        self._faults = faults if faults is not None else Faults()
        self._commands = commands if commands is not None else CommandCounts()
        self._more = more

    def page(self, prefix: str = "") -> Steps[bytes]:
        """All figures in the form Prometheus reads, of the first `queues_max` queues.

        With a prefix only of queues whose names begin so.
        """
        families = QueueFamilies()
        left_out = MetricFamily(
            "penstock_queues_left_out",
            "gauge",
            "Queues that this page has no room for; ?queues=PREFIX shows some of them.",
        )
        names: list[str] = yield ListQueues(prefix, limit=self._listed_max)
        left_out.add(max(0, len(names) - self._queues_max))
        del names[self._queues_max :]
        for number, name in enumerate(names, 1):
            try:
                families.add((yield Stats(name)))
            except QueueNotFound:
                continue  # deleted since
            if number % SLICE == 0:
                yield None
        lines: list[str] = []
        for family in (*families.all, left_out, *self._server_families()):
            lines += family.lines
        lines.append("")
        return "\n".join(lines).encode()

    def _server_families(self) -> tuple[MetricFamily, ...]:
        requests = MetricFamily(
            "penstock_requests_total", "counter", "Requests answered by HTTP, by action."
        )
        answered = Counter({(name, 200): times.total for name, times in self._times.items()})
        answered.update(self._answered)
        for (action, status), count in sorted(answered.items()):
            if count:
                requests.add(count, action=action or "unknown", status=str(status))
        seconds = MetricFamily(
            "penstock_request_seconds",
            "histogram",
            "How long requests took that were answered with 200 and waited for no message.",
        )
        for action, times in self._times.items():
            if times.total:
                seconds.add_durations(times, action=action)
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
        version = MetricFamily("penstock_version", "gauge", "1, with the version of Penstock.")
        version.add(1, version=__version__)
        return requests, seconds, commands, faults, version, *more
