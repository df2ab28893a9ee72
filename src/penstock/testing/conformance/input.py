"""The contract on bad input: a typed error that names the field, and no change of state."""

import math
from collections.abc import Callable
from typing import Any, Final

import pytest

from penstock.errors import (
    InvalidField,
    InvalidReceipt,
    MessageNotFound,
    MessageTooLarge,
    QueueNotFound,
    RequestError,
)
from penstock.public import ClaimRef
from penstock.service import Claim
from penstock.testing.conformance.seam import Contract, behaviour, refused_of

BAD_NAMES: Final[list[Any]] = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "a\\b",
    "nul\x00",
    "new\nline",
    "trailing\n",
    " ",
    "%2e%2e",
    "größe",
    "水門",
    "x" * 81,
    "x" * 10_000,
    "x@",
    None,
    7,
    True,
    b"bytes",
    ["list"],
    {"a": 1},
    ("t",),
    1.5,
]
# Values that every field for a number of seconds refuses, whatever its limits.
BAD_SECONDS: Final[list[Any]] = [
    -1,
    -0.001,
    10**12,
    1e300,
    10**400,
    math.nan,
    math.inf,
    -math.inf,
    True,
    "5",
    b"5",
    [5],
    {},
]
BAD_NUMBERS: Final[list[Any]] = [-1, 2**63, 10**400, 1.0, 0.5, True, False, math.nan, "3", [3]]
BAD_IDS: Final[list[Any]] = ["", "x" * 129, "nul\x00", "new\nline", "\ud800", 7, b"b", True, ["a"]]
# The fields of each verb that take a number of seconds; the error names them like this.
SECONDS: Final[dict[str, Callable[[Contract, str, Claim, Any], object]]] = {
    "push delay": lambda c, q, _, bad: c.store.push(q, "x", delay=bad),
    "push ttl": lambda c, q, _, bad: c.store.push(q, "x", ttl=bad),
    "pull wait": lambda c, q, _, bad: c.store.pull(q, wait=bad),
    "pull visibility": lambda c, q, _, bad: c.store.pull(q, visibility_timeout=bad),
    "release delay": lambda c, q, claim, bad: c.store.release(claim, delay=bad),
    "create visibility": lambda c, q, _, bad: c.store.create(c.absent(), visibility_timeout=bad),
    "create delay": lambda c, q, _, bad: c.store.create(c.absent(), delay=bad),
    "create wait": lambda c, q, _, bad: c.store.create(c.absent(), wait=bad),
    "create retention": lambda c, q, _, bad: c.store.create(c.absent(), retention=bad),
    "configure visibility": lambda c, q, _, bad: c.store.configure(q, visibility_timeout=bad),
}
NUMBERS: Final[dict[str, Callable[[Contract, str, Claim, Any], object]]] = {
    "push priority": lambda c, q, _, bad: c.store.push(q, "x", priority=bad),
    "pull limit": lambda c, q, _, bad: c.store.pull_many(q, bad),
    "peek limit": lambda c, q, _, bad: c.store.peek(q, bad),
    "list limit": lambda c, q, _, bad: c.store.list(limit=bad),
    "create messages": lambda c, q, _, bad: c.store.create(c.absent(), max_messages=bad),
    "create bytes": lambda c, q, _, bad: c.store.create(c.absent(), max_bytes=bad),
    "create in_flight": lambda c, q, _, bad: c.store.create(c.absent(), max_in_flight=bad),
    "create body": lambda c, q, _, bad: c.store.create(c.absent(), max_body_bytes=bad),
    "create receives": lambda c, q, _, bad: c.store.create(
        c.absent(), max_receives=bad, dead_letter="y"
    ),
}
IDS: Final[dict[str, Callable[[Contract, str, Claim, Any], object]]] = {
    "push dedup_id": lambda c, q, _, bad: c.store.push(q, "x", dedup_id=bad),
    "push group": lambda c, q, _, bad: c.store.push(q, "x", group=bad),
    "pull attempt_id": lambda c, q, _, bad: c.store.pull(q, attempt_id=bad),
    "pull holder": lambda c, q, _, bad: c.store.pull(q, holder=bad),
}


