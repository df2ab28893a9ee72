"""The page of metrics, parsed as Prometheus does it."""

import re
from collections import Counter
from contextlib import closing
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.store import open_engine
from penstock.durations import Durations
from penstock.errors import QueueNotFound
from penstock.journal import MemoryJournal, reader_positions
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.server.journal_figures import journal_figures
from penstock.server.metrics import QUEUES_MAX, SLICE, MetricFamily, Metrics
from penstock.service import CreateQueue, ListQueues, Push, QueueCounts, QueueStats, Stats
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


def test_what_happens_in_a_queue_is_counted_and_a_paused_queue_is_named():
    counts = QueueCounts(pushed=9, pulled=7, deleted=4, returned=2, dead=1)
    queues = {
        "orders": QueueStats("orders", 1, 0, 0, 0, None, 0, counts),
        "elsewhere": QueueStats("elsewhere", 1, 0, 0, None, None, 0, None, True),
    }
    samples = page(Metrics(Counter()), queues)
    orders = {"queue": "orders"}
    assert samples["penstock_pushes_total"] == [(orders, 9)]
    assert samples["penstock_deliveries_total"] == [(orders, 7)]
    assert samples["penstock_deletes_total"] == [(orders, 4)]
    assert samples["penstock_redeliveries_total"] == [(orders, 2)]
    assert samples["penstock_dead_letters_total"] == [(orders, 1)]
    assert samples["penstock_queue_paused"] == [({"queue": "elsewhere"}, 1)]


def test_requests_with_a_time_are_a_histogram_and_counted_with_the_others():
    times = {"SendMessage": Durations(), "ListQueues": Durations()}
    for took_s in (0.0001, 0.0005, 0.02, 60):
        times["SendMessage"].add(took_s)
    answered = Counter({("SendMessage", 400): 2, ("ReceiveMessage", 200): 5})
    samples = page(Metrics(answered, times=times), {})
    assert samples["penstock_requests_total"] == [
        ({"action": "ReceiveMessage", "status": "200"}, 5),
        ({"action": "SendMessage", "status": "200"}, 4),
        ({"action": "SendMessage", "status": "400"}, 2),
    ]
    buckets = {
        labels["le"]: count
        for labels, count in samples["penstock_request_seconds_bucket"]
        if labels["action"] == "SendMessage"
    }
    assert (buckets["0.0005"], buckets["0.01"], buckets["0.025"]) == (2, 2, 3)
    assert (buckets["10.0"], buckets["+Inf"]) == (3, 4)
    send = {"action": "SendMessage"}
    assert samples["penstock_request_seconds_count"] == [(send, 4)]
    assert samples["penstock_request_seconds_sum"] == [(send, 60.0206)]


def read_page(steps, engine):
    """The page that these steps make, on an engine."""
    reply: Any = None
    while True:
        try:
            command = steps.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = None if command is None else engine.submit(command)


@pytest.mark.parametrize(("count", "left_out"), [(1_000, 0), (100_000, 90_000)])
def test_a_page_has_ten_thousand_queues_at_most_and_says_how_many_are_left_out(count, left_out):
    engine = Engine(MemoryJournal())
    for number in range(count):
        engine.submit(CreateQueue(f"q{number:06d}"))
    text = read_page(Metrics(Counter()).page(), engine)
    lines = text.decode().splitlines()
    shown = [line for line in lines if line.startswith("penstock_stored_bytes{")]
    assert len(shown) == min(count, QUEUES_MAX)
    assert f"penstock_queues_left_out {float(left_out)}" in lines
    # Eleven lines a queue, and less than a kilobyte.
    assert len(lines) < 11 * len(shown) + 100
    assert len(text) < 1_000 * len(shown) + 10_000


def test_a_prefix_shows_the_queues_that_a_page_has_no_room_for():
    engine = Engine(MemoryJournal())
    for name in ("a1", "a2", "a3", "b1"):
        engine.submit(CreateQueue(name))

    def shown(prefix):
        text = read_page(Metrics(Counter(), queues_max=2).page(prefix), engine).decode()
        left_out = re.search(r"^penstock_queues_left_out (\S+)", text, re.M)
        assert left_out is not None
        return re.findall(r'penstock_stored_bytes{queue="(\w+)"}', text), float(left_out[1])

    assert shown("") == (["a1", "a2"], 1)
    assert shown("b") == (["b1"], 0)


def test_a_store_whose_directory_is_gone_has_all_figures_but_those_of_its_disk(tmp_path):
    store = tmp_path / "store"
    with closing(open_engine(str(store))) as engine:
        (journal, _) = journal_figures(engine.journal, str(store), lambda: True)
        before = {next(iter(family.lines)).split()[2] for family in journal.families()}
        store.rename(tmp_path / "elsewhere")
        after = {next(iter(family.lines)).split()[2] for family in journal.families()}
        assert before - after == {"penstock_disk_free_bytes", "penstock_disk_bytes"}
        (tmp_path / "elsewhere").rename(store)


def test_the_figures_of_a_journal_are_those_of_its_files_and_its_disk(tmp_path):
    store = tmp_path / "store"
    engine = open_engine(store, durability="os", background=False)
    engine.submit(CreateQueue("q"))
    engine.submit(Push("q", b"x" * 1_000))
    reader_positions.register(store, "mirror", 0, 1)

    def samples():
        families = [
            f
            for part in journal_figures(engine.journal, str(store), lambda: engine.upkeep_failed)
            for f in part.families()
        ]
        text = "\n".join(line for family in families for line in [*family.lines]) + "\n"
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    before = samples()
    assert before["penstock_journal_unsynced_bytes"] > 1_000
    assert before["penstock_sync_seconds_count"] == 0
    engine.journal.sync()  # type: ignore[attr-defined]
    after = samples()
    assert after["penstock_journal_unsynced_bytes"] == 0
    assert after["penstock_sync_seconds_count"] == 1
    assert after["penstock_journal_bytes"] == after["penstock_reader_behind_bytes"] > 1_000
    assert 0 < after["penstock_disk_free_bytes"] < after["penstock_disk_bytes"]
    # It has not moved for years, but almost nothing is kept for it.
    assert (after["penstock_reader_abandoned"], after["penstock_upkeep_failed"]) == (0, 0)
    engine.journal.sync()  # type: ignore[attr-defined]
    assert samples()["penstock_sync_seconds_count"] == 1
    engine.close()
    assert journal_figures(MemoryJournal(), "", lambda: False) == []
