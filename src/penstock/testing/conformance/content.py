"""The contract on pushed messages: content, duplicates, delay, time to live and capacity."""

from penstock.errors import MessageTooLarge, QueueFull
from penstock.service import Push
from penstock.testing.conformance.seam import Contract, behaviour


class ContentContract(Contract):
    """A message's content, and its state before the first claim."""

    @behaviour("arrival order")
    def test_a_claim_shows_what_was_pushed(self) -> None:
        queue = self.queue()
        body = bytes(range(256))
        message_id = self.store.push(queue, body).id
        claim = self.claim(queue)
        assert (claim.id, claim.queue, claim.body) == (message_id, queue, body)
        assert (claim.receives, claim.epoch, claim.source) == (1, 1, None)

    @behaviour("arrival order")
    def test_a_body_may_be_empty_or_text_of_any_language(self) -> None:
        queue = self.queue()
        self.push_all(queue, "", "naïve 水門 🚰")
        assert self.drain(queue) == ["", "naïve 水門 🚰"]

    @behaviour("attributes")
    def test_text_attributes_come_back_as_they_were_pushed(self) -> None:
        queue = self.queue()
        attributes: dict[str, str | bytes] = {"kind": "test", "länge": "ü", "empty": ""}
        self.store.push(queue, "a", attributes=attributes)
        self.store.push(queue, "b")
        assert self.claim(queue).attributes == attributes
        assert self.claim(queue).attributes == {}

    @behaviour("bytes attributes")
    def test_bytes_attributes_come_back_as_bytes_and_text_as_text(self) -> None:
        queue = self.queue()
        attributes: dict[str, str | bytes] = {"raw": b"\x00\xff", "text": "\x41", "none": b""}
        self.store.push(queue, "a", attributes=attributes)
        assert self.claim(queue).attributes == attributes

    @behaviour("fair groups", "priority order", "dedup")
    def test_priority_group_and_dedup_id_come_back_as_they_were_pushed(self) -> None:
        queue = self.queue()
        self.store.push(queue, "a", priority=7, group="eu", dedup_id="42")
        claim = self.claim(queue)
        assert (claim.priority, claim.group, claim.dedup_id) == (7, "eu", "42")

    @behaviour("arrival order")
    def test_a_body_over_the_limit_is_refused_and_one_at_the_limit_is_not(self) -> None:
        queue = self.queue(max_body_bytes=2_000)
        with self.refused("body", MessageTooLarge):
            self.store.push(queue, b"x" * 2_001)
        self.store.push(queue, b"x" * 2_000)
        assert len(self.claim(queue).body) == 2_000

    @behaviour("attributes")
    def test_attributes_count_towards_the_size_limit(self) -> None:
        queue = self.queue(max_body_bytes=2_000)
        with self.refused("body", MessageTooLarge):
            self.store.push(queue, b"x" * 1_990, attributes={"name": "value", "n": "v"})
        assert self.is_empty(queue)

    @behaviour("dedup")
    def test_the_same_dedup_id_gives_the_first_id_and_enqueues_nothing(self) -> None:
        queue = self.queue()
        first = self.store.push(queue, "one", dedup_id="42").id
        assert self.store.push(queue, "two", dedup_id="42").id == first
        other = self.store.push(queue, "three", dedup_id="43").id
        assert other != first
        assert self.drain(queue) == ["one", "three"]

    @behaviour("dedup", "batches")
    def test_a_push_in_a_batch_says_whether_it_was_a_duplicate(self) -> None:
        queue = self.queue()
        items = [Push(queue, b"x", dedup_id="same"), Push(queue, b"y", dedup_id="same")]
        first, second = self.batch(items)
        assert (first.duplicate, second.duplicate) == (False, True)
        assert first.id == second.id
        assert self.drain(queue) == ["x"]

    @behaviour("dedup")
    def test_a_dedup_id_is_kept_after_its_message_was_deleted(self) -> None:
        queue = self.queue()
        first = self.store.push(queue, "one", dedup_id="42").id
        self.store.delete(self.claim(queue))
        assert self.store.push(queue, "one", dedup_id="42").id == first
        assert self.is_empty(queue)

    @behaviour("dedup")
    def test_a_dedup_id_counts_in_its_own_queue_only(self) -> None:
        one, two = self.queue(), self.queue()
        self.store.push(one, "a", dedup_id="42")
        self.store.push(two, "b", dedup_id="42")
        assert (self.drain(one), self.drain(two)) == (["a"], ["b"])

    @behaviour("dedup window")
    def test_a_dedup_id_holds_for_five_minutes_and_no_longer(self) -> None:
        queue = self.queue()
        first = self.store.push(queue, "one", dedup_id="42").id
        self.pass_time(299 / self.seconds(1))
        assert self.store.push(queue, "two", dedup_id="42").id == first
        self.pass_time(1 / self.seconds(1))
        again = self.store.push(queue, "three", dedup_id="42").id
        assert again != first
        # The window begins again with the new message of this id.
        self.pass_time(299 / self.seconds(1))
        assert self.store.push(queue, "four", dedup_id="42").id == again
        assert self.drain(queue) == ["one", "three"]

    @behaviour("dedup by content")
    def test_a_queue_can_recognise_duplicates_by_their_bodies(self) -> None:
        queue = self.queue(dedup_by_content=True)
        first = self.store.push(queue, "same").id
        assert self.store.push(queue, "same", attributes={"other": "yes"}).id == first
        self.store.push(queue, "different")
        self.store.push(queue, "same", dedup_id="an id counts instead of the body")
        assert self.drain(queue) == ["same", "different", "same"]

    @behaviour("delay")
    def test_a_delayed_message_becomes_visible_when_its_delay_ends(self) -> None:
        queue = self.queue()
        self.store.push(queue, "later", delay=self.seconds(10))
        assert self.counts(queue) == (0, 1, 0)
        self.pass_time(8)
        assert self.store.pull(queue) is None
        self.pass_time(2)
        assert self.drain(queue) == ["later"]

    @behaviour("delay", "delay place")
    def test_a_message_whose_delay_ended_takes_the_place_of_its_arrival(self) -> None:
        queue = self.queue()
        self.store.push(queue, "early but delayed", delay=self.seconds(10))
        self.push_all(queue, "b", "c")
        assert self.claim(queue).body == b"b"
        self.pass_time(10)
        assert self.drain(queue) == ["early but delayed", "c"]

    @behaviour("queue delay", "delay")
    def test_the_delay_of_a_queue_holds_for_pushes_without_a_delay_of_their_own(self) -> None:
        queue = self.queue(delay=self.seconds(10))
        self.store.push(queue, "by the queue")
        self.store.push(queue, "at once", delay=0)
        assert self.drain(queue) == ["at once"]
        self.pass_time(10)
        assert self.drain(queue) == ["by the queue"]

    @behaviour("ttl")
    def test_a_message_is_removed_when_its_time_to_live_ends(self) -> None:
        queue = self.queue()
        self.store.push(queue, "short", ttl=self.seconds(10))
        self.store.push(queue, "long")
        self.pass_time(8)
        assert self.counts(queue) == (2, 0, 0)
        self.pass_time(2)
        assert self.counts(queue) == (1, 0, 0)
        assert self.drain(queue) == ["long"]

    @behaviour("ttl")
    def test_a_message_in_flight_stays_after_its_time_to_live_and_can_be_deleted(self) -> None:
        queue = self.queue()
        self.store.push(queue, "a", ttl=self.seconds(10))
        claim = self.claim(queue)
        self.pass_time(12)
        assert self.counts(queue) == (0, 0, 1)
        assert self.store.delete(claim) is True

    @behaviour("ttl", "release")
    def test_a_message_whose_time_to_live_ended_in_flight_is_removed_with_its_claim(self) -> None:
        queue = self.queue()
        self.push_all(queue, "released", "timed out", ttl=self.seconds(10))
        released = self.claim(queue)
        self.claim(queue, visibility_timeout=self.seconds(14))
        self.pass_time(12)
        self.store.release(released)
        assert self.counts(queue) == (0, 0, 1)
        self.pass_time(2)
        assert self.is_empty(queue)

    @behaviour("ttl", "delay")
    def test_a_delayed_message_expires_if_its_time_to_live_is_shorter_than_its_delay(self) -> None:
        queue = self.queue()
        self.store.push(queue, "a", delay=self.seconds(10), ttl=self.seconds(5))
        self.pass_time(5)
        assert self.counts(queue) == (0, 0, 0)
        self.pass_time(6)
        assert self.is_empty(queue)

    @behaviour("retention")
    def test_a_queue_removes_messages_older_than_its_retention(self) -> None:
        retention = self.retention()
        queue = self.queue(retention=self.seconds(retention))
        self.push_all(queue, "old")
        self.pass_time(retention / 2)
        self.push_all(queue, "young")
        held = self.claim(queue)
        assert held.body == b"old"
        self.pass_time(retention / 2 + 1)
        assert self.counts(queue) == (1, 0, 1)
        assert self.store.delete(held) is True
        self.pass_time(retention / 2)
        assert self.is_empty(queue)

    @behaviour("retention", "ttl")
    def test_a_time_to_live_replaces_the_retention_of_the_queue(self) -> None:
        queue = self.queue(retention=self.seconds(10))
        self.store.push(queue, "by the queue")
        self.store.push(queue, "by itself", ttl=self.seconds(30))
        self.pass_time(11)
        assert self.drain(queue) == ["by itself"]

    @behaviour("retention", "queue settings")
    def test_a_shorter_retention_takes_effect_on_messages_in_the_queue(self) -> None:
        retention = self.retention()
        queue = self.queue(retention=self.seconds(50 * retention))
        self.push_all(queue, "a")
        self.pass_time(retention + 1)
        self.store.configure(queue, retention=self.seconds(retention))
        assert self.is_empty(queue)

    @behaviour("capacity by messages")
    def test_a_full_queue_refuses_and_has_room_again_after_a_delete(self) -> None:
        queue = self.queue(max_messages=2)
        self.push_all(queue, "a", "b")
        with self.refused("messages", QueueFull):
            self.store.push(queue, "c")
        self.store.delete(self.claim(queue))
        self.store.push(queue, "c")
        with self.refused("messages", QueueFull):
            self.store.push(queue, "d")
        assert self.drain(queue) == ["b", "c"]

    @behaviour("capacity by messages", "capacity in flight")
    def test_messages_in_flight_count_in_a_full_queue(self) -> None:
        queue = self.queue(max_messages=2)
        self.push_all(queue, "a", "b")
        claim = self.claim(queue)
        with self.refused("messages", QueueFull):
            self.store.push(queue, "in flight still counts")
        self.store.delete(claim)
        self.store.push(queue, "c")
        assert self.drain(queue) == ["b", "c"]

    @behaviour("capacity by bytes")
    def test_a_queue_full_by_bytes_refuses_and_has_room_again_after_a_delete(self) -> None:
        queue = self.queue(max_bytes=100)
        self.store.push(queue, b"x" * 60)
        with self.refused("bytes", QueueFull):
            self.store.push(queue, b"y" * 41)
        self.store.push(queue, b"z" * 40)
        self.store.delete(self.claim(queue))
        self.store.push(queue, b"y" * 60)
        assert [len(body) for body in self.drain(queue)] == [40, 60]

    @behaviour("capacity by messages", "dedup")
    def test_a_duplicate_is_not_refused_by_a_full_queue(self) -> None:
        queue = self.queue(max_messages=1)
        first = self.store.push(queue, "a", dedup_id="42").id
        assert self.store.push(queue, "a", dedup_id="42").id == first

    @behaviour("capacity by messages", "ttl")
    def test_a_full_queue_has_room_again_when_a_message_expires(self) -> None:
        queue = self.queue(max_messages=1)
        self.store.push(queue, "short", ttl=self.seconds(5))
        self.pass_time(5)
        self.store.push(queue, "next")
        assert self.drain(queue) == ["next"]
