"""A caller that is interrupted, at any point, does not leave other callers waiting without end."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import JournalError
from tests.interrupts import ends_in_time, interrupted
from tests.server.conftest import until

STORES = ("memory:", "memory:?history=9", "file:{path}?embedded=1&durability=os")


def test_an_interrupt_never_leaves_the_engine_locked():
    point = 0
    was_interrupted = True
    while was_interrupted:
        point += 1
        queues = penstock.connect("memory:")
        queues.create("q")
        was_interrupted = interrupted(lambda: queues.push("q", b"x"), point)  # noqa: B023

        def look():
            # An interrupt in the middle of the command has stopped the engine.
            with suppress(JournalError):
                queues.stats("q")  # noqa: B023

        assert ends_in_time(look), f"locked by an interrupt at point {point}"
        assert ends_in_time(queues.close), f"not closed after an interrupt at point {point}"
    assert point > 10


def test_an_interrupt_leaves_a_store_that_can_be_closed_and_holds_what_was_answered(quick_path):
    url = f"file:{quick_path / 'store'}?embedded=1"
    answered = 0
    point = 0
    was_interrupted = True
    while was_interrupted:
        point += 1
        queues = penstock.connect(url)
        queues.create("q")
        queues.push("q", b"answered")
        answered += 1
        was_interrupted = interrupted(lambda: queues.push("q", b"perhaps"), point)  # noqa: B023

        def push():
            with suppress(JournalError):
                queues.push("q", b"perhaps")  # noqa: B023

        assert ends_in_time(push), f"stuck after an interrupt at point {point}"
        assert ends_in_time(queues.close), f"not closed after an interrupt at point {point}"
    assert point > 20
    with penstock.connect(url) as queues:
        bodies = []
        while claims := queues.pull_many("q", 100):
            bodies += [claim.body for claim in claims]
    assert bodies.count(b"answered") == answered


@pytest.fixture
def url(request, quick_path: Path) -> str:
    return str(request.param.replace("{path}", str(quick_path / "store")))


@pytest.mark.parametrize("url", STORES, indirect=True)
@pytest.mark.parametrize("waits", [False, True])
def test_a_pull_that_is_interrupted_leaves_no_claim_and_no_wait_that_nobody_has(url, waits):
    """Row 27: a message that nobody holds would be hidden until its claim ran out."""
    stopped = point = 0
    was_interrupted = True
    while was_interrupted:
        point += 1
        with penstock.connect(url) as queues:
            queues.create("q")
            queues.purge("q")
            if not waits:
                queues.push("q", b"x")
            wait = 0.001 if waits else None
            was_interrupted = interrupted(lambda: queues.pull("q", wait=wait), point)  # noqa: B023
            try:
                assert queues.stats("q").waiting_pulls == 0, f"point {point}"
                queues.push("q", b"x")
            except JournalError:
                # In the middle of a change: the engine has stopped, and says by what.
                with pytest.raises(JournalError, match="was stopped by KeyboardInterrupt"):
                    queues.stats("q")
                stopped += 1
            else:
                held = queues.stats("q").in_flight
                assert held == (not was_interrupted and not waits), f"point {point}"
    assert 0 < stopped < point


def test_an_interrupt_of_one_of_two_pulls_of_an_attempt_leaves_the_claims_to_the_other():
    with penstock.connect("memory:") as queues:
        queues.create("q")
        claims: list[Any] = []

        def pull():
            claims.append(queues.pull("q", wait=20, attempt_id="a"))

        other = threading.Thread(target=pull)
        other.start()
        until(lambda: queues.stats("q").waiting_pulls == 1)
        service: Any = queues.service
        engine = service._engine
        waiter = engine.wait(penstock.service.Pull("q", wait_ms=20_000, attempt_id="a"), str)
        queues.push("q", b"x")
        other.join()
        assert waiter.claims
        engine.cancel_wait(waiter)
        assert queues.delete(claims[0])
