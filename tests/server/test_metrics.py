"""The page of metrics, parsed as Prometheus does it."""

from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import QueueNotFound
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.server.metrics import SLICE, MetricFamily, Metrics
from penstock.service import ListQueues, QueueStats, Stats
from penstock.wire.frames.frames import PULL, PUSH


def page(metrics, queues):
    """The page of a service with these queues, parsed: samples by their name."""
    steps = metrics.page()
    reply: Any = None
    text = ""
    try:
        command = next(steps)
        while True:
            match command:
                case ListQueues():
                    reply = [*queues, "deleted since"]
                case Stats(queue) if queue in queues:
                    reply = queues[queue]
                case Stats():
                    command = steps.throw(QueueNotFound("none"))
                    continue
                case _:
                    reply = None
            command = steps.send(reply)
    except StopIteration as stop:
        text = stop.value.decode()
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def test_the_page_has_every_figure_of_a_queue_and_of_the_server():
    counts = CommandCounts()
    counts.ok[PUSH] += 3
    counts.refuse(PULL, QueueNotFound("none"))
    counts.refuse(0x7F, QueueNotFound("of an unknown command"))
    answered = Counter({("SendMessage", 200): 2, ("", 400): 1})
    stats = QueueStats("orders", 5, 2, 1, 4_096, 1_500, 7)
    samples = page(Metrics(answered, faults=Faults(), commands=counts), {"orders": stats})
    queue = {"queue": "orders"}
    assert samples["penstock_messages"] == [
        ({**queue, "state": "visible"}, 5),
        ({**queue, "state": "delayed"}, 2),
        ({**queue, "state": "in_flight"}, 1),
    ]
    assert samples["penstock_stored_bytes"] == [(queue, 4_096)]
    assert samples["penstock_oldest_message_age_seconds"] == [(queue, 1.5)]
    assert samples["penstock_waiting_pulls"] == [(queue, 7)]
    assert samples["penstock_requests_total"] == [
        ({"action": "unknown", "status": "400"}, 1),
        ({"action": "SendMessage", "status": "200"}, 2),
    ]
    assert samples["penstock_commands_total"] == [
        ({"command": "Push", "result": "ok"}, 3),
        ({"command": "unknown", "result": "QueueNotFound"}, 1),
        ({"command": "Pull", "result": "QueueNotFound"}, 1),
    ]
    assert samples["penstock_faults_total"] == [({}, 0)]


@pytest.mark.parametrize("count", [0, 1, SLICE, 2 * SLICE + 1])
def test_every_queue_is_shown_once_however_many_slices_there_are(count):
    queues = {f"q{n}": QueueStats(f"q{n}", n, 0, 0, 0, None, 0) for n in range(count)}
    samples = page(Metrics(Counter()), queues)
    shown = [labels["queue"] for labels, _ in samples.get("penstock_stored_bytes", [])]
    assert shown == list(queues)


def test_a_label_may_contain_any_character():
    family = MetricFamily("example", "gauge", "Labels with special characters.")
    text = 'a"b\\c\nd{}, e'
    family.add(1, queue=text)
    (found,) = text_string_to_metric_families("\n".join([*family.lines, ""]))
    assert found.samples[0].labels == {"queue": text}
