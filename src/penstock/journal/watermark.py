"""The watermark: how far a stream is durable and where it begins, written into its files.

It is written into a slot of the file where the next bytes go, only after the sync of all that it
covers, and becomes durable with the next sync. It is never written over the newest durable slot: if
the write is torn, that slot still counts. `docs/formats/segment.md` says why this holds.
"""

import os

from penstock.errors import JournalError
from penstock.journal.header_page import SLOT_BYTES, SLOT_OFFSETS, Slot, pack_slot
from penstock.journal.stream_files import StreamFiles, name_of


class Watermark:
    """The watermark of one stream, for its one writer."""

    def __init__(self, files: StreamFiles, slot: Slot, slot_place: tuple[int, int]) -> None:
        """`slot` is the newest slot, and `slot_place` its file and its place (0 or 1) in it."""
        self.slot = slot
        self._files = files
        self._durable_place = slot_place
        self._pending_place: tuple[int, int] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the newest slot may not survive a power cut yet."""
        return self._pending_place is not None

    def write(self, durable: tuple[int, int], first: tuple[int, int]) -> None:
        """Writes how far the stream is durable and where it begins, each an offset and an id.

        Raises JournalError if it cannot be written.
        """
        number = min(durable[0] // self._files.payload_bytes, self._files.last)
        durable_number, durable_place = self._durable_place
        place = 1 - durable_place if durable_number == number else 0
        files = self._files
        self.slot = Slot(self.slot.serial + 1, files.identity, *durable, *first, files.is_listed)
        at = SLOT_OFFSETS[place]
        try:
            self._files.get(number).map()[at : at + SLOT_BYTES] = pack_slot(self.slot)
        except (OSError, ValueError) as error:
            raise JournalError(
                f"the watermark in {name_of(number)} cannot be written: {error}"
            ) from error
        self._pending_place = (number, place)

    def sync(self, start: int, end: int) -> None:
        """Syncs the file of the pending slot and those that hold bytes from `start` to `end`.

        The slot's file is the first of them, so that the slot is durable one sync later. Raises
        JournalError if the disk refuses.
        """
        payload_bytes = self._files.payload_bytes
        number = min(start // payload_bytes, self._files.last)
        if self._pending_place is not None:
            number = self._pending_place[0]
        last = max(number, (end - 1) // payload_bytes)
        try:
            while number <= last:
                self._files.get(number).sync()
                number += 1
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise JournalError(f"the sync of {name_of(number)} failed: {why}") from error
        if self._pending_place is not None:
            self._durable_place = self._pending_place
            self._pending_place = None
