"""The contract on claims: receipts, deadlines, release, and repeated attempts."""

import pytest

from penstock.errors import AttemptLapsed, InFlightLimit, StaleReceipt
from penstock.public import ClaimRef
from penstock.service import Claim
from penstock.testing.conformance.seam import Contract, behaviour


class ClaimContract(Contract):
    """Claims with a deadline, and their receipts."""

    @behaviour("receipts")
    def test_a_deleted_message_never_comes_back(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue, visibility_timeout=self.seconds(5))
        assert self.store.delete(claim) is True
        self.pass_time(6)
        assert self.is_empty(queue)

    @behaviour("receipts", "gone already")
    def test_deleting_twice_returns_false_the_second_time(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b")
        claim = self.claim(queue)
        assert self.store.delete(claim) is True
        assert self.store.delete(claim) is False
        assert self.drain(queue) == ["b"]

    @behaviour("receipts")
    def test_a_receipt_works_without_its_claim(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue)
        assert self.store.delete(ClaimRef(queue, claim.receipt)) is True
        assert self.is_empty(queue)

    @behaviour("timeout", "receipts", "ended claims")
    def test_a_claim_that_ran_out_cannot_delete_extend_or_release(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue, visibility_timeout=self.seconds(5))
        self.pass_time(5)
        self.refuses_all_with(claim)
        assert self.drain(queue) == ["a"]

    @behaviour("timeout", "receipts")
    def test_a_receipt_from_before_a_timeout_changes_nothing_after_the_next_claim(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        old = self.claim(queue, visibility_timeout=self.seconds(5))
        self.pass_time(5)
        new = self.claim(queue)
        assert (new.id, new.epoch, new.receives) == (old.id, old.epoch + 1, 2)
        self.refuses_all_with(old)
        assert self.store.delete(new) is True
        assert self.is_empty(queue)

    @behaviour("release", "receipts")
    def test_a_receipt_from_before_a_release_changes_nothing_after_the_next_claim(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        old = self.claim(queue)
        self.store.release(old)
        new = self.claim(queue)
        assert new.receipt != old.receipt
        self.refuses_all_with(old)
        assert self.store.delete(new) is True

    @behaviour("release", "receipts", "ended claims")
    def test_a_claim_that_was_released_cannot_delete_extend_or_release(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue)
        self.store.release(claim)
        self.refuses_all_with(claim)
        assert self.drain(queue) == ["a"]

    def refuses_all_with(self, claim: Claim) -> None:
        """Tries every verb that takes a receipt."""
        if "stale delete" in self._lacks:
            before = self.seen()
            self.store.delete(claim)
            assert self.seen() == before
        else:
            with self.refused("receipt", StaleReceipt):
                self.store.delete(claim)
        with self.refused("receipt", StaleReceipt):
            self.store.extend(claim, 60)
        with self.refused("receipt", StaleReceipt):
            self.store.release(claim)

    @behaviour("receipts", "release", "stale delete")
    def test_a_delete_is_refused_while_another_claim_holds_the_message(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        old = self.claim(queue)
        self.store.release(old)
        new = self.claim(queue)
        with self.refused("receipt", StaleReceipt):
            self.store.delete(old)
        assert self.store.delete(new) is True

    @behaviour("receipts", "release", "extend")
    def test_extending_or_releasing_a_deleted_message_is_refused(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue)
        self.store.delete(claim)
        with self.refused("receipt", StaleReceipt):
            self.store.extend(claim, 60)
        with self.refused("receipt", StaleReceipt):
            self.store.release(claim)
        assert self.is_empty(queue)

    @behaviour("timeout")
    def test_a_claim_is_valid_until_its_deadline_and_no_longer(self) -> None:
        queue = self.queue(visibility_timeout=self.seconds(10))
        self.push_all(queue, "a")
        claim = self.claim(queue)
        self.pass_time(8)
        assert self.store.pull(queue) is None
        self.pass_time(2)
        again = self.claim(queue)
        assert (again.id, again.receives) == (claim.id, 2)
        assert again.first_pulled_at_ms == claim.first_pulled_at_ms

    @behaviour("timeout")
    def test_a_pull_may_have_a_visibility_of_its_own(self) -> None:
        queue = self.queue(visibility_timeout=self.seconds(100))
        self.push_all(queue, "a", "b")
        self.claim(queue, visibility_timeout=self.seconds(5))
        self.claim(queue)
        self.pass_time(5)
        assert self.drain(queue) == ["a"]

    @behaviour("extend")
    def test_extending_keeps_a_claim_past_its_first_deadline(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue, visibility_timeout=self.seconds(10))
        self.pass_time(6)
        assert self.store.extend(claim, self.seconds(20)) > claim.deadline_ms
        self.pass_time(6)
        assert self.store.pull(queue) is None
        assert self.store.delete(claim) is True

    @behaviour("extend", "timeout")
    def test_an_extended_claim_ends_at_its_new_deadline(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue, visibility_timeout=self.seconds(60))
        self.store.extend(claim, self.seconds(10))
        self.pass_time(8)
        assert self.store.pull(queue) is None
        self.pass_time(2)
        assert self.drain(queue) == ["a"]

    @behaviour("release")
    def test_a_released_message_can_be_pulled_at_once(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        first = self.claim(queue)
        self.store.release(first)
        second = self.claim(queue)
        assert (second.id, second.receives) == (first.id, 2)

    @behaviour("release delay", "head")
    def test_a_message_released_with_a_delay_comes_back_to_its_place_after_it(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b", "c")
        self.store.release(self.claim(queue), delay=self.seconds(10))
        assert self.counts(queue) == (2, 1, 0)
        assert self.claim(queue).body == b"b"
        self.pass_time(10)
        assert self.drain(queue) == ["a", "c"]

    @behaviour("visibility zero")
    def test_a_claim_with_no_visibility_is_over_at_once(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b")
        first = self.store.pull_many(queue, 5, visibility_timeout=0)
        assert [claim.body for claim in first] == [b"a", b"b"]
        assert self.claim(queue).receives == 2

    @behaviour("visibility zero", "ended claims")
    def test_a_claim_with_no_visibility_cannot_delete(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue, visibility_timeout=0)
        with self.refused("receipt", StaleReceipt):
            self.store.delete(claim)
        assert self.drain(queue) == ["a"]

    @behaviour("milliseconds", "timeout")
    def test_a_claim_may_last_for_less_than_a_second(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        self.claim(queue, visibility_timeout=0.25)
        self.pass_time(0.25 / self.seconds(1))
        assert self.drain(queue) == ["a"]

    @behaviour("in-flight limit")
    def test_a_queue_refuses_pulls_beyond_its_in_flight_limit(self) -> None:
        queue = self.queue(max_in_flight=2)
        self.push_all(queue, "a", "b", "c")
        held = self.store.pull_many(queue, 10)
        assert [claim.body for claim in held] == [b"a", b"b"]
        with self.refused("max_in_flight", InFlightLimit):
            self.store.pull(queue)
        self.store.delete(held[0])
        assert self.drain_limited(queue) == [b"c"]

    def drain_limited(self, queue: str) -> list[bytes]:
        """Pulls as many messages as the in-flight limit permits."""
        return [claim.body for claim in self.store.pull_many(queue, 10)]

    @behaviour("attempts")
    def test_a_repeated_attempt_gives_the_same_claims_and_receipts(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b", "c")
        first = self.store.pull_many(queue, 2, attempt_id="attempt-1")
        again = self.store.pull_many(queue, 2, attempt_id="attempt-1")
        assert again == first
        assert [claim.body for claim in again] == [b"a", b"b"]
        assert self.counts(queue) == (1, 0, 2)
        assert [self.store.delete(claim) for claim in again] == [True, True]

    @behaviour("attempts")
    def test_another_attempt_gets_other_messages(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b")
        one = self.store.pull(queue, attempt_id="one")
        two = self.store.pull(queue, attempt_id="two")
        assert one is not None
        assert two is not None
        assert (one.body, two.body) == (b"a", b"b")

    @behaviour("attempts")
    def test_an_attempt_that_found_nothing_may_be_repeated(self) -> None:
        queue = self.queue()
        assert self.store.pull(queue, attempt_id="early") is None
        self.push_all(queue, "a")
        assert self.claim(queue, attempt_id="early").body == b"a"

    @behaviour("attempts", "timeout", "head")
    def test_an_attempt_whose_claims_ran_out_has_lapsed(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b")
        self.store.pull_many(queue, 1, attempt_id="x", visibility_timeout=self.seconds(5))
        self.pass_time(5)
        with self.refused("attempt_id", AttemptLapsed):
            self.store.pull_many(queue, 1, attempt_id="x")
        assert self.drain(queue) == ["a", "b"]

    @behaviour("attempts")
    def test_an_attempt_of_which_one_claim_was_deleted_has_lapsed_as_a_whole(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b", "c")
        held = self.store.pull_many(queue, 2, attempt_id="x")
        self.store.delete(held[0])
        with self.refused("attempt_id", AttemptLapsed):
            self.store.pull_many(queue, 2, attempt_id="x")
        assert self.store.delete(held[1]) is True
        assert self.drain(queue) == ["c"]

    @behaviour("attempts", "extend")
    def test_a_repeated_attempt_shows_the_deadline_that_extending_gave(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        first = self.claim(queue, attempt_id="x", visibility_timeout=self.seconds(10))
        deadline_ms = self.store.extend(first, self.seconds(60))
        again = self.claim(queue, attempt_id="x")
        assert (again.receipt, again.deadline_ms) == (first.receipt, deadline_ms)

    @behaviour("attempts", "release")
    def test_an_attempt_whose_message_has_another_claim_has_lapsed(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        self.store.release(self.claim(queue, attempt_id="x"))
        other = self.claim(queue)
        with pytest.raises(AttemptLapsed):
            self.store.pull(queue, attempt_id="x")
        assert self.store.delete(other) is True
