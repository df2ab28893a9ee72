"""The checks of the audit, by name; their queries are the files below `spark/sql/audit`.

The journal gives each event its place at the moment it took effect; the checks rely on that order
and on nothing else. What they need to know of queues follows from the few events that name no
message:

    queue_events ─▶ queue_changes ─▶ queue_rules ─▶ periods

A message's checks look at its events one by one, unless its life is plain, as most are:

    messages ─▶ regular_lives ─┬─▶ life_events ─▶ states ─▶ message_findings
    irregular_events ──────────┘        └─▶ part_balances
    pushes with dedup ids ─▶ dedup_findings      claims in FIFO queues ─▶ order_findings

What each queue was given and lost adds up to the checks of whole journals:

    balances, queue_events ─▶ stores, replaced_terms ─▶ balance_, term_ and gap_findings

Where entries are missing in the middle of a journal, other findings may follow from that alone.
"""

from typing import Final, NamedTuple

CHECKS: Final = {
    "pushed first": "a message is pushed before anything else happens to it",
    "pushed once": "a message's number is never used again",
    "nothing after the end": "a message that was deleted, expired or purged stays gone",
    "one holder": "at most one claim of a message lives at any instant",
    "claim of the visible": "only a visible message is claimed",
    "epochs rise": "each claim of a message has the next epoch",
    "current claim only": "delete, extend and release need the current claim's epoch; an "
    "extension may take up the last one again after it ran out",
    "expiry of the current claim": "only the current claim runs out",
    "expiry after the deadline": "a claim runs out no earlier than its deadline",
    "delay in full": "a delayed message becomes visible no earlier than it was to",
    "expired when due": "a message expires after its TTL, and never while it is claimed",
    "move of the visible": "only a visible message moves to another queue",
    "arrival of the departed": "only a message that departed for another shard arrives there",
    "dead letter after N": "a message is dead-lettered after exactly max_receives claims",
    "one message per dedup id": "a dedup id makes one message within its window",
    "order in the group": "a FIFO queue gives the messages of a group in their order",
    "nothing lost": "what came into a queue left it, or is in it",
    "terms rise": "no entry comes from an owner of the shard that was replaced",
    "no gaps": "every entry is there and whole",
}


class CheckFinding(NamedTuple):
    """One place where a check does not hold, by numbers."""

    check: str
    store: str
    shard: int
    message: int | None
    queue: int | None
    sequence: int
    at_ms: int | None
    detail: str
