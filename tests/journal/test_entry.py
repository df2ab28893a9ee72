"""The 32-byte header of an entry, compared byte for byte when it is written and when it is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptEntry, InvalidField
from penstock.journal import entry
from penstock.journal.entry import StoredEntry

GOLDEN = {
    (
        "PENSTK01",
        0,
        1,
        b"",
    ): "39ffd899 50454e53544b3031 00000000 00000000 0100000000000000 00000000",
    ("PQUEUE01", 60, 258, b"hello"): (
        "5fbf44af 5051554555453031 05000000 3c000000 0201000000000000 86a61036 68656c6c6f"
    ),
    ("\xff" * 8, 2**32 - 1, 2**64 - 1, b"\0"): (
        "cb74732c ffffffffffffffff 01000000 ffffffff ffffffffffffffff 8def02d2 00"
    ),
}


@pytest.mark.parametrize(("fields", "digits"), GOLDEN.items())
def test_golden_entries_are_written_and_read_as_these_bytes(fields, digits):
    version, ttl_s, entry_id, data = fields
    tag = version.encode("latin-1")
    packed = bytes.fromhex(digits)
    assert entry.pack(tag, ttl_s, entry_id, data).hex() == packed.hex()
    assert entry.unpack(packed) == StoredEntry(entry_id, 0, tag, ttl_s, data)


@given(
    st.binary(min_size=8, max_size=8).filter(lambda tag: tag[0]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=600),
)
def test_any_entry_is_read_as_it_was_written(version, ttl_s, entry_id, data):
    packed = entry.pack(version, ttl_s, entry_id, data)
    assert len(packed) == entry.HEADER_BYTES + len(data)
    assert entry.unpack(packed) == StoredEntry(entry_id, 0, version, ttl_s, data)


def test_every_flipped_bit_of_an_entry_is_detected():
    packed = entry.pack(b"PENSTK01", 7, 9, b"a small body")
    for bit in range(len(packed) * 8):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptEntry):
            entry.unpack(bytes(damaged))


def test_every_truncated_entry_is_detected():
    packed = entry.pack(b"PENSTK01", 7, 9, b"a small body")
    for size in range(len(packed)):
        with pytest.raises(CorruptEntry):
            entry.unpack(packed[:size])


@pytest.mark.parametrize("size", [0, 31, 32, 64, 4096])
def test_zeroes_are_not_read_as_an_entry(size):
    assert entry.unpack_header(bytes(size)) is None


@pytest.mark.parametrize("version", [b"", b"SHORT", b"TOO LONG.", b"\0ENSTK01"])
def test_a_version_that_is_not_eight_bytes_is_refused(version):
    with pytest.raises(InvalidField, match="eight bytes"):
        entry.pack(version, 0, 1, b"")


@pytest.mark.parametrize("ttl_s", [-1, 2**32])
def test_a_time_to_live_that_does_not_fit_is_refused(ttl_s):
    with pytest.raises(InvalidField, match="at most"):
        entry.pack(b"PENSTK01", ttl_s, 1, b"")
