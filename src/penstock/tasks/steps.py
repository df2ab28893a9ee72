"""Sequences of commands as generators, so that each is written once for blocking and awaited use.

A generator yields commands, is sent their replies or thrown their errors, and returns a result:
the `Steps` of `backends.loop`.
"""

from collections.abc import Iterable
from typing import Any, TypeVar, cast

from penstock.backends.loop import Steps
from penstock.errors import (
    InvalidField,
    PenstockError,
    QueueExists,
    QueueNotFound,
    RequestError,
    UnsupportedOperation,
)
from penstock.service import AsyncQueueService, CreateQueue, Push, PushReply, QueueService

R = TypeVar("R")


def run_steps(service: QueueService, steps: Steps[R]) -> R:
    """Executes the commands one after another. Raises what the generator raises."""
    try:
        command = next(steps)
        while True:
            try:
                reply = None if command is None else service.execute(command)
            except PenstockError as error:
                command = steps.throw(error)
            else:
                command = steps.send(reply)
    except StopIteration as stop:
        return cast(R, stop.value)


async def await_steps(service: AsyncQueueService, steps: Steps[R]) -> R:
    """The same, awaited."""
    try:
        command = next(steps)
        while True:
            try:
                reply = None if command is None else await service.execute(command)
            except PenstockError as error:
                command = steps.throw(error)
            else:
                command = steps.send(reply)
    except StopIteration as stop:
        return cast(R, stop.value)


def ensure_queue(queue: str, settings: dict[str, Any]) -> Steps[None]:
    """Creates a queue; one that exists stays as it is."""
    try:
        yield CreateQueue(queue, settings)
    except QueueExists:
        return
    except (InvalidField, UnsupportedOperation):
        # A service with narrower limits, such as the 14 days of Amazon SQS.
        yield CreateQueue(queue)


def push_creating(push: Push, settings: dict[str, Any]) -> Steps[PushReply]:
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
