"""Penstock: a durable message queue with the delivery rules of Amazon SQS, as a Python library.

import penstock

queues = penstock.connect("memory:")
queues.create("orders", visibility_timeout=30)
queues.push("orders", b"hello")
for claim in queues.consume("orders"):
    print(claim.body)
"""

from penstock.backends import open_service
from penstock.client import Queues
from penstock.clock import Clock, ManualClock
from penstock.errors import (
    AddressInUse,
    AttemptLapsed,
    BackendLost,
    BatchRefused,
    EngineClosed,
    InFlightLimit,
    InvalidField,
    InvalidReceipt,
    JournalError,
    MessageGone,
    MessageNotFound,
    MessageTooLarge,
    MissingExtra,
    Overloaded,
    PenstockError,
    ProtocolError,
    QueueDeleted,
    QueueExists,
    QueueFull,
    QueueInUse,
    QueueNotFound,
    RequestError,
    StaleReceipt,
    StoreFull,
    StoreInUse,
    StoreUnusable,
    UnavailableError,
    UnsupportedOperation,
)
from penstock.service import Claim, Message, PushReply, QueueInfo, QueueStats

__all__ = [
    "AddressInUse",
    "AttemptLapsed",
    "BackendLost",
    "BatchRefused",
    "Claim",
    "EngineClosed",
    "InFlightLimit",
    "InvalidField",
    "InvalidReceipt",
    "JournalError",
    "ManualClock",
    "Message",
    "MessageGone",
    "MessageNotFound",
    "MessageTooLarge",
    "MissingExtra",
    "Overloaded",
    "PenstockError",
    "ProtocolError",
    "PushReply",
    "QueueDeleted",
    "QueueExists",
    "QueueFull",
    "QueueInUse",
    "QueueInfo",
    "QueueNotFound",
    "QueueStats",
    "Queues",
    "RequestError",
    "StaleReceipt",
    "StoreFull",
    "StoreInUse",
    "StoreUnusable",
    "UnavailableError",
    "UnsupportedOperation",
    "connect",
]

__version__ = "0.1.0"


def connect(url: str, *, clock: Clock | None = None) -> Queues:
    """Opens the queues at a URL, such as `memory:`. Raises InvalidField for a URL it cannot read.

    `clock` lets a test run on a `ManualClock`.
    """
    return Queues(open_service(url, clock), clock)
