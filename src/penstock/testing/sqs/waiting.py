"""Long polls: receives that wait for a message."""

import time
from contextlib import suppress
from threading import Timer

from botocore.exceptions import ClientError

from penstock.testing.sqs.checks import check, expect, require
from penstock.testing.sqs.target import NO_ANSWER, CheckedServer

POLLS = "long polls"


def _sent_meanwhile(target: CheckedServer, url: str, **asked: object) -> tuple[list[str], float]:
    """The bodies that a receive gives which waits while a message is sent, and how long it took."""
    other = target.another_client()

    def send() -> None:
        # If it is refused, the receive has no message, and says so.
        with suppress(ClientError, *NO_ANSWER):
            other.send_message(QueueUrl=url, MessageBody="x")

    timer = Timer(0.5, send)
    timer.start()
    began_s = time.monotonic()
    try:
        bodies = target.bodies(url, **asked)
    finally:
        took_s = time.monotonic() - began_s
        timer.join()
    return bodies, took_s


@check(POLLS, wait_s=0.5)
def a_long_poll_ends_when_a_message_arrives(target: CheckedServer) -> None:
    """ReceiveMessage, WaitTimeSeconds: returns sooner than the time if a message is available."""
    bodies, took_s = _sent_meanwhile(target, target.queue(), WaitTimeSeconds=10)
    expect(bodies, ["x"], "the answer")
    require(took_s < 4, f"the answer came after {took_s:.1f} s, not when the message was sent")


@check(POLLS, wait_s=0.5)
def a_queue_with_a_wait_time_makes_every_receive_a_long_poll(target: CheckedServer) -> None:
    """ReceiveMessageWaitTimeSeconds: for receives without WaitTimeSeconds."""
    url = target.queue(ReceiveMessageWaitTimeSeconds="10")
    bodies, _ = _sent_meanwhile(target, url)
    expect(bodies, ["x"], "the answer")


@check(POLLS)
def a_wait_time_of_zero_replaces_that_of_the_queue(target: CheckedServer) -> None:
    """ReceiveMessage: WaitTimeSeconds takes precedence over the queue's time."""
    url = target.queue(ReceiveMessageWaitTimeSeconds="10")
    began_s = time.monotonic()
    expect(target.receive(url, WaitTimeSeconds=0), [], "the answer")
    took_s = time.monotonic() - began_s
    require(took_s < 5, f"the answer came after {took_s:.1f} s")


@check(POLLS, wait_s=2)
def a_long_poll_without_a_message_ends_with_an_empty_answer(target: CheckedServer) -> None:
    """ReceiveMessage: when the wait time has passed, an empty list, no error."""
    url = target.queue()
    found = target.while_waiting(lambda: target.receive(url, WaitTimeSeconds=2))
    expect(found, [], "the answer")


@check(POLLS, wait_s=1)
def a_long_poll_gets_a_message_whose_delay_ends(target: CheckedServer) -> None:
    """Long polling: a message that becomes available during the wait is given."""
    url = target.queue()
    target.send(url, "late", DelaySeconds=1)
    found = target.while_waiting(lambda: target.bodies(url, WaitTimeSeconds=10))
    expect(found, ["late"], "the answer")


@check(POLLS, wait_s=1)
def a_long_poll_gets_a_message_whose_visibility_timeout_ends(target: CheckedServer) -> None:
    """Long polling: a message that comes back during the wait is given."""
    url = target.queue()
    target.send(url, "again")
    target.receive_one(url, VisibilityTimeout=1)
    found = target.while_waiting(lambda: target.bodies(url, WaitTimeSeconds=10))
    expect(found, ["again"], "the answer")
