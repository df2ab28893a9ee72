"""Examine the files of a directory, and prepare the tail of the stream for appending.

`examine` only reads. It refuses files of another stream or format before anything is changed, and
finds out what is missing: files, and bytes of files that were cut.
`repair` is for the writer: it finds the end of the valid entries behind the watermark, writes those
entries again, zeroes what follows, and returns when that is durable. Writing them again is needed
after a failed sync: the kernel may have marked pages as clean that never reached the disk.

If the loss of files was accepted, `repair` creates them again without content. Their range is then
reported as damage, and the stream continues behind it: no id and no offset is used twice.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import StoreUnusable
from penstock.journal.disk import Directory
from penstock.journal.entry import HEADER_BYTES
from penstock.journal.header_page import (
    FORMAT,
    PAGE_BYTES,
    SLOT_OFFSETS,
    FileHeader,
    Slot,
    pack_page,
    unpack_header,
    unpack_slots,
)
from penstock.journal.loss import Cut, Loss, runs
from penstock.journal.manifest import NAME, FileList, condition_of, read_manifest
from penstock.journal.scan import Limit, Quarantined, crossing_end, find_first, valid_end
from penstock.journal.stream_files import StreamFiles, drafts_in, name_of, numbers_in

_CHUNK_BYTES = 1 << 20
_FILE_BYTES_MAX = 1 << 40


@dataclass
class Examined:
    """The state of a directory according to its header pages and its manifest."""

    identity: bytes
    file_bytes: int
    numbers: list[int]
    slot: Slot
    slot_place: tuple[int, int]
    listed: FileList | None = None
    manifest: Literal["", "missing", "damaged"] = ""
    emptied: list[int] = field(default_factory=list)
    cut: list[Cut] = field(default_factory=list)
    damage: list[Quarantined] = field(default_factory=list)
    damaged_headers: list[int] = field(default_factory=list)

    @property
    def payload_bytes(self) -> int:
        """How many bytes of the stream one file holds."""
        return self.file_bytes - PAGE_BYTES

    def loss(self, known_end: int = 0) -> Loss:
        """What is missing, according to the watermark, the manifest and the sizes of the files.

        `known_end` is an offset that was durable according to a snapshot of the stream.
        """
        slot = self.slot
        first = min(slot.first_offset, slot.durable_offset) // self.payload_bytes
        last = (max(slot.durable_offset, known_end) - 1) // self.payload_bytes
        if self.listed is not None:
            first, last = max(first, self.listed.first), max(last, self.listed.last)
        missing = sorted(set(range(first, last + 1)).difference(self.numbers))
        last = max([*self.numbers, *missing])
        return Loss(self.payload_bytes, last, missing, self.emptied, self.cut, self.manifest)


@dataclass
class _Pages:
    """The contents of the header pages, not yet compared with each other."""

    headers: dict[int, FileHeader] = field(default_factory=dict)
    slots: list[tuple[int, int, Slot]] = field(default_factory=list)
    damaged_headers: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)


def examine(directory: Directory) -> Examined | None:
    """Returns the directory's state, or None if it has no segment; raises StoreUnusable."""
    # The manifest is read before the names, and the pages after them. With a live writer, a listed
    # file then either exists or lies before the watermark's first offset, which is read last.
    listed = read_manifest(directory)
    pages = _read_pages(directory, numbers_in(directory))
    numbers = sorted(pages.sizes)
    if not numbers:
        if NAME in directory.names():
            which = f", {name_of(listed.first)} to {name_of(listed.last)}" if listed else ""
            raise StoreUnusable(
                f"{directory.path}: all of its files are missing{which}; put them back"
            )
        return None
    identity, file_bytes = _agree(directory, numbers, pages)
    listed = read_manifest(directory, identity) and listed
    if pages.slots:
        number, place, slot = max(pages.slots, key=lambda found: found[2].serial)
        slot_place = (number, place)
    elif numbers[0] == 0 or (listed is not None and listed.first == 0):
        # Nothing was ever synced: the stream is durable up to offset 0.
        slot, slot_place = Slot(0, identity, 0, 1, 0, 1), (-1, 0)
    else:
        raise StoreUnusable(
            f"{directory.path}: no file has a valid slot, so the durable end is unknown"
        )
    begin = 0 if listed is None else listed.first * (file_bytes - PAGE_BYTES)
    if begin > slot.first_offset:
        # The files with the newest slots are missing, and this slot's first file was dropped.
        if begin > slot.durable_offset:
            raise StoreUnusable(f"{directory.path}: no file is left that was in use; put them back")
        slot = slot._replace(first_offset=begin, first_id=0)
    examined = Examined(identity, file_bytes, numbers, slot, slot_place, listed)
    examined.damaged_headers = pages.damaged_headers
    for number in pages.damaged_headers:
        why = f"header of {name_of(number)} does not match its checksum"
        examined.damage.append(Quarantined(number * examined.payload_bytes, 0, why))
    examined.cut = _find_cuts(examined, pages)
    files = StreamFiles(directory, identity, file_bytes, numbers, writable=False)
    examined.emptied = _find_emptied(examined, pages, files)
    _judge_manifest(examined, files)
    return examined


