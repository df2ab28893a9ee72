"""A pull of more messages than one answer of a server holds: the client asks for the rest.

A server bounds each answer to a pull, so that no client holds up the others. What was asked for may
be more. The client repeats the pull on the same connection, without waiting, for as long as the
last answer may have been cut and the limit is not reached. An error then ends the pull with what it
has: those claims are made. A pull with an attempt id is not repeated: the same id gives the same
claims again.
"""

from typing import Final

import msgspec

from penstock.service import Claim, Pull
from penstock.wire.frames.frames import PULL_MESSAGES_MAX

# An answer of fewer bytes was not cut, unless the next message is very large.
_LARGE_BYTES: Final = 512 * 1024


def rest_of(pull: Pull, answer: list[Claim], taken: int) -> Pull | None:
    """The pull that asks for the rest, of which so many were taken; None if this answer was all."""
    if taken >= pull.limit or pull.attempt_id is not None or pull.bytes_max is not None:
        return None
    is_short = len(answer) < PULL_MESSAGES_MAX
    if is_short and sum(len(claim.body) for claim in answer) < _LARGE_BYTES:
        return None
    return msgspec.structs.replace(pull, limit=pull.limit - taken, wait_ms=0)
