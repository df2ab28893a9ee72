"""The index of a journal: the history of a message is found without reading all of it."""

import random
import re

import pytest

from penstock.core.events import Claimed, Deleted, Pushed
from penstock.errors import Overloaded
from penstock.journal.file_journal import FileJournal
from penstock.journal.index import NumberIndex
from penstock.journal.segments import Segments


def open_journal(path):
    return FileJournal(Segments.open(path, background=False), "os", background=False)


def lives(journal, count, body, seed=1):
    """Writes the lives of some messages, interleaved; returns the events of each."""
    draw = random.Random(seed)
    events = {
        number: [
            Pushed(number, 1, number, body, size_bytes=len(body)),
            Claimed(number, 1, number, 1, 5, None, f"worker {number % 3}"),
            Deleted(number, 1, number, 1),
        ]
        for number in range(1, count + 1)
    }
    left = {number: list(each) for number, each in events.items()}
    while left:
        number = draw.choice([*left][:50])
        journal.append([left[number].pop(0)])
        if not left[number]:
            del left[number]
    return events


def found(journal, number):
    return [event for event in journal.history(number) if event is not None]


def without_bodies(events):
    return [type(event).__name__ for event in events]


@pytest.mark.parametrize("reopen", [False, True])
def test_every_history_is_the_same_as_without_an_index(tmp_path, reopen):
    journal = open_journal(tmp_path)
    events = lives(journal, 300, b"x" * 20_000)
    if reopen:
        journal.sync()
        journal.close()
        journal = open_journal(tmp_path)
        for _ in journal.replayed(None):
            pass
    for _ in range(2):
        # The second time from the index alone.
        for number in (1, 2, 150, 299, 300):
            assert without_bodies(found(journal, number)) == without_bodies(events[number])
    assert found(journal, 301) == []
    assert len(journal._index._parts) >= 5
    journal.close()


def test_a_history_reads_only_the_parts_that_have_the_message(tmp_path):
    journal = open_journal(tmp_path)
    lives(journal, 400, b"x" * 20_000)
    read = 0
    entries = journal.segments.entries

    def counted(*bounds):
        nonlocal read
        for entry in entries(*bounds):
            read += 1
            yield entry

    journal.segments.entries = counted
    assert len(found(journal, 200)) == 3
    assert 3 <= read <= 600 < 1_200
    journal.close()


def test_parts_are_found_dropped_and_kept_apart():
    index = NumberIndex()
    index.close_part(1_000)
    index.numbers += [7, 5, 2**40]
    index.close_part(2_000)
    index.numbers += [9]
    index.close_part(3_000)
    index.add(0, 1_000, [1])
    first, second = index.part_at(1_000), index.part_at(2_000)
    assert first is not None
    assert second is not None
    assert [number for number in (5, 6, 7, 2**40) if first.has(number)] == [5, 7, 2**40]
    assert second.has(9)
    assert not second.has(8)
    assert index.known_after(500, 9_000) == 1_000
    assert index.known_after(2_500, 9_000) == 3_000
    index.drop_before(2_000)
    assert index.part_at(1_000) is None
    assert index.part_at(2_000) == second


def test_a_journal_that_was_opened_is_indexed_step_by_step_before_anybody_asks(tmp_path):
    journal = open_journal(tmp_path)
    events = lives(journal, 300, b"x" * 20_000)
    journal.sync()
    journal.close()
    journal = open_journal(tmp_path)
    steps = sum(1 for _ in journal.index_rest())
    assert steps >= 5
    read = 0
    entries = journal.segments.entries

    def counted(*bounds):
        nonlocal read
        for entry in entries(*bounds):
            read += 1
            yield entry

    journal.segments.entries = counted
    assert without_bodies(found(journal, 150)) == without_bodies(events[150])
    assert 3 <= read <= 450 < 900
    journal.close()


def test_a_history_ends_with_the_end_of_the_message(tmp_path):
    journal = open_journal(tmp_path)
    events = lives(journal, 300, b"x" * 20_000)
    journal.sync()
    journal.close()
    journal = open_journal(tmp_path)
    assert without_bodies(found(journal, 1)) == without_bodies(events[1])
    # Of the parts behind its deletion none was read.
    assert len(journal._index._parts) <= 2
    journal.close()


def test_a_history_before_the_index_is_complete_ends_soon_and_goes_on_when_asked_again(tmp_path):
    journal = open_journal(tmp_path)
    events = lives(journal, 300, b"x" * 20_000)
    journal.sync()
    journal.close()
    journal = open_journal(tmp_path)
    journal.unindexed_s_max = 0
    parts: list[int] = []
    told = None
    while told is None:
        try:
            told = found(journal, 300)
        except Overloaded as error:
            parts += map(int, re.findall(r"is being read, (\d+)% so far", str(error)))
    # Each question reads another part, and none is read twice.
    assert len(parts) >= 4
    assert parts == sorted(set(parts))
    assert without_bodies(told) == without_bodies(events[300])
    journal.close()
