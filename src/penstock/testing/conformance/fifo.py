"""The contract on FIFO queues: strict order within a group, which a message in flight blocks."""

from penstock.testing.conformance.seam import Contract, behaviour


class FifoContract(Contract):
    """A group is pulled in order, also after releases, timeouts, delays and dead letters."""

    def fill(self, queue: str, *names: str) -> None:
        """Pushes messages named like `a1`: the letter is the group."""
        for name in names:
            self.store.push(queue, name, group=name[0])

    @behaviour("fifo")
    def test_the_messages_of_a_group_are_pulled_in_strict_order(self) -> None:
        queue = self.queue(fifo=True)
        pushed = [f"a{number}" for number in range(12)]
        self.fill(queue, *pushed)
        assert self.consume(queue) == pushed

    @behaviour("fifo")
    def test_a_group_is_blocked_while_one_of_its_messages_is_in_flight(self) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2", "b1")
        held = self.claim(queue)
        assert held.body == b"a1"
        assert self.claim(queue).body == b"b1"
        assert self.store.pull(queue) is None
        self.store.delete(held)
        assert self.claim(queue).body == b"a2"

    @behaviour("fifo")
    def test_one_pull_may_get_several_messages_of_a_group_in_order(self) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2", "b1", "a3")
        held = [claim.body for claim in self.store.pull_many(queue, 10)]
        assert [body for body in held if body.startswith(b"a")] == [b"a1", b"a2", b"a3"]
        assert len(held) == 4

    @behaviour("fifo")
    def test_a_group_stays_blocked_until_the_whole_batch_is_deleted(self) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2", "a3")
        first, second = self.store.pull_many(queue, 2)
        self.store.delete(first)
        assert self.store.pull(queue) is None
        self.store.delete(second)
        assert self.claim(queue).body == b"a3"

    @behaviour("fifo")
    def test_deleting_the_later_message_of_a_batch_does_not_unblock_the_group(self) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2", "a3")
        first, second = self.store.pull_many(queue, 2)
        self.store.delete(second)
        assert self.store.pull(queue) is None
        self.store.release(first)
        assert self.consume(queue) == ["a1", "a3"]

    @behaviour("fifo", "release")
    def test_a_released_message_comes_before_the_rest_of_its_group(self) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2")
        self.store.release(self.claim(queue))
        assert self.consume(queue) == ["a1", "a2"]

    @behaviour("fifo", "release")
    def test_a_released_message_waits_for_those_before_it_that_are_in_flight(self) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2", "a3")
        first, second = self.store.pull_many(queue, 2)
        self.store.release(second)
        assert self.store.pull(queue) is None
        self.store.release(first)
        assert self.consume(queue) == ["a1", "a2", "a3"]

    @behaviour("fifo", "timeout")
    def test_the_messages_of_a_group_are_pulled_in_order_again_after_a_timeout(self) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2", "a3")
        self.store.pull_many(queue, 2, visibility_timeout=self.seconds(10))
        self.pass_time(10)
        assert self.consume(queue) == ["a1", "a2", "a3"]

    @behaviour("fifo", "release delay")
    def test_a_group_waits_for_a_message_released_with_a_delay(self) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2", "b1")
        self.store.release(self.claim(queue), delay=self.seconds(10))
        assert self.consume(queue) == ["b1"]
        self.pass_time(10)
        assert self.consume(queue) == ["a1", "a2"]

    @behaviour("fifo", "release delay")
    def test_a_group_is_served_up_to_a_message_that_was_released_with_a_delay(
        self,
    ) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2")
        first, second = self.store.pull_many(queue, 2)
        self.store.release(second, delay=self.seconds(10))
        assert self.store.pull(queue) is None
        self.store.release(first)
        assert self.consume(queue) == ["a1"]
        self.pass_time(10)
        assert self.consume(queue) == ["a2"]

    @behaviour("fifo", "fifo delay")
    def test_a_group_waits_for_its_delayed_first_message(self) -> None:
        queue = self.queue(fifo=True)
        self.store.push(queue, "a1", group="a", delay=self.seconds(10))
        self.fill(queue, "a2", "b1")
        assert self.consume(queue) == ["b1"]
        self.pass_time(10)
        assert self.consume(queue) == ["a1", "a2"]

    @behaviour("fifo", "ttl")
    def test_a_group_continues_when_its_first_message_expires(self) -> None:
        queue = self.queue(fifo=True)
        self.store.push(queue, "a1", group="a", ttl=self.seconds(5))
        self.fill(queue, "a2")
        self.pass_time(5)
        assert self.consume(queue) == ["a2"]

    @behaviour("fifo")
    def test_many_groups_are_each_in_order_and_none_waits_for_another(self) -> None:
        queue = self.queue(fifo=True)
        pushed = [f"{group}{number}" for number in range(5) for group in "abcde"]
        self.fill(queue, *pushed)
        first = [self.claim(queue) for _ in range(5)]
        assert [claim.body for claim in first] == [b"a0", b"b0", b"c0", b"d0", b"e0"]
        assert self.store.pull(queue) is None
        self.store.delete(first[2])
        assert self.claim(queue).body == b"c1"
        assert self.store.pull(queue) is None

    @behaviour("fifo")
    def test_a_push_without_a_group_is_refused(self) -> None:
        queue = self.queue(fifo=True)
        with self.refused("group"):
            self.store.push(queue, "a")
        assert self.is_empty(queue)

    @behaviour("fifo")
    def test_a_push_with_a_priority_is_refused(self) -> None:
        queue = self.queue(fifo=True)
        with self.refused("priority"):
            self.store.push(queue, "a", group="g", priority=1)
        assert self.is_empty(queue)

    @behaviour("fifo", "fifo dedup")
    def test_a_dedup_id_counts_for_all_groups_of_a_queue(self) -> None:
        queue = self.queue(fifo=True)
        first = self.store.push(queue, "a1", group="a", dedup_id="42").id
        assert self.store.push(queue, "b1", group="b", dedup_id="42").id == first
        self.store.delete(self.claim(queue))
        assert self.store.push(queue, "a1", group="a", dedup_id="42").id == first
        assert self.is_empty(queue)

    @behaviour("fifo", "fifo dedup")
    def test_a_fifo_queue_can_recognise_duplicates_by_their_bodies(self) -> None:
        queue = self.queue(fifo=True, dedup_by_content=True)
        first = self.store.push(queue, "same", group="a").id
        assert self.store.push(queue, "same", group="b").id == first
        self.store.push(queue, "other", group="a")
        assert self.consume(queue) == ["same", "other"]

    @behaviour("fifo", "dedup per group")
    def test_dedup_ids_can_be_kept_apart_by_group(self) -> None:
        queue = self.queue(fifo=True, dedup_per_group=True)
        first = self.store.push(queue, "a1", group="a", dedup_id="42").id
        other = self.store.push(queue, "b1", group="b", dedup_id="42").id
        assert other != first
        assert self.store.push(queue, "a2", group="a", dedup_id="42").id == first
        assert self.consume(queue) == ["a1", "b1"]

    @behaviour("fifo", "dead letters", "release")
    def test_a_group_continues_when_its_first_message_is_dead_lettered(self) -> None:
        dead = self.queue(fifo=True)
        queue = self.queue(fifo=True, dead_letter=dead, max_receives=2)
        self.fill(queue, "a1", "a2")
        for _ in range(2):
            self.store.release(self.claim(queue))
        assert self.consume(queue) == ["a2"]
        assert self.consume(dead) == ["a1"]

    @behaviour("fifo", "fifo attempts")
    def test_a_repeated_attempt_gives_the_same_claims_of_a_blocked_group(self) -> None:
        queue = self.queue(fifo=True)
        self.fill(queue, "a1", "a2", "a3")
        first = self.store.pull_many(queue, 2, attempt_id="x")
        again = self.store.pull_many(queue, 2, attempt_id="x")
        assert [(each.id, each.receipt) for each in again] == [
            (each.id, each.receipt) for each in first
        ]
        assert [claim.body for claim in first] == [b"a1", b"a2"]
        assert self.store.pull(queue) is None
