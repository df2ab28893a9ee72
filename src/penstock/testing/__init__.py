"""Tests of programs that use queues: time that is moved, faults by seed, messages that are awaited.

    server()                 an account on a server for tests, for the time of a `with`
    in_process()             queues in this process, likewise
    advance(hours=12)        moves the clock
    await_message(queue, …)  waits for a message, and returns it
    reproduce(slice, work)   gives a consumer what a queue gave it in an incident
    chaos(seeds=200)         runs a test once for each seed, with the faults of that seed

The functions are about the server or the queues in use: those of the fixture or `with` that was
entered last. The fixtures of pytest are in `pytest_penstock`. The suites that every backend passes
are here, too: `conformance`, and `simulation` for clusters.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.testing.awaiting import (
        advance,
        assert_delivered_once,
        await_message,
        expect_none,
        stories,
        wait_until_empty,
    )
    from penstock.testing.incidents import reproduce
    from penstock.testing.places import TestAccount, TestQueues, in_process, server
    from penstock.testing.runs import ChaosRun, chaos

_MODULES = {
    "advance": "awaiting",
    "assert_delivered_once": "awaiting",
    "await_message": "awaiting",
    "expect_none": "awaiting",
    "stories": "awaiting",
    "wait_until_empty": "awaiting",
    "TestAccount": "places",
    "TestQueues": "places",
    "in_process": "places",
    "server": "places",
    "ChaosRun": "runs",
    "chaos": "runs",
    "reproduce": "incidents",
}
__all__ = [
    "ChaosRun",
    "TestAccount",
    "TestQueues",
    "advance",
    "assert_delivered_once",
    "await_message",
    "chaos",
    "expect_none",
    "in_process",
    "reproduce",
    "server",
    "stories",
    "wait_until_empty",
]


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: each test needs few of them."""
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock.testing' has no attribute {name!r}")
    return getattr(import_module(f"penstock.testing.{_MODULES[name]}"), name)
