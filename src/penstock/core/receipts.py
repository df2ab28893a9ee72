"""Message ids and receipts: what leaves the engine, and what must be believed when it returns.

A message id is the store's identity and the message's number in the form of a UUID (version 8):

    iiiiiiii-iiii-8iii-9iii-nnnnnnnnnnnn        i: identity, 56 bits   n: number, 48 bits

A receipt is, in hexadecimal, what it says and the proof that this store said it:

    queue (8 bytes) · number (8) · epoch (8) · keyed BLAKE2b of "penstock receipt" and these (16)

The key belongs to one data directory. A receipt that was not made with it is refused before any
message is looked up.
"""

import hashlib
import struct
from hmac import compare_digest
from typing import Final

import msgspec

from penstock.errors import InvalidReceipt, MessageNotFound

IDENTITY_BYTES: Final = 7
KEY_BYTES: Final = 32
_MAC_BYTES: Final = 16
_SAID: Final = struct.Struct(">QQQ")
_SAID_BYTES: Final = _SAID.size
_RECEIPT_CHARS: Final = 2 * (_SAID_BYTES + _MAC_BYTES)
_MINTED_MAX: Final = 4_096
_LAST_DIGITS: Final = [f"{low:03x}" for low in range(0x1000)]
_pack = _SAID.pack
_unpack = _SAID.unpack


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """What a genuine receipt says."""

    queue: int
    number: int
    epoch: int


class MessageIds:
    """Numbers to message ids and back, for one store."""

    __slots__ = ("_block", "_block_prefix", "prefix")

    def __init__(self, identity: bytes) -> None:
        hexed = identity[:IDENTITY_BYTES].hex()
        self.prefix = f"{hexed[:8]}-{hexed[8:12]}-8{hexed[12:]}0-9000-"
        # Neighbouring numbers share all but their last digits, which come from a table.
        self._block = -1
        self._block_prefix = ""

    def show(self, number: int) -> str:
        """The id of the message with this number."""
        block = number >> 12
        if block != self._block:
            self._block = block
            self._block_prefix = f"{self.prefix}{block:09x}"
        return self._block_prefix + _LAST_DIGITS[number & 0xFFF]

    def read(self, message_id: object) -> int:
        """The number of the message with this id. Raises MessageNotFound."""
        if isinstance(message_id, str) and message_id.startswith(self.prefix):
            digits = message_id[len(self.prefix) :]
            if len(digits) == 12 and not digits.strip("0123456789abcdef"):
                return int(digits, 16)
        raise MessageNotFound(f"id: {str(message_id)[:60]!r} names no message of this store")


class Receipts:
    """Mints and verifies the receipts of one store."""

    __slots__ = ("_mac", "_minted")

    def __init__(self, key: bytes) -> None:
        # Feeding a constant first has the key's own block digested here, once, and not each time.
        self._mac = hashlib.blake2b(b"penstock receipt", key=key, digest_size=_MAC_BYTES)
        # Receipts made lately, so that the usual delete need not compute the MAC again. Being in
        # here proves where a receipt came from; whether its claim still lives is asked elsewhere.
        self._minted: dict[str, Ticket] = {}

    def mint(self, queue: int, number: int, epoch: int) -> str:
        """The receipt of one claim; the same claim always has the same one."""
        said = _pack(queue, number, epoch)
        mac = self._mac.copy()
        mac.update(said)
        receipt = (said + mac.digest()).hex()
        minted = self._minted
        if len(minted) >= _MINTED_MAX:
            minted.clear()
        minted[receipt] = Ticket(queue, number, epoch)
        return receipt

    def read(self, receipt: object) -> Ticket:
        """What the receipt says. Raises InvalidReceipt unless this store made it."""
        if isinstance(receipt, str):
            known = self._minted.get(receipt)
            if known is not None:
                return known
            # The length first: nobody gets to have megabytes hashed.
            if len(receipt) == _RECEIPT_CHARS and not receipt.strip("0123456789abcdef"):
                made = bytes.fromhex(receipt)
                mac = self._mac.copy()
                mac.update(made[:_SAID_BYTES])
                if compare_digest(made[_SAID_BYTES:], mac.digest()):
                    return Ticket(*_unpack(made[:_SAID_BYTES]))
        raise InvalidReceipt("receipt: not one that this store has made; use the one the pull gave")
