"""Penstock: an SQS-class message queue you can pip install.

import penstock

queues = penstock.connect("memory:")
queues.create("orders", visibility_timeout=30)
queues.push("orders", b"hello")
claim = queues.pull("orders", wait=20)
queues.delete(claim)
"""

from penstock.backends import open_service
from penstock.client import Queues
from penstock.clock import Clock, ManualClock
from penstock.errors import (
    AttemptLapsed,
    InvalidField,
    InvalidReceipt,
    JournalError,
    MessageTooLarge,
    PenstockError,
    ProtocolError,
    QueueFull,
    QueueNotFound,
    RequestError,
    StaleReceipt,
    UnavailableError,
)
from penstock.service import Claim, Message, PushReply, QueueInfo, QueueStats

__all__ = [
    "AttemptLapsed",
    "Claim",
    "InvalidField",
    "InvalidReceipt",
    "JournalError",
    "ManualClock",
    "Message",
    "MessageTooLarge",
    "PenstockError",
    "ProtocolError",
    "PushReply",
    "QueueFull",
    "QueueInfo",
    "QueueNotFound",
    "QueueStats",
    "Queues",
    "RequestError",
    "StaleReceipt",
    "UnavailableError",
    "connect",
]

__version__ = "0.1.0"


def connect(url: str, *, clock: Clock | None = None) -> Queues:
    """Opens the queues at a URL, such as `memory:`. Raises InvalidField for a URL it cannot read.

    `clock` lets a test run on a `ManualClock`.
    """
    return Queues(open_service(url, clock))
