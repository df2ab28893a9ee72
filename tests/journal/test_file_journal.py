"""A journal in segment files: what `load` raises when a body cannot be read, and why."""

import errno
import os

import pytest

from penstock.core.events import Pushed
from penstock.errors import CorruptEntry, JournalError, UnavailableError
from penstock.journal import file_journal
from penstock.journal.file_journal import FileJournal
from penstock.journal.place import pack_place, position_of
from penstock.journal.segments import Segments

FILE_BYTES = 8192
AT_MS = 1_700_000_000_000


@pytest.fixture
def journal(tmp_path):
    journal = FileJournal(Segments.open(tmp_path, file_bytes=FILE_BYTES, background=False))
    yield journal
    journal.close()


@pytest.fixture
def places(journal, tmp_path):
    """The places of messages in several files; neither content nor files are in memory."""
    found = []
    for number in range(1, 13):
        push = Pushed(AT_MS, 1, number, bytes([number]) * 3_000, size_bytes=3_000)
        found += journal.append([push])[1]
    journal.sync()
    journal._recent.clear()
    # The files are opened again when they are read.
    for number in range(2):
        journal.segments._files._open.pop(number)
    return found


def test_a_body_is_loaded_by_its_place(journal, places):
    assert journal.load(places[0]).body == bytes([1]) * 3_000
    assert journal.load(places[-1]).number == 12


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_without_a_descriptor_or_memory_a_body_is_unavailable_for_the_moment(
    journal, places, monkeypatch, code
):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(UnavailableError, match=r"000000000000\.seg"):
            journal.load(places[0])
    assert journal.load(places[0]).number == 1


def test_loading_a_body_from_a_missing_file_is_a_journal_error(journal, places, tmp_path):
    os.unlink(tmp_path / "000000000000.seg")
    with pytest.raises(JournalError, match=r"000000000000\.seg is missing or cannot be read"):
        journal.load(places[0])
    assert journal.load(places[-1]).number == 12


def test_loading_a_body_from_a_file_that_cannot_be_read_is_a_journal_error(
    journal, places, monkeypatch
):
    def refuse(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(JournalError, match="cannot be read") as caught:
            journal.load(places[0])
    assert not isinstance(caught.value, UnavailableError)


@pytest.mark.parametrize("moved", [1, 64, 10**9])
def test_loading_a_place_without_a_message_is_a_corrupt_entry(journal, places, moved):
    with pytest.raises(CorruptEntry):
        journal.load(pack_place(position_of(places[0]) + moved, 3_000))


def test_a_history_continues_after_files_that_are_dropped_while_it_is_read(
    journal, places, monkeypatch
):
    monkeypatch.setattr(file_journal, "_HISTORY_ENTRIES", 3)
    # Twelve entries, three a slice: the first two slices have nothing of this message.
    events = iter(journal.history(11))
    assert next(events) is None
    journal.segments.drop_before([*journal.segments.entries()][10].offset)
    rest = list(events)
    assert [event.number for event in rest if event is not None] == [11]
    assert journal.segments.quarantined == []
    assert not any(journal.history(1))
