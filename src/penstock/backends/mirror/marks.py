"""Makes the push of a primary's message to the mirror, with the mark that identifies it there.

The mark is the message's number on the primary, stored in its context. Fields that the mirror's
service does not support, such as priorities or dedup ids, are left out.
"""

from collections.abc import Mapping
from typing import Final

from penstock.core.events import Pushed
from penstock.service import Claim, Push

MARK: Final = "mirror"


class MarkedPushes:
    """Makes the pushes of a mirror; `identity` makes its dedup ids differ from other mirrors'."""

    def __init__(self, lacks: Mapping[str, str], identity: str) -> None:
        self.has_fifo = "fifo" not in lacks
        self._has_dedup = "dedup" not in lacks
        self._has_groups = "fair groups" not in lacks
        self._has_priorities = "priority order" not in lacks
        self._identity = identity

    def push(self, name: str, is_fifo: bool, pushed: Pushed, now_ms: int) -> Push:
        """The push of a message, with the rest of the delay that it has on the primary."""
        delay_ms = max(0, pushed.visible_at_ms - now_ms) if pushed.visible_at_ms else 0
        return Push(
            name,
            pushed.body,
            delay_ms or None,
            pushed.priority if self._has_priorities else 0,
            None,
            f"{self._identity}-{pushed.number:x}" if self._has_dedup or is_fifo else None,
            pushed.group if is_fifo or self._has_groups else None,
            pushed.attributes,
            {**(pushed.context or {}), MARK: f"{pushed.number:x}"},
        )

    def move(self, to: str, is_fifo: bool, claim: Claim, rank: int) -> Push:
        """The push of a message on the mirror from one of its queues to another."""
        # With the rank: a message may return to a queue that has seen its first dedup id.
        dedup_id = f"{self._identity}-{(claim.context or {})[MARK]}-{rank:x}"
        return Push(
            to,
            claim.body,
            None,
            claim.priority,
            None,
            dedup_id if self._has_dedup or is_fifo else None,
            claim.group,
            claim.attributes,
            claim.context,
        )


def mark_of(claim: Claim) -> int | None:
    """A message's number on the primary; None if the mirror did not push it."""
    text = (claim.context or {}).get(MARK)
    try:
        return None if text is None else int(text, 16)
    except ValueError:
        return None
