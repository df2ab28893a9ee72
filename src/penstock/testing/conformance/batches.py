"""The contract on batches: each item succeeds or fails by itself and has its own result."""

from typing import Any

import pytest

from penstock.errors import (
    BatchRefused,
    InvalidField,
    InvalidReceipt,
    MessageTooLarge,
    QueueFull,
    QueueNotFound,
    StaleReceipt,
)
from penstock.service import Delete, Extend, Push, PushReply, Release
from penstock.testing.conformance.seam import Contract, behaviour, refused_of


class BatchContract(Contract):
    """Several commands at once."""

    @behaviour("batches")
    def test_pushing_many_gives_an_id_for_each_and_keeps_their_order(self) -> None:
        queue = self.queue()
        replies = self.store.push_many(queue, ["a", b"b", "c"], attributes={"kind": "test"})
        assert all(isinstance(reply, PushReply) for reply in replies)
        claims = self.store.pull_many(queue, 10)
        assert [claim.body for claim in claims] == [b"a", b"b", b"c"]
        assert [claim.id for claim in claims] == [reply.id for reply in replies]
        assert [claim.attributes for claim in claims] == [{"kind": "test"}] * 3

    @behaviour("batches")
    def test_an_item_that_is_refused_does_not_affect_the_others(self) -> None:
        queue = self.queue(max_body_bytes=2_000)
        replies = refused_of(self.store.push_many, queue, [b"a", b"x" * 2_001, b"c"])
        assert isinstance(replies[1], MessageTooLarge)
        assert [type(reply) for reply in (replies[0], replies[2])] == [PushReply, PushReply]
        assert self.drain(queue) == ["a", "c"]

    @behaviour("batches")
    def test_refused_items_raise_an_error_with_the_result_of_each(self) -> None:
        queue = self.queue(max_body_bytes=2_000)
        with pytest.raises(BatchRefused, match=r"1 of 3 items .* item 1: body") as caught:
            self.store.push_many(queue, [b"a", b"x" * 2_001, b"c"])
        kinds = [type(result) for result in caught.value.results]
        assert kinds == [PushReply, MessageTooLarge, PushReply]
        assert self.drain(queue) == ["a", "c"]

    @behaviour("batches", "dedup")
    def test_each_item_of_many_may_have_options_of_its_own(self) -> None:
        queue = self.queue()
        first = {"body": "a", "attributes": {"n": "1"}, "dedup_id": "x"}
        items: list[Any] = [first, "b", {"body": b"again", "dedup_id": "x"}]
        replies = self.store.push_many(queue, items, attributes={"n": "0"})
        assert [reply.duplicate for reply in replies] == [False, False, True]
        assert replies[2].id == replies[0].id
        claims = self.store.pull_many(queue, 10)
        found = sorted((claim.body, claim.attributes["n"]) for claim in claims)
        assert found == [(b"a", "1"), (b"b", "0")]

    @behaviour("batches", "capacity by messages")
    def test_a_batch_fills_a_queue_to_its_limit_and_not_beyond(self) -> None:
        queue = self.queue(max_messages=2)
        replies = refused_of(self.store.push_many, queue, ["a", "b", "c", "d"])
        kinds = [type(reply) for reply in replies]
        assert kinds == [PushReply, PushReply, QueueFull, QueueFull]
        assert self.drain(queue) == ["a", "b"]

    @behaviour("batches", "receipts", "release", "gone already", "ended claims")
    def test_deleting_many_returns_the_result_of_each(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a", "b", "c", "d")
        claims = self.store.pull_many(queue, 4)
        self.store.delete(claims[1])
        self.store.release(claims[2])
        replies = refused_of(self.store.delete_many, claims)
        assert [replies[0], replies[1], replies[3]] == [True, False, True]
        assert isinstance(replies[2], StaleReceipt)
        assert self.drain(queue) == ["c"]

    @behaviour("batches", "receipts", "extend", "release")
    def test_a_batch_may_mix_verbs_and_queues_and_each_item_has_its_own_result(self) -> None:
        one, two = self.queue(), self.queue()
        self.push_all(one, "a", "b", "c")
        first, second, third = self.store.pull_many(one, 3)
        replies = self.batch(
            [
                Push(two, b"x"),
                Delete(one, first.receipt),
                Extend(one, second.receipt, 300_000),
                Release(one, third.receipt),
                Delete(two, second.receipt),
                Push("conformance-nowhere", b"x"),
                Push(two, b"x", priority=99),
            ]
        )
        assert isinstance(replies[0], PushReply)
        assert replies[1] is True
        assert replies[2] < second.deadline_ms
        assert replies[3] is None
        assert isinstance(replies[4], InvalidReceipt)
        assert isinstance(replies[5], QueueNotFound)
        assert isinstance(replies[6], InvalidField)
        assert (self.drain(one), self.drain(two)) == (["c"], ["x"])
        assert self.counts(one) == (0, 0, 2)

    @behaviour("batches", "receipts", "gone already")
    def test_the_same_receipt_twice_in_a_batch_deletes_once(self) -> None:
        queue = self.queue()
        self.push_all(queue, "a")
        claim = self.claim(queue)
        assert self.store.delete_many([claim, claim]) == [True, False]

    @behaviour("batches")
    def test_an_empty_batch_gives_no_results(self) -> None:
        queue = self.queue()
        assert self.store.push_many(queue, []) == []
        assert self.is_empty(queue)
