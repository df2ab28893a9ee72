"""Row 26: the blocking face of services written for asyncio, when its callers are interrupted."""

import pytest

from penstock.backends.engine.asynchronous import AsyncEngine
from penstock.backends.engine.engine import Engine
from penstock.backends.portal import Portal
from penstock.service import Claim, CreateQueue, Pull, Push, PushMany, Release, Stats
from tests.interrupts import ends_in_time, interrupted, points
from tests.server.conftest import until

# An interrupt may come before the coroutine of a call is used, or where Python ignores it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


async def opened():
    return AsyncEngine(Engine())


def test_a_caller_that_is_interrupted_does_not_leave_others_waiting():
    portal = Portal(opened)
    portal.execute(CreateQueue("q"))
    tried = 0
    for point in points(lambda: portal.execute(Push("q", b"perhaps"))):
        assert ends_in_time(lambda: portal.execute(Push("q", b"x"))), f"stuck after point {point}"
        tried = point
    assert tried > 10
    assert portal.execute(Stats("q")).visible >= tried
    assert ends_in_time(portal.close)


def test_a_pull_that_is_interrupted_at_any_point_leaves_no_claim_that_nobody_has():
    portal = Portal(opened)
    portal.execute(CreateQueue("q", {"visibility_ms": 3_600_000}))
    portal.execute(PushMany("q", [b"x", b"y"]))
    tried = 0
    claims: list[Claim] = []

    def pull():
        claims[:] = []
        claims[:] = portal.execute(Pull("q", 2))

    for point in points(pull):
        # Python ignored the interrupt, as it does while it frees an object: the caller has them.
        for claim in claims:
            portal.execute(Release("q", claim.proof))
        # Others are released in the loop, which the caller does not wait for.
        until(lambda: portal.execute(Stats("q")).visible == 2)
        tried = point
    assert tried > 10
    # The last pull was not interrupted.
    assert portal.execute(Stats("q")).in_flight == 2
    portal.close()


def test_a_close_that_is_interrupted_can_be_repeated():
    point = 0
    was_interrupted = True
    while was_interrupted:
        point += 1
        portal = Portal(opened)
        was_interrupted = interrupted(portal.close, point)
        assert ends_in_time(portal.close), f"stuck after point {point}"
        assert not portal._thread.is_alive()
    assert point > 10
