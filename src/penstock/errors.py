"""Every error Penstock raises, sorted by what the caller should do next.

    PenstockError
    ├── RequestError      fix the request: unchanged, it will fail again
    ├── UnavailableError  try again later: nothing is wrong with the request
    ├── ProtocolError     drop the connection: the peer sent an invalid frame
    └── JournalError      the engine has stopped: its storage failed or is damaged

A message says what was wrong, where, which limit it broke, and what to do about it.
An operation that raises one of these has changed nothing, with two exceptions: the other items of a
BatchRefused were done, and after BackendLost it is unknown.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final


class PenstockError(Exception):
    """The base class of every error that Penstock raises on purpose."""


class RequestError(PenstockError):
    """The request is wrong; sent again unchanged, it will fail again."""


class InvalidField(RequestError):
    """A field has the wrong type, or a value outside its limits."""


class QueueNotFound(RequestError):
    """No queue has this name."""


class QueueExists(RequestError):
    """A queue of this name exists already, with other settings."""


class QueueInUse(RequestError):
    """The queue is the dead-letter queue of others; removing it needs `force`."""


class QueueDeleted(QueueNotFound):
    """The queue was deleted while this request waited on it."""


class QueueFull(RequestError):
    """The queue holds as many messages or bytes as its settings allow."""


class MessageTooLarge(RequestError):
    """The body and attributes together are larger than the queue accepts."""


class MessageNotFound(RequestError):
    """No message with this id is known here."""


class InvalidReceipt(RequestError):
    """The receipt was not made by this store, or not for this queue."""


class StaleReceipt(InvalidReceipt):
    """The receipt is genuine, but its claim has ended: released, timed out or claimed again."""


class MessageGone(StaleReceipt):
    """The receipt is genuine, but its message no longer exists."""


class AttemptLapsed(RequestError):
    """The pull with this attempt id was answered before, and one of its claims has ended."""


class ClaimTooLong(RequestError):
    """The claim would be held for longer, in all, than the request allows."""


class BatchRefused(RequestError):
    """Some of several items were refused; the others were done.

    `results` has, in the order of the items, the reply of each or the error that refused it.
    """

    def __init__(self, message: str, results: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.results = results

    def __reduce__(self) -> tuple[type["BatchRefused"], tuple[str, Sequence[Any]]]:
        return type(self), (str(self), self.results)


class InFlightLimit(RequestError):
    """The queue has as many messages in flight as its settings allow."""


class UnsupportedOperation(RequestError):
    """This backend cannot do that; its LACKS table says so."""


class MissingExtra(RequestError):
    """The backend needs a package that is not installed; the message names the extra."""


class UnavailableError(PenstockError):
    """The service cannot answer now; the same request may succeed later."""


class EngineClosed(UnavailableError):
    """The engine was closed, before this request or while it waited."""


class BackendLost(UnavailableError):
    """The connection to the backend broke; whether the request took effect is unknown."""


class Overloaded(UnavailableError):
    """The backend has too much to do, or asks for some time to pass; nothing was done."""


class StoreFull(UnavailableError):
    """The store has no room for another push; on a disk here, pulls and deletes go on working."""


class NotOwner(UnavailableError):
    """This process does not own the shard; ask the one that does."""


class AddressInUse(UnavailableError):
    """Another program listens at this address already."""


class StoreInUse(UnavailableError):
    """Another process holds this data directory; the message names it and how to reach it."""


class ProtocolError(PenstockError):
    """The peer sent bytes that are not a valid frame; the connection must be dropped."""


class JournalError(PenstockError):
    """The journal is damaged or cannot be written; the engine that uses it stops."""


class StoreUnusable(JournalError):
    """The data directory cannot be opened: no directory, not writable, locked, another version."""


class CorruptEntry(JournalError):
    """An entry below the durable watermark fails its checksum."""


class Fenced(JournalError):
    """A newer owner writes this journal: the state held here must be discarded."""


_CLASSES: Final = {
    name: kind
    for name, kind in globals().items()
    if isinstance(kind, type) and issubclass(kind, PenstockError)
}


def error_class(names: Iterable[str]) -> type[PenstockError] | None:
    """The class of the first of these names that is an error of this module."""
    return next((_CLASSES[name] for name in names if name in _CLASSES), None)
