"""A caller that is interrupted, at any point, does not leave other callers waiting without end."""

from contextlib import suppress

import penstock
from penstock.errors import JournalError
from tests.interrupts import ends_in_time, interrupted


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
