"""Receipts and ids: only those that this store made are accepted."""

import random
import string

import pytest

from penstock.core.receipts import KEY_BYTES, MessageIds, Receipts, Ticket
from penstock.errors import InvalidReceipt, MessageNotFound

KEY = bytes(range(KEY_BYTES))
FORGERIES = 20_000


def mutated(receipt: str, source: random.Random) -> str:
    """The receipt with a few characters changed, cut, doubled or swapped."""
    text = list(receipt)
    for _ in range(source.randint(1, 3)):
        if len(text) < 2:
            break
        place = source.randrange(len(text))
        kind = source.randrange(5)
        if kind == 0:
            text[place] = source.choice(string.hexdigits + "é\x00.-")
        elif kind == 1:
            del text[place]
        elif kind == 2:
            text.insert(place, source.choice(string.hexdigits))
        elif kind == 3:
            other = source.randrange(len(text))
            text[place], text[other] = text[other], text[place]
        else:
            text = text[: source.randrange(1, len(text) + 1)]
    return "".join(text)


def test_a_receipt_can_be_read_as_the_queue_number_and_epoch_it_was_made_of():
    receipts = Receipts(KEY)
    for queue, number, epoch in [(1, 1, 1), (2**31, 2**47, 10**6), (7, 0, 3)]:
        text = receipts.text(Ticket(queue, number, epoch, receipts))
        read = receipts.read(text)
        assert (read.queue, read.number, read.epoch) == (queue, number, epoch)
        assert receipts.text(read) == str(read) == text


def test_no_mutated_receipt_is_accepted():
    receipts = Receipts(KEY)
    source = random.Random(22)
    genuine = [
        receipts.text(Ticket(queue, number, epoch, receipts))
        for queue in (1, 2)
        for number in (1, 77, 2**40)
        for epoch in (1, 2, 255)
    ]
    accepted = tried = 0
    while tried < FORGERIES:
        forged = mutated(source.choice(genuine), source)
        if forged in genuine:
            continue
        tried += 1
        try:
            receipts.read(forged)
        except InvalidReceipt:
            continue
        accepted += 1
    assert (tried, accepted) == (FORGERIES, 0)


def test_a_receipt_made_with_another_key_is_refused():
    mine, other = Receipts(KEY), Receipts(bytes(reversed(KEY)))
    ticket = Ticket(1, 2, 3, other)
    with pytest.raises(InvalidReceipt, match="receipt"):
        mine.read(other.text(ticket))
    with pytest.raises(InvalidReceipt, match="receipt"):
        mine.read(ticket)


def test_a_receipt_survives_a_restart_that_keeps_the_key():
    before, after = Receipts(KEY), Receipts(KEY)
    read = after.read(before.text(Ticket(1, 2, 3, before)))
    assert (read.queue, read.number, read.epoch) == (1, 2, 3)


def test_another_spelling_of_a_receipt_is_refused():
    receipts = Receipts(KEY)
    text = receipts.text(Ticket(10, 11, 12, receipts))
    for other in (text.upper(), " " + text, text + " ", text + "\n", "0" + text, "0x" + text):
        if other != text:
            with pytest.raises(InvalidReceipt):
                receipts.read(other)


@pytest.mark.parametrize("receipt", [None, 7, b"x" * 80, ["x"], {}, 1.5, True, "", "x" * 10**6])
def test_values_that_are_not_receipts_are_refused(receipt):
    with pytest.raises(InvalidReceipt, match="receipt"):
        Receipts(KEY).read(receipt)


def test_ids_have_the_form_of_uuids_and_can_be_read_as_numbers():
    ids = MessageIds(b"\x01\x23\x45\x67\x89\xab\xcd")
    for number in (0, 1, 4_095, 4_096, 2**47, 2**48 - 1, 1):
        shown = ids.show(number)
        assert ids.read(shown) == number
        assert [len(part) for part in shown.split("-")] == [8, 4, 4, 4, 12]
        assert (shown[14], shown[19]) == ("8", "9")


def test_ids_of_another_store_and_other_texts_are_not_found():
    ids, other = MessageIds(b"\x01" * 7), MessageIds(b"\x02" * 7)
    shown = ids.show(5)
    for bad in (other.show(5), shown[:-1], shown + "0", shown.upper() + "X", "", None, 5, b"x"):
        with pytest.raises(MessageNotFound, match="id"):
            ids.read(bad)
