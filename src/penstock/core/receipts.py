"""Message ids and receipts: their text, and how a receipt that comes back is verified.

A message id is the store's identity and the message's number in the form of a UUID (version 8):

    iiiiiiii-iiii-8iii-9iii-nnnnnnnnnnnn        i: identity, 56 bits   n: number, 48 bits

A receipt is, in hexadecimal, three fields and the proof that this store signed them:

    queue (8 bytes) · number (8) · epoch (8) · keyed BLAKE2b of "penstock receipt" and these (16)

The key belongs to one data directory. A receipt that was not made with it is refused before any
message is looked up.
"""

import hashlib
import struct
from collections.abc import Iterator
from hmac import compare_digest
from typing import Final

import msgspec

from penstock.errors import InvalidReceipt, MessageNotFound

IDENTITY_BYTES: Final = 7
KEY_BYTES: Final = 32
_MAC_BYTES: Final = 16
_SIGNED_FIELDS: Final = struct.Struct(">QQQ")
_SIGNED_BYTES: Final = _SIGNED_FIELDS.size
_RECEIPT_CHARS: Final = 2 * (_SIGNED_BYTES + _MAC_BYTES)
# Most receipts come back soon, and once: this many are kept until then and need no verification.
_ISSUED_MAX: Final = 8_192
_LAST_DIGITS: Final = [f"{low:03x}" for low in range(0x1000)]


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """The fields of a valid receipt; its text is made only where it is needed.

    A ticket exists only in the process that made it, so the engine accepts it without a check.
    Text, which may come from anywhere, is verified.
    """

    queue: int
    number: int
    epoch: int
    made_by: "Receipts"

    def __str__(self) -> str:
        return self.made_by.text(self)


class MessageIds:
    """Numbers to message ids and back, for one store."""

    __slots__ = ("_block", "_block_prefix", "prefix")

    def __init__(self, identity: bytes) -> None:
        hexed = identity[:IDENTITY_BYTES].hex()
        self.prefix = f"{hexed[:8]}-{hexed[8:12]}-8{hexed[12:]}0-9000-"
        # Consecutive numbers share all but their last digits, which come from a table.
        self._block = -1
        self._block_prefix = ""

    def show(self, number: int) -> str:
        """The id of the message with this number."""
        block = number >> 12
        if block != self._block:
            self._block = block
            self._block_prefix = f"{self.prefix}{block:09x}"
        return self._block_prefix + _LAST_DIGITS[number & 0xFFF]

    def show_all(self, numbers: range) -> Iterator[str]:
        """The ids of consecutive numbers; the same as `show` of each."""
        low, high = numbers[0], numbers[-1]
        if low >> 12 != high >> 12:
            return map(self.show, numbers)
        start = self.show(low)[:-3]
        return map(start.__add__, _LAST_DIGITS[low & 0xFFF : (high & 0xFFF) + 1])

    def read(self, message_id: object) -> int:
        """The number of the message with this id. Raises MessageNotFound."""
        if isinstance(message_id, str) and message_id.startswith(self.prefix):
            digits = message_id[len(self.prefix) :]
            if len(digits) == 12 and not digits.strip("0123456789abcdef"):
                return int(digits, 16)
        raise MessageNotFound(f"id: {str(message_id)[:60]!r} is not the id of a message here")


class Receipts:
    """Makes and verifies the receipts of one store."""

    __slots__ = ("_issued", "_mac")

    def __init__(self, key: bytes) -> None:
        self._issued: dict[object, Ticket] = {}
        # BLAKE2b digests the key with the first bytes: the constant lets that happen once, here.
        self._mac = hashlib.blake2b(b"penstock receipt", key=key, digest_size=_MAC_BYTES)

    def text(self, ticket: Ticket) -> str:
        """The receipt of one claim; the same claim always has the same one."""
        fields = _SIGNED_FIELDS.pack(ticket.queue, ticket.number, ticket.epoch)
        # The same as `_sign`, repeated for speed.
        mac = self._mac.copy()
        mac.update(fields)
        text = (fields + mac.digest()).hex()
        issued = self._issued
        if len(issued) >= _ISSUED_MAX:
            issued.clear()
        issued[text] = ticket
        return text

    def read(self, receipt: object) -> Ticket:
        """The ticket of a receipt. Raises InvalidReceipt unless this store made it."""
        if type(receipt) is str:
            issued = self._issued.pop(receipt, None)
            if issued is not None:
                return issued
        if type(receipt) is Ticket:
            if receipt.made_by is self:
                return receipt
            # It may have been made before the store was opened again: its text is verified.
            receipt = str(receipt)
        # The length first: megabytes from outside must not be hashed.
        if (
            isinstance(receipt, str)
            and len(receipt) == _RECEIPT_CHARS
            and not receipt.strip("0123456789abcdef")
        ):
            decoded = bytes.fromhex(receipt)
            fields = decoded[:_SIGNED_BYTES]
            if compare_digest(decoded[_SIGNED_BYTES:], self._sign(fields)):
                queue, number, epoch = _SIGNED_FIELDS.unpack(fields)
                return Ticket(queue, number, epoch, self)
        raise InvalidReceipt("receipt: this store did not make it; use the one the pull returned")

    def _sign(self, fields: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(fields)
        return mac.digest()
