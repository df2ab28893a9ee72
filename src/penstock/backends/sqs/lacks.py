"""What Amazon SQS cannot do, and what it does less strictly than the contract demands.

docs/how-to/sqs-adapter.md prints both tables; a test compares them.
"""

from collections.abc import Mapping
from typing import Final

_FIFO_ONLY: Final = "SQS has this on FIFO queues only"
_ONLY_BY_PULL: Final = "SQS returns a message only to a receive, which counts as a pull"
_NO_LIMIT: Final = "a queue of SQS has no such limit"
_IN_CLOUDWATCH: Final = "SQS reports this to CloudWatch only"

# Behaviours of the contract, by the names the conformance suite has for them.
LACKS: Final[Mapping[str, str]] = {
    "priority order": "SQS has no priorities; use a queue for each",
    "priority age": "SQS has no priorities; use a queue for each",
    "peek": _ONLY_BY_PULL,
    "peek states": _ONLY_BY_PULL,
    "peek pages": _ONLY_BY_PULL,
    "by id": "SQS chooses which messages a receive or a move task takes",
    "gone already": "SQS gives the same answer, so every delete reports success",
    "ended claims": "on a standard queue the last receipt of a message works until it is pulled "
    "again",
    "stale delete": "a standard queue does not report that an old receipt deleted nothing; a FIFO "
    "queue does",
    "release delay": "SQS delays a message by extending its claim: until then it counts as in "
    "flight, and its receipt still works",
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
    "fifo delay": "a FIFO queue of SQS has one delay for all its messages",
    "dead-letter receives": "SQS does not restart the count of receives in the dead-letter queue",
    "first waiter": "SQS serves waiting receives in no particular order",
    "waiting pulls": "SQS does not report waiting receives",
    "stored bytes": _IN_CLOUDWATCH,
    "oldest age": _IN_CLOUDWATCH,
    "pause": "SQS delivers from every queue; take the right to receive from its consumers instead",
    "history": "SQS keeps no history of its messages",
}

# Behaviours of the adapter that Amazon's own service gives with these restrictions.
WEAKER_AT_AMAZON: Final[Mapping[str, str]] = {
    "arrival order": "best effort on a standard queue, where a message is sometimes delivered "
    "twice; strict on a FIFO queue",
    "head": "on a standard queue a message that is visible again may come after others",
    "fair groups": "Amazon decides by its own measure which group is noisy",
    "dead letters": "a message moves at the receive that would exceed the limit, not when its last "
    "claim ends",
    "redrive": "a message moved by a task has a new id",
    "depth": "approximate, and up to a minute late",
    "queue settings": "a change may take a minute to be seen by all",
    "purge": "takes up to a minute, and can be done once a minute",
    "queue deletion": "takes up to a minute, as does the reuse of the name",
}
