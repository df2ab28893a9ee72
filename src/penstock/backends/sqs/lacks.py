"""What Amazon SQS cannot do, and what it does less exactly than the contract says.

docs/sqs-adapter.md prints both tables; a test compares them.
"""

from collections.abc import Mapping
from typing import Final

_FIFO_ONLY: Final = "SQS knows this on FIFO queues only"
_SHOWN_BY_LENDING: Final = "SQS shows a message only by lending it, which counts as a pull"
_NO_LIMIT: Final = "a queue of SQS takes as much as it is given"
_METERED: Final = "SQS tells this to CloudWatch, and not to the queue's users"

# Behaviours of the contract, by the names the conformance suite has for them.
LACKS: Final[Mapping[str, str]] = {
    "priority order": "SQS has no priorities; use a queue for each",
    "peek": _SHOWN_BY_LENDING,
    "peek states": _SHOWN_BY_LENDING,
    "gone already": "SQS answers alike, so that every delete says that it deleted",
    "ended claims": "on a standard queue the last receipt of a message works until it is pulled "
    "again",
    "stale delete": "a standard queue does not say that an old receipt deleted nothing; FIFO does",
    "release delay": "SQS holds a message back by letting its claim go on: until then it counts as "
    "in flight, and its receipt still works",
    "in-flight limit": "it is 120,000 messages for every queue of SQS",
    "attempts": _FIFO_ONLY,
    "dedup": _FIFO_ONLY,
    "dedup window": _FIFO_ONLY,
    "dedup by content": _FIFO_ONLY,
    "ttl": "SQS has a retention for a queue, and none for a message",
    "milliseconds": "SQS counts in whole seconds; fractions are rounded up",
    "capacity by messages": _NO_LIMIT,
    "capacity by bytes": _NO_LIMIT,
    "capacity in flight": _NO_LIMIT,
    "fifo delay": "a FIFO queue of SQS delays all its messages alike",
    "dead-letter receives": "SQS goes on counting from the queue that the message came from",
    "first waiter": "SQS serves those who wait in no particular order",
    "waiting pulls": "SQS does not tell who waits",
    "stored bytes": _METERED,
    "oldest age": _METERED,
    "history": "SQS does not keep what happened to its messages",
}

# Behaviours that the adapter has, and Amazon's own service gives with these reservations.
WEAKER_AT_AMAZON: Final[Mapping[str, str]] = {
    "arrival order": "on a standard queue as best it can, and now and then a message comes twice; "
    "a FIFO queue keeps it strictly",
    "head": "on a standard queue a message that comes back may come after others",
    "fair groups": "by Amazon's own measure of which group is noisy",
    "dead letters": "a message moves when it would be pulled once too often, not when its last "
    "claim ends",
    "redrive": "a message moved by a task has a new id",
    "depth": "approximate, and up to a minute late",
    "queue settings": "a change may take a minute to be seen by all",
    "purge": "takes up to a minute, and can be done once a minute",
    "queue deletion": "takes up to a minute, as does the reuse of the name",
}
