"""A pull of more messages than fit into one answer: the client pulls the rest.

A server limits each answer to a pull, so that no client delays the others. If the last answer may
have been limited, and the pull's own limit is not reached, the client pulls again on the same
connection, without waiting. If that fails, the pull returns the claims that it has. A pull with an
attempt id is not repeated: the same id gives the same claims again.
"""

from functools import partial
from typing import Any, Final

import msgspec

from penstock.backends.remote.retry import ConnectionLost
from penstock.errors import PenstockError
from penstock.service import Claim, Pull
from penstock.steps import Calls
from penstock.wire.frames.frames import PULL_MESSAGES_MAX

# An answer of fewer bytes was not limited, unless the next message is very large.
_LARGE_BYTES: Final = 512 * 1024


def rest_of(pull: Pull, answer: list[Claim], taken: int) -> Pull | None:
    """The pull of the rest, if `taken` messages were pulled; None if this answer was the last."""
    if taken >= pull.limit or pull.attempt_id is not None or pull.bytes_max is not None:
        return None
    is_short = len(answer) < PULL_MESSAGES_MAX
    if is_short and sum(len(claim.body) for claim in answer) < _LARGE_BYTES:
        return None
    return msgspec.structs.replace(pull, limit=pull.limit - taken, wait_ms=0)


def add_rest(channel: Any, pull: Pull, claims: list[Claim]) -> Calls[None]:
    """Adds the claims that did not fit into the first answer."""
    answer = claims
    while (rest := rest_of(pull, answer, len(claims))) is not None:
        try:
            answer = yield partial(channel.exchange, rest)
        except (PenstockError, ConnectionLost):
            return
        claims += answer
