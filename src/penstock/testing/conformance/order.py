"""The contract on order: arrival, priority, the head, fair groups, and peek."""

from penstock.errors import InvalidField
from penstock.public import ClaimRef
from penstock.service import Delete, PeekFrom, PeekIds, PullIds, RedriveIds, ReturnIds
from penstock.testing.conformance.seam import Contract, behaviour


class OrderContract(Contract):
    """Which message is pulled next."""

    @behaviour("arrival order")
    def test_messages_are_pulled_in_the_order_they_were_pushed(self) -> None:
        queue = self.queue()
        pushed = [f"m{number}" for number in range(25)]
        self.push_all(queue, *pushed)
        assert self.drain(queue) == pushed

    @behaviour("arrival order")
    def test_one_pull_of_many_gets_them_in_order_and_no_more_than_its_limit(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b", "c", "d")
        assert [claim.body for claim in self.store.pull_many(queue, 3)] == [b"a", b"b", b"c"]
        assert [claim.body for claim in self.store.pull_many(queue, 3)] == [b"d"]
        assert self.store.pull_many(queue, 3) == []

    @behaviour("arrival order")
    def test_a_message_in_flight_is_not_pulled_again(self) -> None:
        queue = self.queue()
        self.push_all(queue, "only")
        self.claim(queue)
        assert self.store.pull(queue) is None

    @behaviour("priority order")
    def test_a_higher_priority_is_pulled_first_and_equal_ones_keep_their_order(self) -> None:
        queue = self.queue()
        for body, priority in [("low", 0), ("mid1", 5), ("top", 9), ("mid2", 5), ("low2", 0)]:
            self.store.push(queue, body, priority=priority)
        assert self.drain(queue) == ["top", "mid1", "mid2", "low", "low2"]

    @behaviour("priority order", "head")
    def test_a_released_message_is_pulled_after_one_of_higher_priority(self) -> None:
        queue = self.queue()
        self.store.push(queue, "low", priority=1)
        claim = self.claim(queue)
        self.store.push(queue, "high", priority=2)
        self.store.release(claim)
        assert self.drain(queue) == ["high", "low"]

    @behaviour("priority order", "priority age")
    def test_a_message_of_the_priority_age_is_pulled_before_younger_ones(self) -> None:
        queue = self.queue(priority_age=self.seconds(10))
        self.store.push(queue, "low", priority=0)
        self.pass_time(5)
        self.store.push(queue, "high", priority=9)
        assert self.claim(queue).body == b"high"
        self.pass_time(5)
        self.store.push(queue, "higher", priority=9)
        assert self.drain(queue) == ["low", "higher"]

    @behaviour("priority order", "priority age")
    def test_messages_of_the_priority_age_are_pulled_in_the_order_of_arrival(self) -> None:
        queue = self.queue(priority_age=self.seconds(5))
        for body, priority in [("a", 0), ("b", 9), ("c", 0), ("d", 4), ("e", 9)]:
            self.store.push(queue, body, priority=priority)
        self.pass_time(5)
        for body, priority in [("young", 0), ("urgent", 9)]:
            self.store.push(queue, body, priority=priority)
        first = [claim.body for claim in self.store.pull_many(queue, 4)]
        assert first == [b"a", b"b", b"c", b"d"]
        assert self.drain(queue) == ["e", "urgent", "young"]

    @behaviour("priority order", "priority age")
    def test_without_a_priority_age_an_old_message_waits_for_higher_priorities(self) -> None:
        queue = self.queue(priority_age=self.seconds(5))
        self.store.configure(queue, priority_age=None)
        self.store.push(queue, "low", priority=0)
        self.pass_time(10)
        self.push_all(queue, "high1", "high2", priority=9)
        assert self.claim(queue).body == b"high1"
        # It counts from now on, for messages that arrived before it was set, too.
        self.store.configure(queue, priority_age=self.seconds(5))
        assert self.drain(queue) == ["low", "high2"]

    @behaviour("priority order", "priority age", "head", "release")
    def test_a_returned_message_has_the_age_since_its_arrival(self) -> None:
        queue = self.queue(priority_age=self.seconds(10))
        self.store.push(queue, "low", priority=0)
        held = self.claim(queue)
        self.pass_time(10)
        self.push_all(queue, "high", priority=9)
        self.store.release(held)
        assert self.drain(queue) == ["low", "high"]

    @behaviour("priority order", "priority age", "delay")
    def test_a_delayed_message_of_the_priority_age_is_pulled_when_it_is_due_and_not_before(
        self,
    ) -> None:
        queue = self.queue(priority_age=self.seconds(5))
        self.store.push(queue, "later", priority=0, delay=self.seconds(10))
        self.pass_time(5)
        self.push_all(queue, "high1", "high2", priority=9)
        assert self.claim(queue).body == b"high1"
        self.pass_time(5)
        assert self.drain(queue) == ["later", "high2"]

    @behaviour("priority order", "priority age", "fair groups")
    def test_a_noisy_group_waits_for_the_others_of_its_priority_at_any_age(self) -> None:
        queue = self.queue(priority_age=self.seconds(5))
        self.push_all(queue, *(f"noisy{number}" for number in range(42)), group="noisy")
        held = [claim for _ in range(4) for claim in self.store.pull_many(queue, 10)]
        assert len(held) == 40
        self.store.push(queue, "quiet", group="quiet")
        self.pass_time(5)
        self.store.push(queue, "high", priority=9)
        assert self.drain(queue) == ["quiet", "noisy40", "noisy41", "high"]

    @behaviour("priority order", "priority age")
    def test_a_flood_of_a_high_priority_starves_a_low_one_only_without_a_priority_age(self) -> None:
        strict, aged = self.queue(), self.queue(priority_age=self.seconds(5))
        pulled: dict[str, list[bytes]] = {strict: [], aged: []}
        for queue in pulled:
            self.store.push(queue, "low", priority=0)
        # Three arrive in each second, and two can be consumed.
        for _ in range(6):
            for queue, found in pulled.items():
                self.push_all(queue, "high1", "high2", "high3", priority=9)
                for claim in self.store.pull_many(queue, 2):
                    self.store.delete(claim)
                    found.append(claim.body)
            self.pass_time(1)
        assert b"low" not in pulled[strict]
        assert pulled[aged].count(b"low") == 1

    @behaviour("bad input", "priority age", "fifo")
    def test_a_fifo_queue_is_refused_a_priority_age(self) -> None:
        queue = self.queue(fifo=True)
        with self.refused("priority_age", InvalidField):
            self.store.configure(queue, priority_age=5)
        with self.refused("priority_age", InvalidField):
            self.store.create(self.name(fifo=True), fifo=True, priority_age=5)

    @behaviour("head", "timeout")
    def test_timed_out_messages_return_to_their_places_at_the_head(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b", "c", "d")
        self.store.pull_many(queue, 3, visibility_timeout=self.seconds(10))
        self.push_all(queue, "e")
        self.pass_time(10)
        assert self.drain(queue) == ["a", "b", "c", "d", "e"]

    @behaviour("head", "timeout")
    def test_messages_whose_claims_end_in_another_order_still_keep_their_places(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b", "c")
        for visibility in (15, 10, 5):
            self.claim(queue, visibility_timeout=self.seconds(visibility))
        self.pass_time(15)
        assert self.drain(queue) == ["a", "b", "c"]

    @behaviour("head", "release")
    def test_messages_released_in_any_order_return_to_their_places(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b", "c", "d", "e")
        claims = self.store.pull_many(queue, 4)
        for place in (2, 0, 3):
            self.store.release(claims[place])
        assert self.drain(queue) == ["a", "c", "d", "e"]

    @behaviour("head", "release")
    def test_a_message_released_many_times_keeps_its_place(self) -> None:
        queue = self.queue()
        self.push_all(queue, "first", "second")
        for receives in range(1, 6):
            claim = self.claim(queue)
            assert (claim.body, claim.receives) == (b"first", receives)
            self.store.release(claim)
        assert self.drain(queue) == ["first", "second"]

    @behaviour("fair groups")
    def test_a_noisy_group_does_not_starve_a_quiet_one(self) -> None:
        queue = self.queue()
        for number in range(60):
            self.store.push(queue, f"noisy{number}", group="noisy")
        held = [claim for _ in range(4) for claim in self.store.pull_many(queue, 10)]
        assert len(held) == 40
        self.store.push(queue, "quiet", group="quiet")
        # Twenty messages of the noisy group come before it, but that group has all the claims.
        assert self.claim(queue).body == b"quiet"
        assert self.claim(queue).body == b"noisy40"

    @behaviour("fair groups")
    def test_a_noisy_group_is_served_when_no_other_group_has_messages(self) -> None:
        queue = self.queue()
        pushed = [f"n{number}" for number in range(50)]
        self.push_all(queue, *pushed, group="noisy")
        assert self.drain(queue) == pushed

    @behaviour("fair groups")
    def test_groups_that_are_not_noisy_are_served_in_the_order_of_arrival(self) -> None:
        queue = self.queue()
        for number in range(12):
            self.store.push(queue, f"m{number}", group=f"g{number % 3}" if number % 4 else None)
        assert self.drain(queue) == [f"m{number}" for number in range(12)]

    @behaviour("fair groups")
    def test_a_group_is_quiet_again_once_its_claims_are_over(self) -> None:
        queue = self.queue()
        self.push_all(queue, *(f"noisy{number}" for number in range(41)), group="noisy")
        held = [claim for _ in range(4) for claim in self.store.pull_many(queue, 10)]
        self.store.push(queue, "quiet", group="quiet")
        for claim in held:
            self.store.delete(claim)
        assert self.drain(queue) == ["noisy40", "quiet"]

    @behaviour("peek")
    def test_peeking_shows_messages_in_order_and_claims_none(self) -> None:
        queue = self.queue()
        ids = self.push_all(queue, "a", "b", "c")
        shown = self.store.peek(queue, 2)
        assert [(message.id, message.body) for message in shown] == [(ids[0], b"a"), (ids[1], b"b")]
        assert [message.receives for message in shown] == [0, 0]
        assert self.counts(queue) == (3, 0, 0)
        assert self.drain(queue) == ["a", "b", "c"]

    @behaviour("peek", "priority order", "head")
    def test_peeking_shows_messages_in_the_order_of_pulls(self) -> None:
        queue = self.queue()
        for body, priority in [("a", 0), ("b", 3), ("c", 0), ("d", 3)]:
            self.store.push(queue, body, priority=priority)
        first = self.claim(queue)
        self.claim(queue)
        self.store.release(first)
        assert [message.body for message in self.store.peek(queue, 10)] == [b"b", b"a", b"c"]

    @behaviour("peek pages")
    def test_a_queue_is_read_page_by_page_and_by_id(self) -> None:
        queue = self.queue()
        ids = self.push_all(queue, *map(str, range(7)))
        execute = self.store._execute
        pages: list[list[bytes]] = []
        after = 0
        while page := execute(PeekFrom(queue, after, 3)):
            pages.append([message.body for message in page])
            after = page[-1].sequence
        assert pages == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6"]]
        self.claim(queue)
        assert [message.id for message in execute(PeekFrom(queue, 0, 3, "in_flight"))] == ids[:1]
        found = execute(PeekIds(queue, [ids[6], ids[0], "no id of a message"]))
        assert [message.body for message in found] == [b"6", b"0"]

    @behaviour("by id")
    def test_messages_are_claimed_by_their_ids_whatever_their_place(self) -> None:
        queue = self.queue()
        ids = self.push_all(queue, *map(str, range(6)))
        execute = self.store._execute
        wanted = [ids[4], ids[2], ids[4], "no id of a message"]
        claims = execute(PullIds(queue, wanted, None, "somebody"))
        assert [(claim.body, claim.receives) for claim in claims] == [(b"4", 1), (b"2", 1)]
        assert execute(PullIds(queue, ids[2:3])) == []
        execute(Delete(queue, claims[0].receipt))
        self.store.release(ClaimRef(queue, claims[1].receipt))
        assert [claim.body for claim in self.store.pull_many(queue, 10)] == [
            b"0",
            b"1",
            b"2",
            b"3",
            b"5",
        ]

    @behaviour("by id", "fifo")
    def test_of_a_fifo_group_only_the_next_message_is_claimed_by_its_id(self) -> None:
        queue = self.queue(fifo=True)
        ids = [self.store.push(queue, str(n), group="g", dedup_id=str(n)).id for n in range(3)]
        execute = self.store._execute
        assert execute(PullIds(queue, ids[1:])) == []
        assert [claim.id for claim in execute(PullIds(queue, ids))] == ids[:1]

    @behaviour("by id")
    def test_messages_are_returned_by_their_ids_whoever_holds_them(self) -> None:
        queue = self.queue()
        ids = self.push_all(queue, "a", "b")
        later = self.store.push(queue, "c", delay=300).id
        claim = self.claim(queue)
        execute = self.store._execute
        assert execute(ReturnIds(queue, [*ids, later])) == 2
        with self.refused("receipt"):
            self.store.delete(claim)
        assert [claim.body for claim in self.store.pull_many(queue, 9)] == [b"a", b"b", b"c"]

    @behaviour("by id", "dead letters")
    def test_dead_letters_are_moved_by_their_ids(self) -> None:
        dead = self.queue()
        queue = self.queue(dead_letter=dead, max_receives=1)
        ids = self.push_all(queue, "a", "b", "c")
        for claim in self.store.pull_many(queue, 3):
            self.store.release(claim)
        execute = self.store._execute
        assert execute(RedriveIds(dead, ids[1:2])) == 1
        assert execute(RedriveIds(dead, ids[2:], queue)) == 1
        assert execute(RedriveIds(dead, ids[1:])) == 0
        assert [message.body for message in self.store.peek(queue, 9)] == [b"b", b"c"]
        assert [message.body for message in self.store.peek(dead, 9)] == [b"a"]

    @behaviour("peek", "peek states", "delay")
    def test_peeking_can_show_what_is_delayed_and_what_is_in_flight(self) -> None:
        queue = self.queue()
        self.push_all(queue, "claimed", "visible")
        self.store.push(queue, "later", delay=300)
        self.claim(queue)
        shown = {
            "visible": [message.body for message in self.store.peek(queue, 10)],
            "delayed": [m.body for m in self.store.peek(queue, 10, state="delayed")],
            "in_flight": [m.body for m in self.store.peek(queue, 10, state="in_flight")],
        }
        assert shown == {"visible": [b"visible"], "delayed": [b"later"], "in_flight": [b"claimed"]}
