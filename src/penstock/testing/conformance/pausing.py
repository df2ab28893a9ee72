"""The contract on pausing: pulls get nothing from a paused queue, and everything else goes on."""

from penstock.testing.conformance.seam import TIMEOUT_S, Contract, behaviour


class PauseContract(Contract):
    """The delivery of a queue, paused and resumed."""

    @behaviour("pause")
    def test_pulls_get_nothing_from_a_paused_queue_until_it_is_resumed(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b")
        assert self.store.pause(queue).settings.paused
        assert self.store.pull(queue, wait=0) is None
        assert self.store.pull_many(queue, 10, wait=0) == []
        stats = self.store.stats(queue)
        assert (stats.visible, stats.paused) == (2, True)
        assert not self.store.resume(queue).settings.paused
        assert not self.store.stats(queue).paused
        assert self.drain(queue) == ["a", "b"]

    @behaviour("pause")
    def test_pushes_to_a_paused_queue_go_on(self) -> None:
        queue = self.queue()
        self.store.pause(queue)
        self.push_all(queue, "a", "b")
        assert self.store.pull(queue, wait=0) is None
        self.store.resume(queue)
        assert self.drain(queue) == ["a", "b"]

    @behaviour("pause", "release")
    def test_a_claim_made_before_the_pause_goes_on(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b")
        deleted, released = self.claim(queue), self.claim(queue)
        self.store.pause(queue)
        self.store.delete(deleted)
        self.store.release(released)
        assert self.store.pull(queue, wait=0) is None
        self.store.resume(queue)
        assert self.drain(queue) == ["b"]

    @behaviour("pause")
    def test_pausing_twice_and_resuming_twice_changes_nothing_more(self) -> None:
        queue = self.queue()
        assert self.store.pause(queue) == self.store.pause(queue)
        assert self.store.resume(queue) == self.store.resume(queue)

    @behaviour("pause", "long poll")
    def test_a_pull_that_waits_on_a_paused_queue_is_served_when_it_is_resumed(self) -> None:
        queue = self.queue()
        self.store.pause(queue)
        self.push_all(queue, "a")
        pull = self.pulling(queue, wait=self.seconds(1_000))
        self.push_all(queue, "b")
        assert not pull.done()
        self.store.resume(queue)
        claim = pull.result(TIMEOUT_S)
        assert claim is not None
        assert claim.body == b"a"
        assert self.drain(queue) == ["b"]

    @behaviour("pause", "long poll")
    def test_a_wait_on_a_paused_queue_ends_with_nothing(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        self.store.pause(queue)
        pull = self.pulling(queue, wait=self.seconds(5))
        self.pass_time(5)
        assert pull.result(TIMEOUT_S) is None

    @behaviour("pause", "fifo")
    def test_a_paused_fifo_queue_keeps_the_order_of_its_groups(self) -> None:
        queue = self.queue(fifo=True)
        self.push_all(queue, "a", group="g")
        self.store.pause(queue)
        self.push_all(queue, "b", group="g")
        assert self.store.pull_many(queue, 10, wait=0) == []
        self.store.resume(queue)
        assert self.consume(queue) == ["a", "b"]

    @behaviour("pause", "ttl")
    def test_the_time_of_a_message_goes_on_while_its_queue_is_paused(self) -> None:
        queue = self.queue()
        self.push_all(queue, "short", ttl=self.seconds(2))
        self.push_all(queue, "long")
        self.store.pause(queue)
        self.pass_time(3)
        self.store.resume(queue)
        assert self.drain(queue) == ["long"]
