"""A pull of more messages than fit into one answer: the client pulls the rest.

A server limits each answer to a pull, so that no client delays the others. If the last answer may
have been limited, and the pull's own limit is not reached, the client pulls again on the same
connection, without waiting. If that fails, the pull returns the claims that it has. A pull with an
attempt id is not repeated: the same id gives the same claims again.
"""

from typing import Final

import msgspec

from penstock.service import Claim, Pull
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
