"""`--create-on-use`: a queue is created when a client first uses it.

A send, a receive and the question for a queue's URL try again after they created a queue with
default settings, of the type that its name says. Other actions do not: a delete from a queue that
does not exist is a mistake, and one that names its dead-letter queue is better told so.
"""

from collections.abc import Callable
from typing import Any, Final

from penstock.backends.loop import Single, Steps
from penstock.errors import PenstockError, QueueNotFound
from penstock.server.sqs.lookup import Caller, QueueLookup
from penstock.wire.sqs import model
from penstock.wire.sqs.address import Owner, is_account, is_fifo_name, read_url
from penstock.wire.sqs.errors import QUEUE_DOES_NOT_EXIST, Refusal

GET_URL: Final = "GetQueueUrl"
_BY_URL: Final = ("SendMessage", "SendMessageBatch", "ReceiveMessage")
_Operation = Callable[[Any, Caller], Single | Steps[Any]]
_Create = Callable[[model.CreateQueueRequest, Caller], Steps[Any]]


class FirstUse:
    """Creates the queues of one endpoint when they are first used."""

    def __init__(self, lookup: QueueLookup, create: _Create) -> None:
        self._lookup = lookup
        self._create = create

    def wrap(self, operations: dict[str, _Operation]) -> None:
        """Makes the actions that use a queue create it."""
        operations[GET_URL] = self._creating(operations[GET_URL], _named)
        for name in _BY_URL:
            operations[name] = self._creating(operations[name], _addressed)

    def _creating(
        self, operation: _Operation, name_of: Callable[[Any, Caller], tuple[Owner, str] | None]
    ) -> _Operation:
        def use(asked: Any, caller: Caller) -> Steps[Any]:
            try:
                return (yield from _steps(operation(asked, caller)))
            except QueueNotFound:
                pass
            except Refusal as refusal:
                if refusal.fault is not QUEUE_DOES_NOT_EXIST:
                    raise
            named = name_of(asked, caller)
            if named is not None and caller.may_reach(named[0]):
                owner, name = named
                attributes = {"FifoQueue": "true"} if is_fifo_name(name) else None
                suffix = self._lookup.directory.suffix(owner)
                wanted = model.CreateQueueRequest(queue_name=name, attributes=attributes)
                yield from self._create(wanted, caller._replace(owner=owner, suffix=suffix))
            return (yield from _steps(operation(asked, caller)))

        return use


def _steps(made: Single | Steps[Any]) -> Steps[Any]:
    """An operation that may be a single command, as steps."""
    if type(made) is not tuple:
        return (yield from made)  # type: ignore[misc]
    command, finish, context = made
    try:
        reply = yield command
    except PenstockError as error:
        return finish(context, None, error)
    return finish(context, reply, None)


def _named(asked: model.GetQueueUrlRequest, caller: Caller) -> tuple[Owner, str] | None:
    account = asked.queue_owner_account or caller.owner.account
    if not is_account(account):
        return None
    return caller.owner._replace(account=account), asked.queue_name or ""


def _addressed(asked: Any, caller: Caller) -> tuple[Owner, str] | None:
    address = read_url(asked.queue_url or "")
    if address is None:
        return None
    account, name = address
    return caller.owner._replace(account=account or caller.owner.account), name
