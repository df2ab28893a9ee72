"""Find out what a directory holds, and make its tail fit to append to.

`examine` only reads. It refuses what is not ours before anything is touched.
`repair` is for the writer: it finds the true end behind the watermark, writes all that it accepts
there once more, zeroes what follows, and returns when that is durable. Writing once more matters
after a failed sync: the system may then show pages as clean that never reached the disk.
"""

from dataclasses import dataclass, field

from penstock.errors import StoreUnusable
from penstock.journal.fileheader import (
    FORMAT,
    PAGE_BYTES,
    SLOT_OFFSETS,
    FileHeader,
    Slot,
    pack_page,
    unpack_header,
    unpack_slots,
)
from penstock.journal.files import Files, drafts_in, name_of, numbers_in
from penstock.journal.scan import Quarantined, valid_end
from penstock.journal.storage import Directory

_CHUNK_BYTES = 1 << 20
_FILE_BYTES_MAX = 1 << 40


@dataclass
class Examined:
    """What the header pages of a directory say."""

    identity: bytes
    file_bytes: int
    numbers: list[int]
    slot: Slot
    slot_place: tuple[int, int]
    damage: list[Quarantined] = field(default_factory=list)
    damaged_headers: list[int] = field(default_factory=list)


@dataclass
class _Pages:
    """The header pages as they were read, before anything is concluded from them."""

    headers: dict[int, FileHeader] = field(default_factory=dict)
    slots: list[tuple[int, int, Slot]] = field(default_factory=list)
    damaged_headers: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)


def examine(directory: Directory) -> Examined | None:
    """Return what the directory holds, None if no segment; raise StoreUnusable if not ours."""
    numbers = numbers_in(directory)
    if not numbers:
        return None
    pages = _read_pages(directory, numbers)
    numbers = sorted(pages.sizes)
    if not numbers:
        return None
    identity, file_bytes = _agree(directory, numbers, pages)
    payload_bytes = file_bytes - PAGE_BYTES
    if pages.slots:
        number, place, slot = max(pages.slots, key=lambda found: found[2].serial)
        slot_place = (number, place)
    elif numbers[0] == 0:
        # Nothing was ever synced: the stream begins, and is durable, at its first byte.
        slot, slot_place = Slot(0, identity, 0, 1, 0, 1), (-1, 0)
    else:
        raise StoreUnusable(f"{directory.path}: no file says how far the stream is durable")
    examined = Examined(identity, file_bytes, numbers, slot, slot_place)
    examined.damaged_headers = pages.damaged_headers
    for number in pages.damaged_headers:
        why = f"header of {name_of(number)} does not match its checksum"
        examined.damage.append(Quarantined(number * payload_bytes, 0, why))
    return examined


def newest_slot(directory: Directory, from_number: int, identity: bytes) -> Slot | None:
    """Return the newest slot in the files from this number on; they may be written meanwhile."""
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
            # A writer may have been half-way through a slot: by now it is through.
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
    """Return the identity and the file size that all files share."""
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
        raise StoreUnusable(f"{directory.path}: its files belong to different streams")
    # With no whole header left a slot has told the identity, and the longest file its size.
    file_bytes = sizes.pop() if sizes else max(pages.sizes.values())
    if not 2 * PAGE_BYTES <= file_bytes <= _FILE_BYTES_MAX or file_bytes % PAGE_BYTES:
        raise StoreUnusable(f"{directory.path}: its files cannot have {file_bytes} bytes each")
    return identities.pop(), file_bytes


def repair(files: Files, examined: Examined) -> tuple[int, int]:
    """Make the tail ready for appending; return the end of the stream and the next id."""
    _tidy(files, examined)
    slot = examined.slot
    end, next_id = valid_end(
        files.scan, slot.durable_offset, slot.next_id, max(files.allocated_end, 0)
    )
    tail = end // files.payload_bytes
    _keep_through(files, tail + 1)
    _rewrite(files, slot.durable_offset, end)
    start = end
    for number in range(tail, files.last + 1):
        at = PAGE_BYTES + start - number * files.payload_bytes
        files.get(number).zero(at, files.file_bytes)
        start = (number + 1) * files.payload_bytes
    for number in range(slot.durable_offset // files.payload_bytes, files.last + 1):
        file = files.get(number)
        file.sync()
        file.unload()
    return end, next_id


def _tidy(files: Files, examined: Examined) -> None:
    """Finish what a crash interrupted, and give damaged files their header and size again."""
    directory = files.directory
    for draft in drafts_in(directory):
        directory.remove(draft)
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


def _keep_through(files: Files, keep_last: int) -> None:
    """Remove the files ahead of the end that cannot follow it, all but one spare."""
    present = set(numbers_in(files.directory))
    last = min(keep_last, files.last)
    while last >= files.first and not _unbroken(present, keep_last - 1, last):
        last -= 1
    surplus = sorted(number for number in present if number > last)
    if surplus:
        files.remove(surplus)
    files.last = last


def _unbroken(present: set[int], tail: int, last: int) -> bool:
    return all(number in present for number in range(min(tail, last), last + 1))


def _rewrite(files: Files, start: int, end: int) -> None:
    """Store the same bytes again, so that the next sync really writes them."""
    while start < end:
        size = min(_CHUNK_BYTES, end - start)
        files.write(start, files.read(start, size))
        start += size
