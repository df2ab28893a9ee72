"""Restores the state of a store from a snapshot and the journal behind it."""

from operator import attrgetter
from pathlib import Path

from penstock.core.events import AnyEvent, QueueCreated
from penstock.core.replay import apply_arrivals_if_new, apply_if_new
from penstock.core.shard import ShardState
from penstock.errors import StoreUnusable
from penstock.journal.codec import decode, plain_arrivals
from penstock.journal.entry import StoredEntry
from penstock.journal.snapshot import Taken, offset_of, read_snapshot, snapshot_paths


def newest_snapshot(store: Path, first_offset: int, end_offset: int) -> Taken | None:
    """The newest whole snapshot; None if the journal is complete. Raises StoreUnusable."""
    for path in snapshot_paths(store):
        if offset_of(path) > end_offset:
            # A snapshot is finished after the journal is durable, so the journal reached that far.
            raise StoreUnusable(
                f"{path}: the journal ends at {end_offset}, before this snapshot begins; "
                "some of its files are missing or damaged"
            )
        taken = read_snapshot(path)
        if taken is not None and first_offset <= taken.outline.offset <= end_offset:
            return taken
    if first_offset:
        raise StoreUnusable(
            f"{store}: no snapshot is whole, and the journal before {first_offset} was dropped; "
            "put a copy of a snapshot back"
        )
    return None


class Recovery:
    """Applies a journal's events to a snapshot, or to an empty state."""

    def __init__(self, taken: Taken | None) -> None:
        self.shard = ShardState() if taken is None else taken.shard
        self.last_ms = 0 if taken is None else taken.outline.at_ms
        self._early = {} if taken is None else taken.early
        self._is_ordered = taken is None or (taken.is_ordered and not taken.early)

    def apply_entry(self, entry: StoredEntry) -> None:
        """Applies the events of the next entry."""
        arrivals = plain_arrivals(entry.data, entry.data_offset)
        if arrivals is not None and apply_arrivals_if_new(self.shard, arrivals):
            self.last_ms = max(self.last_ms, arrivals.deliveries[-1].pushed_at_ms)
            return
        for event, place in decode(entry.data, entry.data_offset, bodies=False):
            self.apply_if_new(event, place)

    def apply_if_new(self, event: AnyEvent, place: int) -> None:
        """Applies the next event; `place` is that of its content, 0 if it has none."""
        if event.at_ms > self.last_ms:
            self.last_ms = event.at_ms
        apply_if_new(self.shard, event, place or None)
        if self._early and isinstance(event, QueueCreated) and event.queue in self._early:
            self.shard.queues[event.queue].restored(self._early.pop(event.queue))

    def finish(self, numbers_lost: int = 0) -> ShardState:
        """The state, with every message at its rank."""
        self.shard.next_number += numbers_lost
        self.shard.departed.sort()
        if not self._is_ordered:
            snapshot = self.shard.snapshot()
            for kept in snapshot.queues:
                kept.deliveries.sort(key=attrgetter("rank"))
            self.shard = ShardState.restore(snapshot)
        return self.shard
