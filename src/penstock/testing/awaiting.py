"""What a test asserts of messages, for any test framework, about the place that it has entered.

    with penstock.testing.server() as account:
        ship(order)
        await_message("parcels", {"order": 7})
        advance(hours=12)
        assert_delivered_once("parcels")

Each takes `at`, a place that was entered or not; without it, it is the one that was entered last.
An assertion that fails says what happened to each message of the queue.
"""

from datetime import timedelta
from typing import Final

from penstock.server.testing.observed import Match, SeenMessage
from penstock.testing.places import QueuePlace, places

TIMEOUT_S: Final = 5.0
_STATES: Final = {
    "pushed": "pushed to",
    "delivered": "delivered from",
    "deleted": "deleted from",
    "dead": "dead-lettered from",
}


def place_of(at: QueuePlace | None) -> QueuePlace:
    """The place that is meant. Raises RuntimeError if none was entered."""
    if at is not None:
        return at
    if not places:
        raise RuntimeError(
            "no queues are in use: use a fixture such as penstock_server, or "
            "`with penstock.testing.server():`, or say where: at=…"
        )
    return places[-1]


def advance(
    *,
    days: float = 0,
    hours: float = 0,
    minutes: float = 0,
    seconds: float = 0,
    at: QueuePlace | None = None,
) -> None:
    """Moves the clock forward, and returns when all that is due has been done."""
    place_of(at).advance(timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds))


def await_message(
    queue: str,
    match: Match = None,
    *,
    until: str = "pushed",
    timeout: float = TIMEOUT_S,
    at: QueuePlace | None = None,
) -> SeenMessage:
    """The first message of a queue that matches, as soon as there is one; gone ones count.

    `match` is a whole body, a part of a JSON body, or a function of the message. `until` is
    pushed, delivered, deleted or dead. Raises AssertionError after `timeout` seconds of real time.
    """
    __tracebackhide__ = True
    place = place_of(at)
    found = place.find(queue, match, until, 1, timeout)
    if not found:
        what = "message" if match is None else f"message that matches {match!r}"
        _fail(place, queue, f"no {what} was {_STATES.get(until, until)} {queue}")
    return found[0]


def expect_none(
    queue: str, match: Match = None, *, within: float = 0.0, at: QueuePlace | None = None
) -> None:
    """Raises AssertionError if such a message was pushed, or is so `within` real seconds."""
    __tracebackhide__ = True
    place = place_of(at)
    found = place.find(queue, match, "pushed", 1, within)
    if found:
        _fail(place, queue, f"{len(found)} messages were pushed to {queue}, and none was expected")


def assert_delivered_once(queue: str, match: Match = None, *, at: QueuePlace | None = None) -> None:
    """Raises AssertionError unless there are such messages, and each was delivered exactly once."""
    __tracebackhide__ = True
    place = place_of(at)
    found = place.find(queue, match, "pushed", 1, 0)
    if not found:
        _fail(place, queue, f"no such message was ever in {queue}")
    wrong = [each for each in found if each.deliveries != 1]
    if wrong:
        times = ", ".join(str(each.deliveries) for each in wrong)
        _fail(
            place,
            queue,
            f"{len(wrong)} of {len(found)} messages of {queue} were not delivered once, but "
            f"{times} times",
        )


def wait_until_empty(
    queue: str, *, timeout: float = TIMEOUT_S, at: QueuePlace | None = None
) -> None:
    """Returns once the queue holds no message: none visible, delayed or in flight.

    Raises AssertionError after `timeout` seconds of real time.
    """
    __tracebackhide__ = True
    place = place_of(at)
    if not place.wait_until_empty(queue, timeout):
        _fail(place, queue, f"{queue} is not empty after {timeout:g} s")


def stories(*, at: QueuePlace | None = None) -> str:
    """What happened to every message, as text for people."""
    return story_text(place_of(at).stories())


def story_text(told: dict[str, list[str]]) -> str:
    """The stories of queues as text."""
    return "\n".join(
        line
        for queue, lines in told.items()
        for line in (f"{queue}:", *(f"  {each}" for each in lines or ["no message"]))
    )


def _fail(place: QueuePlace, queue: str, text: str) -> None:
    # The line of a test that pytest shows is its own.
    __tracebackhide__ = True
    told = place.stories().get(queue)
    if told is None:
        raise AssertionError(f"{text}; there is no queue {queue}")
    raise AssertionError(f"{text}\n{story_text({queue: told})}")
