"""Message ids and receipts: what leaves the engine, and what must be believed when it returns.

A message id is the store's identity and the message's number in the form of a UUID (version 8):

    iiiiiiii-iiii-8iii-9iii-nnnnnnnnnnnn        i: identity, 56 bits   n: number, 48 bits

A receipt is `queue.number.epoch.mac`, in hexadecimal, the last part a keyed BLAKE2b (128 bits) of
what stands before it. The key belongs to one data directory; a receipt nobody made here is
refused before any message is looked up.
"""

import hashlib
from hmac import compare_digest
from typing import Final, NamedTuple

from penstock.errors import InvalidReceipt, MessageNotFound

IDENTITY_BYTES: Final = 7
KEY_BYTES: Final = 32
_MAC_BYTES: Final = 16
_RECEIPT_CHARS_MAX: Final = 100
_MINTED_MAX: Final = 50_000


class Ticket(NamedTuple):
    """What a genuine receipt says."""

    queue: int
    number: int
    epoch: int


class MessageIds:
    """Numbers to message ids and back, for one store."""

    __slots__ = ("prefix",)

    def __init__(self, identity: bytes) -> None:
        hexed = identity[:IDENTITY_BYTES].hex()
        self.prefix = f"{hexed[:8]}-{hexed[8:12]}-8{hexed[12:]}0-9000-"

    def show(self, number: int) -> str:
        """The id of the message with this number."""
        return f"{self.prefix}{number:012x}"

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
        self._mac = hashlib.blake2b(key=key, digest_size=_MAC_BYTES)
        # Receipts made lately, so that the usual delete need not compute the MAC again. Being in
        # here proves where a receipt came from; whether its claim still lives is asked elsewhere.
        self._minted: dict[str, Ticket] = {}

    def mint(self, queue: int, number: int, epoch: int) -> str:
        """The receipt of one claim; the same claim always has the same one."""
        said = f"{queue:x}.{number:x}.{epoch:x}"
        receipt = f"{said}.{self._sign(said)}"
        if len(self._minted) >= _MINTED_MAX:
            self._minted.clear()
        self._minted[receipt] = Ticket(queue, number, epoch)
        return receipt

    def read(self, receipt: object) -> Ticket:
        """What the receipt says. Raises InvalidReceipt unless this store made it."""
        if isinstance(receipt, str):
            known = self._minted.get(receipt)
            if known is not None:
                return known
            said, _, mac = receipt.rpartition(".")
            # The comparison takes only ASCII, and a genuine receipt is short: ask before hashing.
            fit = len(receipt) <= _RECEIPT_CHARS_MAX and receipt.isascii()
            if fit and compare_digest(mac, self._sign(said)):
                queue, number, epoch = said.split(".")
                return Ticket(int(queue, 16), int(number, 16), int(epoch, 16))
        raise InvalidReceipt("receipt: not one that this store has made; use the one the pull gave")

    def _sign(self, said: str) -> str:
        mac = self._mac.copy()
        mac.update(said.encode())
        return mac.hexdigest()
