"""Penstock: a durable message queue with the delivery rules of Amazon SQS, as a Python library.

import penstock

queues = penstock.connect("memory:")
queues.create("orders", visibility_timeout=30)
queues.push("orders", b"hello")
for claim in queues.consume("orders"):
    print(claim.body)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.backends import open_service
from penstock.client import Queues
from penstock.clock import Clock, ManualClock
from penstock.errors import (
    BatchRefused,
    PenstockError,
    QueueFull,
    QueueNotFound,
    RequestError,
    StaleReceipt,
    UnavailableError,
)
from penstock.public import ClaimRef, QueueDescription, QueueStatistics
from penstock.service import Claim, Message, PushReply

if TYPE_CHECKING:
    from penstock.persisted import PersistedQueue
    from penstock.shared import SharedQueue

__all__ = [
    "BatchRefused",
    "Claim",
    "ClaimRef",
    "ManualClock",
    "Message",
    "PenstockError",
    "PersistedQueue",
    "PushReply",
    "QueueDescription",
    "QueueFull",
    "QueueNotFound",
    "QueueStatistics",
    "Queues",
    "RequestError",
    "SharedQueue",
    "StaleReceipt",
    "UnavailableError",
    "connect",
]

__version__ = "0.9.0"


def connect(url: str, *, clock: Clock | None = None) -> Queues:
    """Opens the queues at a URL, such as `memory:`. Raises InvalidField for a URL it cannot read.

    `clock` lets a test run on a `ManualClock`.
    """
    return Queues(open_service(url, clock), clock)


def __getattr__(name: str) -> Any:
    """The two FIFO queues, imported when they are first used: few programs need them."""
    module = {"PersistedQueue": "penstock.persisted", "SharedQueue": "penstock.shared"}.get(name)
    if module is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(module), name)
