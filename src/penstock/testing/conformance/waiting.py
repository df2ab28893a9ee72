"""The contract on waiting: a waiting pull returns as soon as a message becomes visible."""

import pytest

from penstock.errors import QueueDeleted
from penstock.testing.conformance.seam import TIMEOUT_S, Contract, behaviour


class WaitingContract(Contract):
    """Long polling. Tests see by the stats that a pull waits, instead of sleeping."""

    @behaviour("long poll")
    def test_a_pull_does_not_wait_when_a_message_is_there(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        assert self.claim(queue, wait=self.seconds(1_000)).body == b"a"

    @behaviour("long poll")
    def test_a_waiting_pull_wakes_on_a_push(self) -> None:
        queue = self.queue()
        pull = self.pulling(queue, wait=self.seconds(1_000))
        message_id = self.store.push(queue, "a").id
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert claim.id == message_id
        assert self.store.delete(claim) is True

    @behaviour("long poll", "batches")
    def test_a_waiting_pull_of_many_gets_all_messages_of_a_batch(self) -> None:
        queue = self.queue()
        pull = self.in_thread(
            queue, lambda: self.store.pull_many(queue, 10, wait=self.seconds(1_000))
        )
        self.store.push_many(queue, ["a", "b", "c"])
        assert [claim.body for claim in pull.result(TIMEOUT_S)] == [b"a", b"b", b"c"]

    @behaviour("long poll")
    def test_a_wait_that_ends_without_a_message_gives_none(self) -> None:
        queue = self.queue()
        pull = self.pulling(queue, wait=self.seconds(5))
        self.pass_time(5)
        assert pull.result(TIMEOUT_S) is None
        self.push_all(queue, "too late")
        assert self.drain(queue) == ["too late"]

    @behaviour("long poll")
    def test_a_queue_can_make_every_pull_wait(self) -> None:
        queue = self.queue(wait=self.seconds(20))
        pull = self.pulling(queue)
        self.push_all(queue, "a")
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert claim.body == b"a"
        assert self.store.pull(queue, wait=0) is None

    @behaviour("long poll", "waiting pulls")
    def test_stats_count_the_pulls_that_wait(self) -> None:
        queue = self.queue()
        assert self.store.stats(queue).waiting_pulls == 0
        pulls = [self.pulling(queue, wait=self.seconds(1_000)) for _ in range(3)]
        assert self.store.stats(queue).waiting_pulls == 3
        self.push_all(queue, "a", "b", "c")
        for pull in pulls:
            pull.result(TIMEOUT_S)
        assert self.store.stats(queue).waiting_pulls == 0

    @behaviour("long poll due", "delay")
    def test_a_waiting_pull_wakes_when_a_delay_ends(self) -> None:
        queue = self.queue()
        self.store.push(queue, "a", delay=self.seconds(5))
        pull = self.pulling(queue, wait=self.seconds(1_000))
        self.pass_time(5)
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert claim.body == b"a"

    @behaviour("long poll due", "delay")
    def test_a_delayed_message_pushed_during_the_wait_wakes_it_in_time(self) -> None:
        queue = self.queue()
        pull = self.pulling(queue, wait=self.seconds(1_000))
        self.store.push(queue, "a", delay=self.seconds(5))
        self.pass_time(5)
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert claim.body == b"a"

    @behaviour("long poll due", "timeout")
    def test_a_waiting_pull_wakes_when_a_claim_ends(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        held = self.claim(queue, visibility_timeout=self.seconds(5))
        pull = self.pulling(queue, wait=self.seconds(1_000))
        self.pass_time(5)
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert (claim.id, claim.receives) == (held.id, 2)

    @behaviour("long poll due", "timeout")
    def test_a_waiter_gets_the_message_that_the_waiter_before_it_let_time_out(self) -> None:
        queue = self.queue(visibility_timeout=self.seconds(5))
        pulls = [self.pulling(queue, wait=self.seconds(1_000)) for _ in range(2)]
        self.push_all(queue, "a")
        pulls[0].result(TIMEOUT_S)
        self.pass_time(5)
        claim = pulls[1].result(TIMEOUT_S)
        assert claim is not None
        assert (claim.body, claim.receives) == (b"a", 2)

    @behaviour("long poll due", "delay")
    def test_a_waiter_gets_a_delayed_message_after_the_waiter_before_it_was_served(self) -> None:
        queue = self.queue()
        pulls = [self.pulling(queue, wait=self.seconds(1_000)) for _ in range(2)]
        self.store.push(queue, "later", delay=self.seconds(5))
        self.store.push(queue, "now")
        first = pulls[0].result(TIMEOUT_S)
        self.pass_time(5)
        second = pulls[1].result(TIMEOUT_S)
        assert first is not None
        assert second is not None
        assert (first.body, second.body) == (b"now", b"later")

    @behaviour("long poll due", "delay")
    def test_a_waiter_wakes_in_time_after_the_waiters_of_another_queue_were_served(self) -> None:
        busy, idle = self.queue(), self.queue()
        first = self.pulling(busy, wait=self.seconds(1_000))
        second = self.pulling(idle, wait=self.seconds(1_000))
        self.store.push(idle, "later", delay=self.seconds(5))
        self.store.push(busy, "now")
        assert first.result(TIMEOUT_S) is not None
        self.pass_time(5)
        claim = second.result(TIMEOUT_S)
        assert claim is not None
        assert claim.body == b"later"

    @behaviour("long poll due")
    def test_waits_of_different_lengths_each_end_at_their_own_time(self) -> None:
        queue = self.queue()
        long = self.pulling(queue, wait=self.seconds(1_000))
        short = self.pulling(queue, wait=self.seconds(4))
        self.pass_time(4)
        assert short.result(TIMEOUT_S) is None
        assert not long.done()
        self.push_all(queue, "a")
        claim = long.result(TIMEOUT_S)
        assert claim is not None
        assert claim.body == b"a"

    @behaviour("long poll", "release")
    def test_a_waiting_pull_wakes_on_a_release(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        held = self.claim(queue)
        pull = self.pulling(queue, wait=self.seconds(1_000))
        self.store.release(held)
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert (claim.id, claim.receives) == (held.id, 2)

    @behaviour("long poll", "fifo")
    def test_a_waiting_pull_wakes_when_a_group_is_unblocked(self) -> None:
        queue = self.queue(fifo=True)
        self.push_all(queue, "a1", "a2", group="a")
        held = self.claim(queue)
        pull = self.pulling(queue, wait=self.seconds(1_000))
        self.store.delete(held)
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert claim.body == b"a2"

    @behaviour("long poll", "dead letters", "release", "dead-letter id")
    def test_a_pull_waiting_on_a_dead_letter_queue_wakes_when_a_message_is_moved(self) -> None:
        dead = self.queue()
        queue = self.queue(dead_letter=dead, max_receives=1)
        message_id = self.store.push(queue, "a").id
        pull = self.pulling(dead, wait=self.seconds(1_000))
        self.store.release(self.claim(queue))
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert claim.body == b"a"
        pull = self.pulling(queue, wait=self.seconds(1_000))
        self.store.release(claim)
        self.store.redrive(dead)
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert (claim.id, claim.queue) == (message_id, queue)

    @behaviour("first waiter")
    def test_the_pull_that_waited_first_is_served_first(self) -> None:
        queue = self.queue()
        pulls = [self.pulling(queue, wait=self.seconds(1_000)) for _ in range(4)]
        served = []
        for number, pull in enumerate(pulls):
            self.store.push(queue, f"m{number}")
            claim = pull.result(TIMEOUT_S)
            assert claim is not None
            served.append(claim.body.decode())
        assert served == ["m0", "m1", "m2", "m3"]

    @behaviour("first waiter", "long poll")
    def test_a_wait_that_timed_out_does_not_block_those_behind_it(self) -> None:
        queue = self.queue()
        early = self.pulling(queue, wait=self.seconds(4))
        late = self.pulling(queue, wait=self.seconds(1_000))
        self.pass_time(4)
        assert early.result(TIMEOUT_S) is None
        self.push_all(queue, "a")
        claim = late.result(TIMEOUT_S)
        assert claim is not None
        assert claim.body == b"a"

    @behaviour("first waiter", "batches")
    def test_a_batch_serves_several_waiters_in_their_order(self) -> None:
        queue = self.queue()
        pulls = [self.pulling(queue, wait=self.seconds(1_000)) for _ in range(3)]
        self.store.push_many(queue, ["a", "b", "c"])
        claims = [pull.result(TIMEOUT_S) for pull in pulls]
        assert [claim and claim.body for claim in claims] == [b"a", b"b", b"c"]

    @behaviour("long poll", "attempts")
    def test_a_waiting_pull_may_be_an_attempt_and_be_repeated(self) -> None:
        queue = self.queue()
        pull = self.pulling(queue, wait=self.seconds(1_000), attempt_id="x")
        self.push_all(queue, "a")
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert self.store.pull(queue, attempt_id="x") == claim

    @behaviour("queue deletion", "long poll")
    def test_deleting_a_queue_fails_its_waiters_and_no_others(self) -> None:
        removed, other = self.queue(), self.queue()
        pulls = [self.pulling(removed, wait=self.seconds(1_000)) for _ in range(2)]
        unaffected = self.pulling(other, wait=self.seconds(1_000))
        self.store.remove(removed)
        for pull in pulls:
            with pytest.raises(QueueDeleted, match=removed):
                pull.result(TIMEOUT_S)
        assert not unaffected.done()
        self.push_all(other, "a")
        assert unaffected.result(TIMEOUT_S) is not None
