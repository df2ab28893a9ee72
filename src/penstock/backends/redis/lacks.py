"""What queues in Redis cannot do. docs/how-to/redis.md prints this table; a test compares them."""

from collections.abc import Mapping
from typing import Final

# Behaviours of the contract, by the names the conformance suite has for them.
LACKS: Final[Mapping[str, str]] = {
    "peek pages": "Redis is asked for the first messages only",
    "by id": "a script takes messages from the front only",
    "history": "without ?history=N in the URL, no history of messages is kept",
}
