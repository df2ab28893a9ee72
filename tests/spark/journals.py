"""Writes journals from given events, valid or not, for the pipeline to read."""

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.core.events import AnyEvent
from penstock.journal import codec
from penstock.journal.header_page import PAGE_BYTES
from penstock.journal.segments import Segments

FILE_BYTES = 64 * 1024
FORMAT = b"penstock store, format 1\n"


def write_store(
    store: Path,
    entries: Sequence[Sequence[AnyEvent]],
    *,
    term: int = 0,
    shard: int = 0,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Appends each of these groups of events as one entry to the store, made if need be."""
    store.mkdir(exist_ok=True)
    (store / "store").write_bytes(FORMAT)
    with Segments.open(store / "journal", file_bytes=file_bytes, background=False) as segments:
        for events in entries:
            data, _ = codec.encode(events, shard, term)
            segments.append([data], version=codec.VERSION)
    return store


def flip(store: Path, offset: int) -> None:
    """Damages one byte of the stream."""
    files = sorted((store / "journal").glob("*.seg"))
    payload_bytes = os.path.getsize(files[0]) - PAGE_BYTES
    number, within = divmod(offset, payload_bytes)
    path = store / "journal" / f"{number:012d}.seg"
    with path.open("r+b") as file:
        file.seek(PAGE_BYTES + within)
        byte = file.read(1)[0]
        file.seek(PAGE_BYTES + within)
        file.write(bytes([byte ^ 0xFF]))
