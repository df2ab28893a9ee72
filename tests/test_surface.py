"""The public surface is what tests/surface.txt says: `python -m tools.surface` writes it anew."""

import inspect
import re
from datetime import timedelta
from difflib import unified_diff
from pathlib import Path

import pytest

import penstock
import penstock.aio
import penstock.tasks
import penstock.testing
from penstock import errors
from penstock.cli.queue_settings import SETTINGS
from penstock.public import Settings
from tools.surface import FILE, NOT_PROMISED, surface

ROOT = Path(__file__).parents[1]


def test_the_surface_is_the_one_that_is_written_down():
    changes = unified_diff(FILE.read_text().splitlines(), surface().splitlines(), "before", "now")
    assert "\n".join(changes) == "", "if it is meant: python -m tools.surface, and the changelog"


def test_what_is_not_promised_exists():
    for name in NOT_PROMISED:
        kind, _, member = name.partition(".")
        owner = getattr(penstock.testing if kind.startswith("Test") else penstock.tasks, kind)
        assert hasattr(owner, member), name


def test_both_clients_have_the_same_words():
    def words(kind):
        found = {name: value for name, value in vars(kind).items() if inspect.isfunction(value)}
        return {
            name: [(each.name, each.kind, each.default) for each in parameters(value)]
            for name, value in found.items()
            if not name.startswith("_")
        }

    def parameters(function):
        return inspect.signature(function).parameters.values()

    assert words(penstock.Queues) == words(penstock.aio.AsyncQueues)
    assert [each.name for each in parameters(penstock.connect)] == [
        each.name for each in parameters(penstock.aio.connect)
    ]


def test_every_public_name_exists_and_has_a_docstring():
    assert len(penstock.__all__) <= 18
    for name in penstock.__all__:
        assert getattr(penstock, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("kind", [penstock.Queues, penstock.aio.AsyncQueues])
def test_every_method_of_a_client_says_what_it_does(kind):
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            assert re.match(r"[A-Z][a-z]+s ", value.__doc__ or ""), f"{name}: no sentence"


def test_every_error_that_a_page_names_is_in_the_module_of_errors():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = " ".join(page.read_text() for page in pages)
    named = set(re.findall(r"\bpenstock\.(?:errors\.)?([A-Z][A-Za-z]+)\b", text))
    assert {"BatchRefused", "ManualClock"} <= named
    assert {
        each for each in named if not hasattr(penstock, each) and not hasattr(errors, each)
    } == set()


def test_settings_come_back_with_the_names_and_units_that_they_were_given_by():
    given = {
        "visibility_timeout": 45,
        "delay": timedelta(milliseconds=1_500),
        "wait": 2,
        "retention": timedelta(days=2),
        "priority_age": 0.25,
        "max_body_bytes": 2_000,
        "max_messages": 10,
        "max_bytes": 100_000,
        "max_in_flight": 5,
        "dead_letter": "dead",
        "max_receives": 3,
        "fifo": False,
        "dedup_by_content": True,
        "dedup_per_group": False,
        "annotations": {"owner": "anna"},
        "paused": True,
    }
    assert [*given] == [*Settings.__struct_fields__]
    assert given.keys() == {setting.name for setting in SETTINGS}
    seconds = {**given, "delay": 1.5, "retention": 172_800}
    with penstock.connect("memory:") as queues:
        assert dict(queues.create("orders", **given).settings) == seconds
        described = queues.describe("orders").settings
        assert dict(queues.create("copy", **described).settings) == seconds
        changed = queues.configure("orders", wait=timedelta(seconds=7), paused=False).settings
        assert dict(changed) == {**seconds, "wait": 7, "paused": False}


def test_durations_may_be_timedeltas_wherever_they_are_seconds():
    clock = penstock.ManualClock()
    second = timedelta(seconds=1)
    with penstock.connect("memory:", clock=clock) as queues:
        queues.create("orders")
        queues.push("orders", b"x", delay=second, ttl=60 * second)
        queues.push_many("orders", [{"body": b"y", "delay": second}], ttl=60 * second)
        assert queues.stats("orders").delayed == 2
        clock.advance(seconds=1)
        claim = queues.pull("orders", wait=second, visibility_timeout=5 * second)
        assert claim is not None
        assert claim.deadline_ms == clock.now_ms() + 5_000
        assert queues.extend(claim, 9 * second) == clock.now_ms() + 9_000
        queues.release(claim, delay=2 * second)
        assert queues.stats("orders").oldest_age == 1
        loop = queues.consume("orders", visibility_timeout=5 * second, idle=0 * second)
        assert [each.body for each in loop] == [b"y"]


def test_a_stored_receipt_names_its_claim():
    with penstock.connect("memory:") as queues:
        queues.create("orders")
        pushed = queues.push("orders", b"x")
        claim = queues.pull("orders")
        assert claim is not None
        stored = penstock.ClaimRef(claim.queue, claim.receipt)
        assert queues.extend(stored, 60) >= claim.deadline_ms
        queues.release(stored)
        with pytest.raises(penstock.StaleReceipt):
            queues.delete(stored)
        again = queues.pull("orders")
        assert again is not None
        assert again.id == pushed.id
        assert queues.delete_many([penstock.ClaimRef("orders", again.receipt)]) == [True]