def _find_cuts(examined: Examined, pages: _Pages) -> list[Cut]:
    """The ranges below the watermark that lie behind the end of their file.

    A file gets its name when it has its full size, durably, so no crash leaves a short one. What
    is cut off behind the watermark was never synced, and is not missed.
    """
    slot, payload_bytes = examined.slot, examined.payload_bytes
    cuts = []
    for number in examined.numbers:
        held_bytes = max(0, pages.sizes[number] - PAGE_BYTES)
        begin = max(number * payload_bytes + held_bytes, slot.first_offset)
        end = min((number + 1) * payload_bytes, slot.durable_offset)
        if begin < end:
            cuts.append(Cut(number, begin, end))
    return cuts


def _find_emptied(examined: Examined, pages: _Pages, files: StreamFiles) -> list[int]:
    """The files that lost their header page, with a newer watermark, and the entries behind it.

    The watermark is in the file to which it leads. So if a file behind the newest slot has neither
    header nor slot, a newer watermark may have been there. It was not if the entries end before
    that file; and if an entry begins in it, only the page is damaged, which is repaired. The end
    of an entry that began before proves nothing: it may be of zeroes.
    """
    slot, payload_bytes = examined.slot, examined.payload_bytes
    slotted = {number for number, _, _ in pages.slots}
    behind = max(examined.slot_place[0] + 1, slot.durable_offset // payload_bytes)
    blank = [n for n in pages.damaged_headers if n >= behind and n not in slotted]
    for number in blank:
        start = slot.durable_offset, slot.next_id
        begin = crossing_end(files.scan, *start, number * payload_bytes)
        if begin is not None and valid_end(files.scan, *start, files.allocated_end)[0] <= begin:
            return [each for each in blank if each >= number]
    return []


def _judge_manifest(examined: Examined, files: StreamFiles) -> None:
    """Notes a manifest that was taken away, or is damaged and may have listed more files.

    A damaged one is made again if nothing is missing for certain: if the entries end before the
    last file does, no entry was ever synced behind it.
    """
    condition = condition_of(files.directory)
    slot = examined.slot
    if condition == "absent":
        examined.manifest = "missing" if slot.is_listed else ""
        return
    if condition == "whole":
        return
    end_number = slot.durable_offset // examined.payload_bytes
    while end_number in examined.numbers:
        end_number += 1
    end = end_number * examined.payload_bytes
    if crossing_end(files.scan, slot.durable_offset, slot.next_id, end) is not None:
        examined.manifest = "damaged"
    elif condition == "damaged":
        why = f"{NAME} does not match its checksum"
        examined.damage.append(Quarantined(0, 0, why))


def newest_slot(directory: Directory, from_number: int, identity: bytes) -> Slot | None:
    """Returns the newest slot in the files from this number on; a writer may be active."""
    numbers = [number for number in numbers_in(directory) if number >= from_number]
    slots = _read_pages(directory, numbers).slots
    ours = [slot for _, _, slot in slots if slot.identity == identity]
    return max(ours, key=lambda slot: slot.serial, default=None)


def _read_pages(directory: Directory, numbers: list[int]) -> _Pages:
    pages = _Pages()
    for number in numbers:
        try:
            file = directory.open(name_of(number), writable=False)
        except FileNotFoundError:
            continue
        page = file.read(0, PAGE_BYTES)
        slots = unpack_slots(page)
        if len(slots) < 2:
            # A writer may have been writing a slot; read again.
            page = file.read(0, PAGE_BYTES)
            slots = unpack_slots(page)
        pages.sizes[number] = file.size_bytes
        file.close()
        header = unpack_header(page)
        if header is None:
            pages.damaged_headers.append(number)
        else:
            pages.headers[number] = header
        pages.slots += [(number, place, slot) for place, slot in slots]
    return pages


def _agree(directory: Directory, numbers: list[int], pages: _Pages) -> tuple[bytes, int]:
    """Returns the identity and the file size of all files; raises StoreUnusable if they differ."""
    for number, header in pages.headers.items():
        where = f"{directory.path}: {name_of(number)}"
        if header.format != FORMAT:
            raise StoreUnusable(f"{where} has format {header.format}; this version reads {FORMAT}")
        if header.number != number:
            raise StoreUnusable(f"{where} says that it is file {header.number}")
    identities = {header.identity for header in pages.headers.values()}
    identities |= {slot.identity for _, _, slot in pages.slots}
    sizes = {header.file_bytes for header in pages.headers.values()}
    if not identities:
        name = name_of(numbers[0])
        raise StoreUnusable(f"{directory.path}: {name} is not a segment file, or is damaged")
    if len(identities) > 1 or len(sizes) > 1:
        raise StoreUnusable(
            f"{directory.path}: its files belong to different streams{_name_foreign_files(pages)}"
        )
    # Without a valid header, the identity comes from a slot and the size from the longest file.
    file_bytes = sizes.pop() if sizes else max(pages.sizes.values())
    if not 2 * PAGE_BYTES <= file_bytes <= _FILE_BYTES_MAX or file_bytes % PAGE_BYTES:
        raise StoreUnusable(f"{directory.path}: its files cannot have {file_bytes} bytes each")
    return identities.pop(), file_bytes


def _name_foreign_files(pages: _Pages) -> str:
    """Names the files whose identity differs from that of most files; empty if there is a tie."""
    by_identity: dict[bytes, list[int]] = {}
    for number, header in pages.headers.items():
        by_identity.setdefault(header.identity, []).append(number)
    *fewer, most = sorted(by_identity.values(), key=len) or [[]]
    if not fewer or len(fewer[-1]) == len(most):
        return ""
    names = ", ".join(name_of(number) for numbers in fewer for number in numbers)
    return f"; not of the same stream as the others: {names}"


def repair(
    files: StreamFiles, examined: Examined, missing: list[int] | None = None
) -> tuple[int, int]:
    """Prepares the tail for appending; returns the end of the stream and the next id.

    The files whose numbers are in `missing` are created again, or restored if they exist without
    content; the stream ends behind them.
    """
    _finish_interrupted(files, examined, missing or [])
    slot = examined.slot
    payload_bytes = files.payload_bytes
    found_end, next_id = valid_end(
        files.scan, slot.durable_offset, slot.next_id, max(files.allocated_end, 0)
    )
    for _, last in runs(missing or []):
        # The loss was accepted, so entries behind the gap are kept, though none was known durable.
        if (last + 1) * payload_bytes > found_end:
            found_end, next_id = _pass_gap(files, (last + 1) * payload_bytes, found_end, next_id)
    end = found_end
    if missing and (missing[-1] + 1) * payload_bytes > end:
        # An unknown number of entries is lost: skip every id that one of them may have had.
        end = (missing[-1] + 1) * payload_bytes
        next_id += (end - found_end) // HEADER_BYTES
    _keep_through(files, end // payload_bytes + 1)
    _rewrite(files, slot.durable_offset, found_end)
    start = found_end
    for number in range(start // payload_bytes, files.last + 1):
        at = PAGE_BYTES + start - number * payload_bytes
        files.get(number).zero(at, files.file_bytes)
        start = (number + 1) * payload_bytes
    for number in range(slot.durable_offset // payload_bytes, files.last + 1):
        file = files.get(number)
        file.sync()
        file.unload()
    # A killed process may have left a file whose name is not durable yet.
    files.directory.sync()
    # A store of an older version has no manifest yet, and the disk may be too full for one.
    with contextlib.suppress(OSError):
        files.write_list()
    return end, next_id


def _pass_gap(files: StreamFiles, gap_end: int, found_end: int, next_id: int) -> tuple[int, int]:
    """Returns the end of the entries behind a gap and the next id; as given if there are none."""
    limit = Limit(files.allocated_end, None)
    offset, entry_id = find_first(files.scan, gap_end, limit)
    if offset >= limit.offset or entry_id < next_id:
        return found_end, next_id
    return valid_end(files.scan, offset, entry_id, limit.offset)


def _finish_interrupted(files: StreamFiles, examined: Examined, missing: list[int]) -> None:
    """Finishes what a crash interrupted, and restores the header and size of damaged files."""
    directory = files.directory
    for draft in drafts_in(directory):
        directory.remove(draft)
    for number in missing:
        if number not in examined.numbers:
            files.create(number).close()
        files.first, files.last = min(files.first, number), max(files.last, number)
    slot = examined.slot
    first = min(slot.first_offset, slot.durable_offset) // files.payload_bytes
    dropped = [number for number in examined.numbers if number < min(first, files.last)]
    if dropped:
        files.first = min(first, files.last)
        files.remove(dropped)
    for number in numbers_in(directory):
        directory.extend(name_of(number), files.file_bytes)
        if number in examined.damaged_headers:
            base_offset = number * files.payload_bytes
            page = pack_page(
                FileHeader(FORMAT, number, base_offset, files.file_bytes, files.identity)
            )
            file = files.get(number)
            file.map()[: SLOT_OFFSETS[0]] = page[: SLOT_OFFSETS[0]]
            file.sync()


def _keep_through(files: StreamFiles, keep_last: int) -> None:
    """Removes the files after `keep_last`, and those after a gap in the numbers."""
    present = set(numbers_in(files.directory))
    last = min(keep_last, files.last)
    while last >= files.first and not _is_contiguous(present, keep_last - 1, last):
        last -= 1
    surplus = sorted(number for number in present if number > last)
    files.last = last
    if surplus:
        files.write_list()
        files.remove(surplus)


def _is_contiguous(present: set[int], tail: int, last: int) -> bool:
    return all(number in present for number in range(min(tail, last), last + 1))


def _rewrite(files: StreamFiles, start: int, end: int) -> None:
    """Writes the same bytes again, so that the next sync writes them to the disk."""
    while start < end:
        size = min(_CHUNK_BYTES, end - start)
        files.write(start, files.read(start, size))
        start += size
