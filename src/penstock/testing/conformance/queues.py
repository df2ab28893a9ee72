"""The contract on queues themselves: create, configure, list, purge, count and remove."""

import pytest

from penstock.errors import InvalidReceipt, QueueExists, QueueNotFound
from penstock.testing.conformance.seam import Contract, behaviour


class QueueContract(Contract):
    """Operations on a queue itself."""

    @behaviour("queue settings")
    def test_creating_a_queue_again_with_the_same_settings_changes_nothing(self) -> None:
        queue = self.queue(visibility_timeout=45)
        self.push_all(queue, "a")
        info = self.store.create(queue, visibility_timeout=45)
        assert info == self.store.describe(queue)
        assert info.settings.visibility_timeout == 45
        assert self.drain(queue) == ["a"]

    @behaviour("queue settings")
    def test_creating_a_queue_again_with_other_settings_is_refused(self) -> None:
        queue = self.queue(visibility_timeout=45)
        with self.refused("visibility", QueueExists):
            self.store.create(queue, visibility_timeout=46)
        assert self.store.describe(queue).settings.visibility_timeout == 45

    @behaviour("queue settings")
    def test_configuring_changes_the_named_settings_and_leaves_the_others(self) -> None:
        queue = self.queue(visibility_timeout=45, retention=4_000)
        info = self.store.configure(queue, visibility_timeout=50)
        assert info == self.store.describe(queue)
        assert (info.settings.visibility_timeout, info.settings.retention) == (50, 4_000)

    @behaviour("queue settings", "timeout")
    def test_a_new_visibility_counts_for_the_claims_made_after_it(self) -> None:
        queue = self.queue(visibility_timeout=600)
        self.push_all(queue, "a", "b")
        self.claim(queue)
        self.store.configure(queue, visibility_timeout=self.seconds(5))
        self.claim(queue)
        self.pass_time(5)
        assert self.drain(queue) == ["b"]

    @behaviour("queue settings", "fifo")
    def test_a_standard_queue_cannot_be_made_fifo_later(self) -> None:
        queue = self.queue()
        with self.refused("fifo"):
            self.store.configure(queue, fifo=True)
        assert self.store.describe(queue).settings.fifo is False

    @behaviour("queue settings")
    def test_annotations_are_stored_unchanged(self) -> None:
        notes = {"owner": "me", "größe": "✓"}
        queue = self.queue(annotations=notes)
        assert self.store.describe(queue).settings.annotations == notes

    @behaviour("queue names")
    def test_names_are_listed_in_order_by_prefix_and_page_by_page(self) -> None:
        prefix = self.name()
        names = [f"{prefix}-{letter}" for letter in "dbca"]
        for name in names:
            self.store.create(name)
            self._made.append(name)
        names.sort()
        assert self.store.list(prefix + "-") == names
        first = self.store.list(prefix + "-", limit=3)
        assert first == names[:3]
        assert self.store.list(prefix + "-", after=first[-1], limit=3) == names[3:]
        assert self.store.list(prefix + "-x") == []

    @behaviour("queue names", "queue deletion")
    def test_a_removed_queue_is_not_listed_and_is_unknown(self) -> None:
        queue = self.queue()
        assert self.store.list(queue) == [queue]
        self.store.remove(queue)
        assert self.store.list(queue) == []
        for use in (self.store.stats, self.store.pull, self.store.remove, self.store.describe):
            with pytest.raises(QueueNotFound, match=queue):
                use(queue)

    @behaviour("queue deletion", "receipts")
    def test_a_queue_created_again_is_empty_and_refuses_old_receipts(self) -> None:
        queue = self.queue()
        self.push_all(queue, "held", "old")
        claim = self.claim(queue)
        self.store.remove(queue)
        with pytest.raises(QueueNotFound):
            self.store.delete(claim)
        self.store.create(queue, visibility_timeout=600)
        assert self.is_empty(queue)
        self.push_all(queue, "new")
        self.claim(queue)
        for use in (self.store.delete, self.store.release, lambda c: self.store.extend(c, 9)):
            with self.refused("receipt", InvalidReceipt):
                use(claim)

    @behaviour("queue deletion", "dedup")
    def test_a_queue_created_again_has_no_old_dedup_ids(self) -> None:
        queue = self.queue()
        self.store.push(queue, "old", dedup_id="42")
        self.store.remove(queue)
        self.store.create(queue)
        self.store.push(queue, "new", dedup_id="42")
        assert self.drain(queue) == ["new"]

    @behaviour("queue deletion", "timeout", "delay", "ttl")
    def test_what_becomes_due_after_a_queue_was_removed_has_no_effect(self) -> None:
        queue, other = self.queue(), self.queue()
        self.push_all(queue, "claimed")
        self.claim(queue, visibility_timeout=self.seconds(3))
        self.store.push(queue, "delayed", delay=self.seconds(3))
        self.store.push(queue, "short", ttl=self.seconds(3))
        assert self.counts(queue) == (1, 1, 1)
        self.store.remove(queue)
        self.store.create(queue, visibility_timeout=600)
        self.pass_time(4)
        self.push_all(other, "of another queue")
        assert self.drain(other) == ["of another queue"]
        assert self.is_empty(queue)

    @behaviour("purge")
    def test_purging_removes_everything_and_counts_it(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b", "c")
        self.claim(queue)
        assert self.store.purge(queue) == 3
        assert self.is_empty(queue)
        self.push_all(queue, "new")
        assert self.drain(queue) == ["new"]

    @behaviour("purge", "gone already")
    def test_deleting_a_purged_message_returns_false(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue)
        self.store.purge(queue)
        assert self.store.delete(claim) is False

    @behaviour("purge", "timeout", "delay", "ttl")
    def test_what_becomes_due_after_a_purge_has_no_effect(self) -> None:
        queue = self.queue()
        self.push_all(queue, "claimed")
        self.claim(queue, visibility_timeout=self.seconds(3))
        self.store.push(queue, "delayed", delay=self.seconds(3))
        self.store.push(queue, "short", ttl=self.seconds(3))
        assert self.counts(queue) == (1, 1, 1)
        assert self.store.purge(queue) == 3
        self.pass_time(4)
        assert self.is_empty(queue)

    @behaviour("purge", "fifo")
    def test_purging_unblocks_the_groups_of_a_fifo_queue(self) -> None:
        queue = self.queue(fifo=True)
        self.push_all(queue, "a1", "a2", group="a")
        self.claim(queue)
        self.store.purge(queue)
        self.push_all(queue, "a3", group="a")
        assert self.drain(queue) == ["a3"]

    @behaviour("purge", "dedup")
    def test_a_dedup_id_is_kept_after_a_purge(self) -> None:
        queue = self.queue()
        first = self.store.push(queue, "a", dedup_id="42").id
        self.store.purge(queue)
        assert self.store.push(queue, "a", dedup_id="42").id == first
        assert self.is_empty(queue)

    @behaviour("depth", "delay")
    def test_stats_count_messages_by_state(self) -> None:
        queue = self.queue()
        assert self.counts(queue) == (0, 0, 0)
        self.push_all(queue, "a", "b", "c")
        self.store.push(queue, "d", delay=300)
        assert self.counts(queue) == (3, 1, 0)
        claims = self.store.pull_many(queue, 2)
        assert self.counts(queue) == (1, 1, 2)
        self.store.delete(claims[0])
        self.store.release(claims[1])
        assert self.counts(queue) == (2, 1, 0)
        assert self.store.stats(queue).messages == 3
        assert self.store.stats(queue).queue == queue

    @behaviour("stored bytes", "attributes")
    def test_stats_count_the_bytes_of_bodies_and_attributes(self) -> None:
        queue = self.queue()
        self.store.push(queue, b"x" * 100)
        self.store.push(queue, b"x" * 10, attributes={"four": "fünf"})
        assert self.store.stats(queue).stored_bytes == 100 + 10 + 4 + 5
        self.store.delete(self.claim(queue))
        assert self.store.stats(queue).stored_bytes == 19
        self.store.purge(queue)
        assert self.store.stats(queue).stored_bytes == 0

    @behaviour("oldest age")
    def test_stats_have_the_age_of_the_oldest_message(self) -> None:
        queue = self.queue()
        assert self.store.stats(queue).oldest_age is None
        self.push_all(queue, "a")
        self.pass_time(5)
        self.push_all(queue, "b")
        age = self.store.stats(queue).oldest_age
        assert age is not None
        assert age >= self.seconds(5)
        self.store.delete(self.claim(queue))
        young = self.store.stats(queue).oldest_age
        assert young is not None
        assert young < age

    @behaviour("history", "release", "arrival order", "dead letters", "dead-letter id")
    def test_history_has_the_events_of_a_message_in_order(self) -> None:
        dead = self.queue()
        queue = self.queue(dead_letter=dead, max_receives=2)
        message_id = self.store.push(queue, "a").id
        self.push_all(queue, "another")
        claim = self.claim(queue, holder="worker-7")
        self.store.extend(claim, 300)
        self.store.release(claim)
        self.store.release(self.claim(queue))
        self.store.delete(self.claim(dead))
        events = self.store.history(message_id)
        assert [(event.kind, event.queue, event.epoch) for event in events] == [
            ("Pushed", queue, None),
            ("Claimed", queue, 1),
            ("Extended", queue, 1),
            ("Released", queue, 1),
            ("Claimed", queue, 2),
            ("Released", queue, 2),
            ("Moved", queue, None),
            ("Claimed", dead, 3),
            ("Deleted", dead, 3),
        ]
        assert "worker-7" in events[1].detail
        assert dead in events[6].detail
        assert [event.at_ms for event in events] == sorted(event.at_ms for event in events)