class InputContract(Contract):
    """Bad input of any kind raises a RequestError, or the reply is correct."""

    def stocked(self) -> tuple[str, Claim]:
        """A queue with two visible messages and one in flight, and the claim of the latter."""
        queue = self.queue()
        self.push_all(queue, "held", "waiting", "more")
        return queue, self.claim(queue)

    @behaviour("bad input")
    @pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:20])
    def test_a_bad_queue_name_is_refused_by_every_verb(self, name: Any) -> None:
        queue, claim = self.stocked()
        queues = self.store
        uses: list[Callable[[], object]] = [
            lambda: queues.create(name),
            lambda: queues.configure(name, visibility_timeout=5),
            lambda: queues.remove(name),
            lambda: queues.describe(name),
            lambda: queues.push(name, "x"),
            lambda: queues.pull(name),
            lambda: queues.delete(ClaimRef(name, claim.receipt)),
            lambda: queues.extend(ClaimRef(name, claim.receipt), 5),
            lambda: queues.release(ClaimRef(name, claim.receipt)),
            lambda: queues.peek(name),
            lambda: queues.stats(name),
            lambda: queues.purge(name),
            lambda: queues.redrive(name),
        ]
        if name is not None:  # None is valid there: no dead-letter queue, and the source queues
            uses.append(lambda: queues.create(self.name(), dead_letter=name, max_receives=2))
            uses.append(lambda: queues.redrive(queue, to=name))
        before = self.seen()
        for use in uses:
            with pytest.raises(InvalidField, match=r"queue|dead_letter|to"):
                use()
        assert self.seen() == before

    @behaviour("bad input")
    def test_every_verb_refuses_a_queue_that_does_not_exist(self) -> None:
        queue, claim = self.stocked()
        queues = self.store
        uses: list[Callable[[str], object]] = [
            lambda name: queues.configure(name, visibility_timeout=5),
            queues.remove,
            queues.describe,
            lambda name: queues.push(name, "x"),
            queues.pull,
            queues.pull_many,
            lambda name: queues.delete(ClaimRef(name, claim.receipt)),
            lambda name: queues.extend(ClaimRef(name, claim.receipt), 5),
            lambda name: queues.release(ClaimRef(name, claim.receipt)),
            queues.peek,
            queues.stats,
            queues.purge,
            queues.redrive,
            lambda name: queues.redrive(queue, to=name),
        ]
        for use in uses:
            with self.refused("conformance-nowhere", QueueNotFound):
                use("conformance-nowhere")

    @behaviour("bad input")
    @pytest.mark.parametrize("field", SECONDS)
    def test_a_bad_number_of_seconds_is_refused(self, field: str) -> None:
        queue, claim = self.stocked()
        for bad in BAD_SECONDS:
            with self.refused(field.split()[1], InvalidField):
                SECONDS[field](self, queue, claim, bad)

    @behaviour("bad input")
    def test_a_bad_number_of_seconds_for_extend_is_refused(self) -> None:
        _, claim = self.stocked()
        for bad in [*BAD_SECONDS, 0, None]:
            with self.refused("duration|visibility", InvalidField):
                self.store.extend(claim, bad)
        assert self.store.delete(claim) is True

    @behaviour("bad input")
    @pytest.mark.parametrize("field", NUMBERS)
    def test_a_bad_whole_number_is_refused(self, field: str) -> None:
        queue, claim = self.stocked()
        for bad in BAD_NUMBERS:
            with self.refused(field.split()[1], InvalidField):
                NUMBERS[field](self, queue, claim, bad)

    @behaviour("bad input", "redrive")
    def test_a_bad_limit_of_a_redrive_is_refused(self) -> None:
        queue, _ = self.stocked()
        other = self.queue()
        for bad in (-1, 0, 1.5, math.nan, True, "3", [3]):
            with self.refused("limit", InvalidField):
                self.store.redrive(queue, to=other, limit=bad)  # type: ignore[arg-type]
        assert self.is_empty(other)

    @behaviour("bad input")
    @pytest.mark.parametrize("field", IDS)
    def test_a_bad_identifier_is_refused(self, field: str) -> None:
        queue, claim = self.stocked()
        for bad in BAD_IDS:
            with self.refused(field.split()[1], InvalidField):
                IDS[field](self, queue, claim, bad)

    @behaviour("bad input")
    @pytest.mark.parametrize("body", [None, 7, 1.5, True, ["x"], {"a": 1}, "\ud800"], ids=ascii)
    def test_a_body_that_is_neither_text_nor_bytes_is_refused(self, body: Any) -> None:
        queue, _ = self.stocked()
        with self.refused("body", InvalidField):
            self.store.push(queue, body)

    @behaviour("bad input")
    def test_a_body_over_the_default_limit_is_refused(self) -> None:
        queue, _ = self.stocked()
        with self.refused("body", MessageTooLarge):
            self.store.push(queue, bytes(1024 * 1024 + 1))

    @behaviour("bad input")
    @pytest.mark.parametrize(
        "attributes",
        [
            7,
            "text",
            ["a"],
            [("a", "b")],
            {"a": 1},
            {"a": None},
            {"a": ["b"]},
            {1: "a"},
            {"": "a"},
            {b"a": "b"},
            {"a": "\ud800"},
            {"\ud800": "a"},
            {str(number): "x" for number in range(65)},
        ],
        ids=lambda value: ascii(value)[:20],
    )
    def test_bad_attributes_are_refused(self, attributes: Any) -> None:
        queue, _ = self.stocked()
        with self.refused("attributes", InvalidField):
            self.store.push(queue, "x", attributes=attributes)

    @behaviour("bad input")
    @pytest.mark.parametrize(
        ("settings", "field"),
        [
            ({"colour": "red"}, "colour"),
            ({"visibility_ms": 5}, "visibility_ms"),
            ({"visibility_timeout": None}, "visibility"),
            ({"visibility_timeout": 43_201}, "visibility"),
            ({"retention": 0}, "retention"),
            ({"priority_age": 0}, "priority_age"),
            ({"priority_age": -1}, "priority_age"),
            ({"priority_age": "5"}, "priority_age"),
            ({"priority_age": 40_000_000}, "priority_age"),
            ({"fifo": 1}, "fifo"),
            ({"fifo": "yes"}, "fifo"),
            ({"dedup_by_content": None}, "dedup_by_content"),
            ({"dedup_per_group": True}, "dedup_per_group"),
            ({"dead_letter": "d"}, "dead_letter"),
            ({"max_receives": 3}, "max_receives"),
            ({"dead_letter": "itself", "max_receives": 3}, "dead_letter"),
            ({"annotations": {"a": 1}}, "annotations"),
            ({"annotations": {"a": b"b"}}, "annotations"),
            ({"annotations": "text"}, "annotations"),
        ],
        ids=str,
    )
    def test_bad_settings_are_refused_and_create_no_queue(
        self, settings: dict[str, Any], field: str
    ) -> None:
        for queue, use in ((self.name(), self.store.create), (self.queue(), self.store.configure)):
            itself = {"dead_letter": queue} if settings.get("dead_letter") == "itself" else {}
            with self.refused(field, InvalidField):
                use(queue, **{**settings, **itself})

    @behaviour("bad input")
    @pytest.mark.parametrize("state", ["", "VISIBLE", "gone", None, 1, ["visible"], {}], ids=str)
    def test_peeking_at_an_unknown_state_is_refused(self, state: Any) -> None:
        queue, _ = self.stocked()
        with self.refused("state", InvalidField):
            self.store.peek(queue, state=state)

    @behaviour("bad input")
    def test_names_refuses_a_prefix_that_is_not_text(self) -> None:
        for bad in (7, None, b"x", ["x"]):
            with self.refused("prefix", InvalidField):
                self.store.list(bad)  # type: ignore[arg-type]
            with self.refused("after", InvalidField):
                self.store.list(after=bad)  # type: ignore[arg-type]

    @behaviour("bad input")
    @pytest.mark.parametrize(
        "receipt", ["", "x", "0" * 64, "é" * 40, "\x00" * 80, "1.1.1.ff", "x" * 100_000], ids=len
    )
    def test_a_forged_receipt_is_refused(self, receipt: str) -> None:
        queue, _ = self.stocked()
        self.refuses_receipt(queue, receipt)

    @behaviour("bad input")
    @pytest.mark.parametrize("receipt", [7, b"x", True, 1.5, ["x"], {}], ids=str)
    def test_a_receipt_that_is_not_text_is_refused(self, receipt: Any) -> None:
        queue, _ = self.stocked()
        self.refuses_receipt(queue, receipt)

    @behaviour("bad input")
    def test_a_receipt_changed_in_any_place_is_refused(self) -> None:
        queue, claim = self.stocked()
        genuine = claim.receipt
        forged = [genuine[:-1], genuine[1:], genuine + "0", genuine + "\n", " " + genuine]
        for place, letter in enumerate(genuine):
            other = "1" if letter != "1" else "2"
            forged.append(genuine[:place] + other + genuine[place + 1 :])
        for receipt in forged:
            self.refuses_receipt(queue, receipt)
        assert self.store.delete(claim) is True

    @behaviour("bad input")
    def test_a_receipt_of_another_queue_is_refused(self) -> None:
        queue, _ = self.stocked()
        _, foreign = self.stocked()
        self.refuses_receipt(queue, foreign.receipt)
        assert self.store.delete(foreign) is True

    def refuses_receipt(self, queue: str, receipt: Any) -> None:
        """Tries the receipt with each verb that takes one."""
        with self.refused("receipt", InvalidReceipt):
            self.store.delete(ClaimRef(queue, receipt))
        with self.refused("receipt", InvalidReceipt):
            self.store.extend(ClaimRef(queue, receipt), 60)
        with self.refused("receipt", InvalidReceipt):
            self.store.release(ClaimRef(queue, receipt))

    @behaviour("bad input")
    def test_a_value_that_is_not_a_claim_is_refused(self) -> None:
        for bad in (None, 7, "a receipt without a queue", ("a queue", "a receipt")):
            with self.refused("claim", RequestError):
                self.store.delete(bad)  # type: ignore[arg-type]
            with self.refused("claim", RequestError):
                self.store.extend(bad, 5)  # type: ignore[arg-type]
            with self.refused("claim", RequestError):
                self.store.release(bad)  # type: ignore[arg-type]

    @behaviour("bad input", "history")
    def test_the_history_of_an_unknown_message_is_refused(self) -> None:
        _, claim = self.stocked()
        forged = claim.id[:-1] + ("0" if claim.id[-1] != "0" else "1")
        for bad in ("", "x", 7, None, forged.replace("0", "f"), claim.id + "0", b"x", ["x"]):
            with self.refused("id", MessageNotFound):
                self.store.history(bad)  # type: ignore[arg-type]

    @behaviour("bad input", "batches")
    def test_bad_items_of_a_batch_are_refused_and_the_good_ones_are_pushed(self) -> None:
        queue, claim = self.stocked()
        bodies: list[Any] = ["good", None, 7, "\ud800"]
        with pytest.raises(InvalidField, match="body"):
            self.store.push_many(queue, bodies)
        replies = refused_of(self.store.push_many, queue, bodies[:3])
        assert [isinstance(reply, InvalidField) for reply in replies] == [False, True, True]
        assert self.batch([claim, 7, None])[0].__class__ is InvalidField  # type: ignore[list-item]
        assert self.drain(queue) == ["waiting", "more", "good"]
