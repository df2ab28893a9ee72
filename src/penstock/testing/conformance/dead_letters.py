"""The contract on dead letters: when a message is moved to the dead-letter queue, and redrive."""

from concurrent.futures import ThreadPoolExecutor

from penstock.errors import RequestError, UnavailableError
from penstock.public import ClaimRef
from penstock.testing.conformance.seam import TIMEOUT_S, Contract, behaviour


class DeadLetterContract(Contract):
    """A message that is pulled too often without a delete leaves the queue, and can be redriven."""

    def queue_and_dead(self, max_receives: int = 1, **settings: object) -> tuple[str, str]:
        """A queue and its dead-letter queue."""
        dead = self.queue()
        return self.queue(dead_letter=dead, max_receives=max_receives, **settings), dead

    def dead_letter_all(self, queue: str, *bodies: str) -> list[str]:
        """Pushes messages and releases each until it is dead-lettered; returns their ids."""
        ids = self.push_all(queue, *bodies)
        for _ in bodies:
            self.store.release(self.claim(queue))
        return ids

    @behaviour("dead letters", "timeout")
    def test_a_message_is_dead_lettered_after_max_receives_claims_that_time_out(self) -> None:
        queue, dead = self.queue_and_dead(3, visibility_timeout=self.seconds(5))
        self.push_all(queue, "a")
        for receives in (1, 2, 3):
            assert self.counts(dead) == (0, 0, 0)
            assert self.claim(queue).receives == receives
            self.pass_time(5)
        assert self.is_empty(queue)
        assert self.drain(dead) == ["a"]

    @behaviour("dead letters", "release")
    def test_a_message_is_dead_lettered_after_max_receives_claims_that_are_released(self) -> None:
        queue, dead = self.queue_and_dead(3)
        self.push_all(queue, "a")
        for receives in (1, 2, 3):
            assert self.counts(dead) == (0, 0, 0)
            claim = self.claim(queue)
            assert claim.receives == receives
            self.store.release(claim)
        assert self.is_empty(queue)
        assert self.drain(dead) == ["a"]

    @behaviour("dead letters", "release delay")
    def test_a_dead_letter_does_not_wait_for_the_delay_of_its_last_release(self) -> None:
        queue, dead = self.queue_and_dead(1)
        self.push_all(queue, "a")
        self.store.release(self.claim(queue), delay=300)
        assert self.is_empty(queue)
        assert self.drain(dead) == ["a"]

    @behaviour("dead letters")
    def test_a_message_deleted_at_its_last_receive_is_not_dead_lettered(self) -> None:
        queue, dead = self.queue_and_dead(1)
        self.push_all(queue, "a")
        assert self.store.delete(self.claim(queue)) is True
        assert self.is_empty(queue)
        assert self.is_empty(dead)

    @behaviour("dead letters", "extend")
    def test_a_last_claim_that_is_extended_stays_valid(self) -> None:
        queue, dead = self.queue_and_dead(1, visibility_timeout=self.seconds(5))
        self.push_all(queue, "a")
        claim = self.claim(queue)
        self.store.extend(claim, self.seconds(20))
        self.pass_time(8)
        assert self.is_empty(dead)
        assert self.store.delete(claim) is True

    @behaviour("dead letters", "dead-letter id")
    def test_a_dead_letter_keeps_its_id_and_content_and_has_its_source(self) -> None:
        queue, dead = self.queue_and_dead(1)
        message_id = self.store.push(queue, "a", attributes={"kind": "test"}).id
        self.store.release(self.claim(queue))
        claim = self.claim(dead)
        assert (claim.id, claim.source) == (message_id, queue)
        assert (claim.body, claim.attributes) == (b"a", {"kind": "test"})

    @behaviour("dead letters", "dead-letter claims")
    def test_the_claims_of_a_dead_letter_are_counted_on_from_those_before_its_move(self) -> None:
        queue, dead = self.queue_and_dead(3)
        self.push_all(queue, "a")
        epochs = []
        for _ in range(3):
            claim = self.claim(queue)
            epochs.append(claim.epoch)
            self.store.release(claim)
        claim = self.claim(dead)
        assert [*epochs, claim.epoch] == [1, 2, 3, 4]
        self.store.release(claim)
        assert self.claim(dead).epoch == 5

    @behaviour("dead letters", "dead-letter id", "peek", "oldest age")
    def test_a_dead_letter_keeps_the_time_of_its_push(self) -> None:
        queue, dead = self.queue_and_dead(1)
        self.push_all(queue, "a")
        (pushed,) = self.store.peek(queue)
        self.pass_time(5)
        self.store.release(self.claim(queue))
        claim = self.claim(dead)
        assert (claim.id, claim.pushed_at_ms) == (pushed.id, pushed.pushed_at_ms)

    @behaviour("dead letters", "dead-letter id", "fifo dedup")
    def test_dead_letters_of_a_fifo_queue_that_had_one_dedup_id_are_both_there(self) -> None:
        dead = self.queue(fifo=True)
        queue = self.queue(fifo=True, dead_letter=dead, max_receives=1)
        other = self.queue(fifo=True, dead_letter=dead, max_receives=1)
        ids = []
        for each in (queue, other):
            ids.append(self.store.push(each, "a", group="g", dedup_id="same").id)
            self.store.release(self.claim(each))
        found = [self.claim(dead)]
        self.store.delete(found[0])
        found.append(self.claim(dead))
        assert [claim.id for claim in found] == ids
        assert [claim.group for claim in found] == ["g", "g"]

    @behaviour("dead letters", "dead-letter receives")
    def test_the_pulls_of_a_dead_letter_are_counted_from_its_move(self) -> None:
        queue, dead = self.queue_and_dead(2)
        self.push_all(queue, "a")
        for _ in range(2):
            self.store.release(self.claim(queue))
        assert self.claim(dead).receives == 1

    @behaviour("dead letters")
    def test_a_receipt_from_before_the_move_changes_nothing_after_it(self) -> None:
        queue, dead = self.queue_and_dead(1)
        self.push_all(queue, "a")
        old = self.claim(queue)
        self.store.release(old)
        with self.refused("receipt"):
            self.store.extend(old, 60)
        with self.refused("receipt"):
            self.store.delete(ClaimRef(dead, old.receipt))
        assert self.store.delete(self.claim(dead)) is True

    @behaviour("dead letters", "dead-letter creation")
    def test_a_dead_letter_queue_that_is_missing_is_created(self) -> None:
        dead = self.name()
        queue = self.queue(dead_letter=dead, max_receives=1)
        assert self.store.describe(dead).queue == dead
        self.push_all(queue, "a")
        self.store.release(self.claim(queue))
        assert self.drain(dead) == ["a"]

    @behaviour("dead letters", "queue settings", "release", "head")
    def test_a_message_over_a_lowered_limit_is_moved_when_a_pull_finds_it(self) -> None:
        queue, dead = self.queue_and_dead(5)
        self.push_all(queue, "a", "b")
        for _ in range(2):
            self.store.release(self.claim(queue))
        self.store.configure(queue, dead_letter=dead, max_receives=2)
        assert self.claim(queue).body == b"b"
        assert self.drain(dead) == ["a"]

    @behaviour("redrive", "dead letters", "dead-letter id")
    def test_redriving_moves_dead_letters_back_to_their_source_queues(self) -> None:
        dead = self.queue()
        one = self.queue(dead_letter=dead, max_receives=1)
        two = self.queue(dead_letter=dead, max_receives=1)
        ids = [*self.dead_letter_all(one, "a", "b"), *self.dead_letter_all(two, "c")]
        assert self.counts(dead) == (3, 0, 0)
        assert self.store.redrive(dead) == 3
        assert self.is_empty(dead)
        back = [*self.store.pull_many(one, 10), *self.store.pull_many(two, 10)]
        assert [(claim.id, claim.receives) for claim in back] == [(each, 1) for each in ids]
        assert [claim.source for claim in back] == [None, None, None]

    @behaviour("redrive", "dead letters")
    def test_the_receives_of_a_redriven_message_are_counted_from_zero(self) -> None:
        queue, dead = self.queue_and_dead(2)
        self.push_all(queue, "a")
        for _ in range(2):
            self.store.release(self.claim(queue))
        self.store.redrive(dead)
        for _ in range(2):
            assert self.is_empty(dead)
            self.store.release(self.claim(queue))
        assert self.drain(dead) == ["a"]

    @behaviour("redrive", "dead letters")
    def test_redriving_can_send_messages_to_a_named_queue(self) -> None:
        queue, dead = self.queue_and_dead(1)
        other = self.queue()
        self.dead_letter_all(queue, "a", "b")
        assert self.store.redrive(dead, to=other) == 2
        assert self.is_empty(queue)
        assert self.drain(other) == ["a", "b"]

    @behaviour("redrive", "dead letters")
    def test_redriving_moves_no_more_than_its_limit_oldest_first(self) -> None:
        queue, dead = self.queue_and_dead(1)
        self.dead_letter_all(queue, "a", "b", "c")
        assert self.store.redrive(dead, limit=2) == 2
        assert self.drain(queue) == ["a", "b"]
        assert self.drain(dead) == ["c"]

    @behaviour("redrive", "dead letters")
    def test_redriving_leaves_messages_in_flight(self) -> None:
        queue, dead = self.queue_and_dead(1)
        self.dead_letter_all(queue, "a", "b")
        held = self.claim(dead)
        assert self.store.redrive(dead) == 1
        assert self.drain(queue) == ["b"]
        assert self.store.delete(held) is True

    @behaviour("redrive")
    def test_redriving_messages_without_a_source_queue_needs_a_target(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b")
        with self.refused("to"):
            self.store.redrive(queue)
        assert self.drain(queue) == ["a", "b"]

    @behaviour("redrive", "dead letters", "queue deletion")
    def test_redriving_leaves_messages_whose_source_queue_was_removed(self) -> None:
        dead = self.queue()
        gone = self.queue(dead_letter=dead, max_receives=1)
        kept = self.queue(dead_letter=dead, max_receives=1)
        self.dead_letter_all(gone, "a")
        self.dead_letter_all(kept, "b")
        self.dead_letter_all(gone, "c")
        self.store.remove(gone)
        assert self.store.redrive(dead) == 1
        assert self.drain(kept) == ["b"]
        assert self.drain(dead) == ["a", "c"]

    @behaviour("redrive", "queue deletion", "threads", "depth")
    def test_redriving_into_a_queue_that_is_deleted_meanwhile_counts_what_was_moved(self) -> None:
        queue, other = self.queue(), self.name()
        self.push_all(queue, *(f"m{number}" for number in range(20)))
        with ThreadPoolExecutor(1) as pool:
            for _ in range(5):
                before = self.store.stats(queue).visible
                self.store.create(other)
                redriving = pool.submit(self.store.redrive, queue, to=other, limit=4)
                self.store.remove(other)
                try:
                    moved = redriving.result(TIMEOUT_S)
                except (RequestError, UnavailableError):
                    # It was deleted first; the redrive may have moved some before. A broker may
                    # close the connection over it: RabbitMQ 3.10 does so for a quorum queue.
                    continue
                assert moved > 0
                assert self.store.stats(queue).visible == before - moved

    @behaviour("redrive")
    def test_redriving_into_the_same_or_an_unknown_queue_is_refused(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        with self.refused("to"):
            self.store.redrive(queue, to=queue)
        with self.refused("queue"):
            self.store.redrive(queue, to="conformance-nowhere")
        with self.refused("queue"):
            self.store.redrive("conformance-nowhere")
        assert self.drain(queue) == ["a"]
