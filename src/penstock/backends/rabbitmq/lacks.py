"""Behaviours that RabbitMQ cannot have, and those it has with limits.

docs/how-to/rabbitmq.md prints these tables; a test compares them.
"""

from collections.abc import Mapping
from typing import Final

from penstock.backends.rabbitmq.target import Kind

_NO_DEDUP: Final = (
    "RabbitMQ does not recognise a message that it was sent before; a table of ids beside it would "
    "not be written together with the message, so that a crash between the two loses one of them"
)
_NO_GROUPS: Final = (
    "RabbitMQ has no groups of messages: each would need a queue of its own with a single active "
    "consumer, and AMQP has no pull over several queues; use a queue for each"
)
_SHOWN_BY_DELIVERY: Final = (
    "RabbitMQ shows a message only by delivering it: it would be marked as delivered before, "
    "counted by a quorum queue, and hidden from others meanwhile"
)
_READY_ONLY: Final = "RabbitMQ limits what is ready, and does not count what is in flight"
_NOT_IN_AMQP: Final = "AMQP does not report it; RabbitMQ's management plugin does"
_LATE_LIMIT: Final = (
    "a limit of a quorum queue is set at the broker and kept roughly: it refuses only after it was "
    "exceeded, and accepts again only when a fifth of it is free"
)

# Behaviours of the contract that are missing, by their names in the conformance suite.
COMMON: Final[Mapping[str, str]] = {
    "priority age": "RabbitMQ sorts by priority alone, and does not change a message's priority",
    "fair groups": _NO_GROUPS,
    "peek": _SHOWN_BY_DELIVERY,
    "peek states": _SHOWN_BY_DELIVERY,
    "peek pages": _SHOWN_BY_DELIVERY,
    "by id": "RabbitMQ delivers from the front of a queue only",
    "dead-letter claims": "a message that was moved is a new one for the broker, and its claims "
    "are counted from 1 again",
    "delay place": "a message arrives in its queue when its delay ends, and takes its place then",
    "in-flight limit": "AMQP does not report how many messages of a queue other connections hold",
    "dedup": _NO_DEDUP,
    "dedup window": _NO_DEDUP,
    "dedup by content": _NO_DEDUP,
    "dedup per group": _NO_DEDUP,
    "fifo": _NO_GROUPS,
    "fifo dedup": _NO_DEDUP,
    "fifo attempts": _NO_GROUPS,
    "fifo delay": _NO_GROUPS,
    "capacity in flight": _READY_ONLY,
    "stored bytes": _NOT_IN_AMQP,
    "oldest age": _NOT_IN_AMQP,
    "pause": "RabbitMQ delivers to every consumer; what this process refused, others would get",
    "history": "RabbitMQ does not keep what happened to its messages",
}
QUORUM_ONLY: Final[Mapping[str, str]] = {
    "priority order": "a quorum queue has no priorities; make classic queues, or a queue for each",
    "head": "a quorum queue puts a message that comes back behind those that are ready",
    "capacity by messages": _LATE_LIMIT,
    "capacity by bytes": _LATE_LIMIT,
}
LACKS: Final[Mapping[Kind, Mapping[str, str]]] = {
    "classic": COMMON,
    "quorum": {**COMMON, **QUORUM_ONLY},
}

# Behaviours that the adapter has, with these limits.
WEAKER: Final[Mapping[str, str]] = {
    "receipts": "a claim belongs to the connection that pulled: another process cannot use its "
    "receipt, and if the connection or the process ends, the message is visible at once",
    "late receipts": "of the SQS API: a delete with the receipt of a claim that ran out is done "
    "when the message is delivered to the same connection again; if another one pulls it first, "
    "it comes again",
    "timeout": "kept by the process that pulled; no claim can be held for longer than hold "
    "(1,800 s), because RabbitMQ requeues a message after its consumer_timeout",
    "attempts": "known to the connection that pulled, and to no other",
    "dead letters": "moved by the process that held the message last, or by the next one that "
    "pulls it: published, confirmed, then removed, so that a crash between the two leaves it in "
    "both queues. After a crash a classic queue knows only that a message was pulled before, and "
    "not how often; a quorum queue counts",
    "release delay": "the message stays with the process for the delay, and is visible at once if "
    "that ends; a delay beyond hold is kept by the broker, and the message then comes last",
    "delay": "kept by the broker, to a few milliseconds, and for at most 49 days",
    "ttl": "a message that has ended is counted until it reaches the head of its queue, or until "
    "its delay has ended",
    "retention": "a longer one holds for later pushes only",
    "capacity by messages": "set when the queue is made, and not changed later; a queue with a "
    "limit takes no delays, because a message whose delay ends would be dropped if it is full",
    "capacity by bytes": "the same; the bytes of bodies are counted, without attributes",
    "depth": "in flight are the claims of this connection only; a quorum queue counts returned "
    "messages a moment later",
    "purge": "what other connections hold in flight stays",
    "receipts after a crash of the broker": "a delete is answered when the broker has it; RabbitMQ "
    "does not wait for its disk, so that a message may come back if the broker is killed",
}
