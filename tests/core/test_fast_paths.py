"""Row 8: each fast path gives the same events and the same state as the plain path beside it."""

from functools import partial
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from penstock.core import pulling
from penstock.core.events import AnyEvent, Pushed
from penstock.core.receipts import Receipts, Ticket
from penstock.core.shard import ShardState
from penstock.errors import PenstockError
from penstock.service import CreateQueue, Pull, Push
from tests.core.observed import as_bytes

NOW_MS = 1_700_000_000_000
RECEIPTS = Receipts(b"k" * 32)

verbs = st.lists(
    st.tuples(st.sampled_from(["push", "pull", "delete", "wait"]), st.integers(0, 40)),
    min_size=5,
    max_size=60,
)


def outcome(step: Any) -> Any:
    try:
        return step()
    except PenstockError as refused:
        return type(refused), str(refused)


class PlainPaths:
    """The shard by its plain paths: decide, then apply."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.shard = ShardState()
        for event in self.shard.decide_create(CreateQueue("q", settings), NOW_MS):
            self.shard.apply(event)

    def push(self, command: Push, now_ms: int) -> Pushed | int:
        decided = self.shard.decide_push(command, now_ms)
        if not isinstance(decided, int):
            self.shard.apply(decided)
        return decided

    def pull(self, command: Pull, now_ms: int) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        queue = self.shard.names["q"]
        deadline_ms = now_ms + (command.visibility_ms or 0)
        pulling._claim_each(
            self.shard, queue, command, command.limit, now_ms, deadline_ms, events, None, [], False
        )
        return events

    def delete(self, ticket: Ticket, now_ms: int) -> list[AnyEvent]:
        queue = self.shard.names["q"]
        events = self.shard.settle_claim(queue, ticket, now_ms)
        deleted = self.shard.decide_delete("q", ticket, now_ms)
        for event in deleted:
            self.shard.apply(event)
        return events + deleted


class Fast(PlainPaths):
    """The same by the paths that most commands take."""

    def push(self, command: Push, now_ms: int) -> Pushed | int:
        return self.shard.push(command, now_ms)

    def pull(self, command: Pull, now_ms: int) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        self.shard.pull(command, now_ms, events)
        return events

    def delete(self, ticket: Ticket, now_ms: int) -> list[AnyEvent]:
        deleted = self.shard.names["q"].delete_held(ticket, now_ms)
        return super().delete(ticket, now_ms) if deleted is None else [deleted]


@given(verbs, st.sampled_from([{}, {"priority_age_ms": 100}]))
def test_the_fast_paths_of_push_pull_and_delete_do_the_same_as_the_plain_ones(verbs, settings):
    plain, fast = PlainPaths(settings), Fast(settings)
    now_ms = NOW_MS
    for verb, amount in verbs:
        if verb == "push":
            command = Push("q", b"x" * amount, priority=amount % 3, dedup_id=str(amount % 11))
            assert plain.push(command, now_ms) == fast.push(command, now_ms)
        elif verb == "pull":
            pull = Pull("q", 1 + amount % 3, visibility_ms=amount * 10)
            assert plain.pull(pull, now_ms) == fast.pull(pull, now_ms)
        elif verb == "delete":
            ticket = Ticket(1 + (amount == 40), amount % 13, 1 + amount % 2, RECEIPTS)
            expected = outcome(partial(plain.delete, ticket, now_ms))
            assert outcome(partial(fast.delete, ticket, now_ms)) == expected
        else:
            now_ms += amount * 10
            assert plain.shard.settle(now_ms, 2) == fast.shard.settle(now_ms, 2)
        assert as_bytes(plain.shard) == as_bytes(fast.shard)
