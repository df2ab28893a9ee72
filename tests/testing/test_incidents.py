"""From an incident to a test: a slice of a journal, redacted or not, given to a consumer again."""

import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from itertools import pairwise

import pytest

import penstock
from penstock.cli import main
from penstock.clock import ManualClock
from penstock.errors import InvalidField
from penstock.journal.slices import Redactor, Slice, SliceHeader, SliceStep, read_slice
from penstock.testing import reproduce

SECRET = b'{"card": "4111111111111111", "amount": 1200, "paid": true}'


def taken(queues, queue="orders", **options):
    """The claim of the next message, which there is."""
    (claim,) = queues.pull_many(queue, 1, **options)
    return claim


@pytest.fixture
def incident(quick_path, monkeypatch):
    """A store in which one message was delivered twice, because its first claim ran out."""
    monkeypatch.chdir(quick_path)
    clock = ManualClock(round(time.time() * 1_000) - 600_000)
    with penstock.connect(f"file:{quick_path}/store?embedded=1", clock=clock) as queues:
        queues.create("orders", visibility_timeout=30)
        queues.create("others")
        queues.push("orders", "before", attributes={"raw": b"\xff", "kind": "old"})
        clock.advance(seconds=300)
        queues.push("orders", SECRET, priority=3)
        queues.push("others", "elsewhere")
        queues.pull("orders", holder="one")
        clock.advance(seconds=31)
        queues.delete(taken(queues, holder="two"))
        clock.advance(seconds=5)
        claim = taken(queues)
        queues.release(claim, delay=10)
        clock.advance(seconds=11)
        queues.delete(taken(queues))
    return quick_path


def capture(path, *words):
    return main(["capture", str(path / "store"), "--queue", "orders", "--last", "8m", *words])


def test_a_slice_gives_a_consumer_the_same_messages_in_the_same_order_with_the_same_gaps(incident):
    assert capture(incident) == 0
    seen = []

    def work(claim):
        at = datetime.fromtimestamp(claim.deadline_ms / 1_000)
        seen.append((claim.body, claim.receives, at))

    found = reproduce(incident / "orders.slice", work)
    assert (found.deliveries, found.errors) == (4, [])
    assert [(body, receives) for body, receives, _ in seen] == [
        (SECRET, 1),
        (SECRET, 2),
        (b"before", 1),
        (b"before", 2),
    ]
    gaps = [round((after[2] - before[2]).total_seconds()) for before, after in pairwise(seen)]
    assert gaps == [31, 5, 11]


def test_a_consumer_that_charges_twice_is_shown_by_the_slice_of_its_incident(incident):
    capture(incident)
    charged: Counter[bytes] = Counter()
    reproduce(incident / "orders.slice", lambda claim: charged.update([claim.body]))
    assert charged[SECRET] == 2


def test_errors_of_a_consumer_are_counted_and_its_assertions_end_the_run(incident):
    capture(incident)

    def fails(claim):
        raise ValueError(claim.body)

    assert len(reproduce(incident / "orders.slice", fails).errors) == 4

    def refuses(claim):
        raise AssertionError("seen")

    with pytest.raises(AssertionError, match="seen"):
        reproduce(incident / "orders.slice", refuses)


def test_attributes_and_priorities_are_as_they_were(incident):
    capture(incident)
    seen = {}
    reproduce(incident / "orders.slice", lambda claim: seen.update({claim.body: claim}))
    assert seen[b"before"].attributes == {"raw": b"\xff", "kind": "old"}
    assert seen[SECRET].priority == 3


def test_a_redacted_slice_has_the_form_of_the_messages_and_nothing_that_they_said(incident):
    assert capture(incident, "--redact") == 0
    text = (incident / "orders.slice").read_bytes()
    for secret in (b"4111", b"1200", b"before", b"old"):
        assert secret not in text
    bodies = []
    reproduce(incident / "orders.slice", lambda claim: bodies.append(claim.body))
    assert bodies[0] == bodies[1] != SECRET
    assert len(bodies[0]) == pytest.approx(len(SECRET.replace(b" ", b"")), abs=4)
    assert b'"card":' in bodies[0]
    assert b'"paid":true' in bodies[0]
    assert read_slice(text).header.is_redacted


def test_every_kind_of_value_is_redacted():
    step = SliceStep(0, "pushed", 1, body='{"a":[1.5,1e308,-7,null,12345678901234567890]}')
    step.group, step.dedup_id = "customer-7", "order-7"
    (found,) = Redactor(b"k").redacted(Slice(SliceHeader(1, "q", 0), [step])).steps
    assert found.body is not None
    for secret in ("1.5", "e308", "-7", "12345678901234567890"):
        assert secret not in found.body
    assert "null" in found.body
    assert (found.group, found.dedup_id) != (step.group, step.dedup_id)
    assert len(found.group or "") == len("customer-7")


def test_equal_values_are_redacted_alike_and_others_differently(incident):
    capture(incident)
    cut = read_slice((incident / "orders.slice").read_bytes())
    one, again = Redactor(b"k").redacted(cut), Redactor(b"k").redacted(cut)
    assert one == again != Redactor(b"other").redacted(cut)


def test_the_test_that_is_written_passes_as_it_is(incident):
    assert capture(incident, "--pytest") == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", "-q", "test_orders_slice.py"],
        cwd=incident,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_fifo_queue_gives_its_groups_again_in_order(quick_path, monkeypatch):
    monkeypatch.chdir(quick_path)
    clock = ManualClock(round(time.time() * 1_000) - 60_000)
    with penstock.connect(f"file:{quick_path}/store?embedded=1", clock=clock) as queues:
        queues.create("orders.fifo")
        for number in range(4):
            queues.push("orders.fifo", str(number), group="g", dedup_id=str(number))
        for _ in range(4):
            clock.advance(seconds=1)
            queues.delete(taken(queues, "orders.fifo"))
    words = ["--queue", "orders.fifo", "--output", "fifo.slice"]
    assert main(["capture", str(quick_path / "store"), *words]) == 0
    bodies = []
    reproduce(quick_path / "fifo.slice", lambda claim: bodies.append(claim.body))
    assert bodies == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["--queue", "none"], 3, "the journal has no queue 'none'"),
        (["--queue", "orders", "--last", "0"], 2, "0 s is no time"),
        (["--queue", "orders", "--output", "store"], 2, "store exists already"),
        (["--queue", "orders", "--archive", "none"], 2, "--archive: none is not a directory"),
        ([], 2, "required: --queue"),
    ],
)
def test_a_capture_that_is_wrong_says_so_and_writes_nothing(incident, capsys, words, status, told):
    before = sorted(incident.iterdir())
    assert main(["capture", str(incident / "store"), *words]) == status
    assert told in capsys.readouterr().err
    assert sorted(incident.iterdir()) == before


def test_a_time_in_which_nothing_happened_is_said(incident, capsys):
    words = ["--queue", "orders", "--last", "1s"]
    assert main(["capture", str(incident / "store"), *words]) == 1
    assert "nothing happened in orders in the last 1s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}", b"no slice", b'{"slice_version":9,"queue":"q","from_ms":0}'),
        *(b'{"\xff":1}', b'{"a":' + b"[" * 60_000),
    ],
)
def test_a_file_that_is_no_slice_is_refused(tmp_path, text):
    (tmp_path / "a.slice").write_bytes(text)
    with pytest.raises(InvalidField, match="slice"):
        reproduce(tmp_path / "a.slice", print)
