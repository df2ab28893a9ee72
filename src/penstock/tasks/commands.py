"""Sequences of commands to a queue service, as steps (`penstock.steps`)."""

from collections.abc import Generator, Iterable
from typing import Any, TypeVar, cast

from penstock.errors import (
    InvalidField,
    PenstockError,
    QueueExists,
    QueueNotFound,
    RequestError,
    UnsupportedOperation,
)
from penstock.service import Command, CreateQueue, Push, PushReply

R = TypeVar("R")
Commands = Generator[Command[Any], Any, R]


def ensure_queue(queue: str, settings: dict[str, Any]) -> Commands[None]:
    """Creates a queue; one that exists stays as it is."""
    try:
        yield CreateQueue(queue, settings)
    except QueueExists:
        return
    except (InvalidField, UnsupportedOperation):
        # A service with narrower limits, such as the 14 days of Amazon SQS.
        yield CreateQueue(queue)


def push_creating(push: Push, settings: dict[str, Any]) -> Commands[PushReply]:
    """Pushes, and creates the queue first if it does not exist."""
    try:
        return cast(PushReply, (yield push))
    except QueueNotFound:
        yield from ensure_queue(push.queue, settings)
        return cast(PushReply, (yield push))


def raise_unavailable(replies: Iterable[object]) -> None:
    """Raises the error of an item that a service lost its connection before, if there is one.

    A refusal, which is a RequestError, is not raised: it holds however often the item is repeated.
    """
    for reply in replies:
        if isinstance(reply, PenstockError) and not isinstance(reply, RequestError):
            raise reply
