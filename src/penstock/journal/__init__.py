"""Where events become durable: the seam between the engine and its storage.

An engine appends the events of one command at a time and answers when the journal says they are
durable. A journal assigns each append its sequence, the order everything else agrees on.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from penstock.core.events import AnyEvent, Pushed
from penstock.errors import UnsupportedOperation
from penstock.service import Command


class Journal(Protocol):
    """What an engine needs of its storage."""

    durable_sequence: int
    keeps_nothing: bool

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        """Takes the events as one entry that is kept whole or not at all.

        Returns its sequence, and for each `Pushed` in it the place by which `load` finds it
        again; no places if the journal keeps none. Raises JournalError: the engine then stops.
        """
        ...

    def make_room(self, command: Command[Any]) -> None:
        """Makes sure that what the command may append fits. Raises StoreFull."""
        ...

    def has_room(self, events: int) -> bool:
        """Whether that many events without content will fit."""
        ...

    def load(self, place: int) -> Pushed:
        """The event that was appended at this place.

        Raises CorruptEntry if it is damaged, JournalError if it cannot be read, and
        UnavailableError if it cannot be read now, as without a free descriptor.
        """
        ...

    def wait(self, sequence: int) -> None:
        """Blocks until that entry is durable. Raises JournalError if it never will be."""
        ...

    def notify(self, sequence: int, done: Callable[[], None]) -> None:
        """Calls `done`, from any thread, once that entry is durable or never will be."""
        ...

    def history(self, number: int) -> Iterable[AnyEvent | None]:
        """The events of one message that the journal still has, oldest first.

        In between, None each time that some milliseconds were spent on reading: the caller may use
        the journal for something else then.
        """
        ...

    def close(self) -> None:
        """Makes durable what was appended, and closes the storage."""
        ...


class StoredJournal(Journal, Protocol):
    """What upkeep needs of a journal that keeps its entries and can drop the oldest of them.

    A position says where in the journal something stands: the part of a place that `core` does
    not read. Positions rise from entry to entry, by as many as an entry has bytes.
    """

    shard: int
    """Whose events these are."""
    term: int
    """The term of the owner that appends."""
    growth_limit: int
    """The position at which `grown` is called, once."""
    grown: Callable[[], None]
    """Called when the journal has passed `growth_limit`, or has no room left."""

    @property
    def first_position(self) -> int:
        """Where the journal begins: what stood before it was dropped."""
        ...

    @property
    def end_position(self) -> int:
        """Where the next entry will stand."""
        ...

    @property
    def region_bytes(self) -> int:
        """Room comes free in regions of this size: dropping less frees nothing."""
        ...

    def count_held_by(self, count: Callable[[], int]) -> None:
        """Keeps room back for as many messages as this says to leave."""
        ...

    def check_usable(self) -> None:
        """Raises JournalError if nothing more can be appended, as after a failed sync."""
        ...

    def ensure_room(self, size_bytes: int, *, reserved: bool = False) -> None:
        """Makes sure that so much fits, from the reserve if allowed. Raises StoreFull."""
        ...

    def prepare_room(self) -> None:
        """Makes room ahead of time; takes its time. Raises StoreFull."""
        ...

    def sync(self) -> int:
        """Makes durable what was appended; the sequence that is durable then."""
        ...

    def entry_before(self, position: int) -> int:
        """Where an entry at or not long before `position` stands, at which the journal may begin.

        The first position if none is known.
        """
        ...

    def drop_before(self, position: int, archive: str | os.PathLike[str] | None = None) -> None:
        """Lets the journal begin there; what comes free is kept in `archive` or removed.

        Raises JournalError or StoreFull, with nothing dropped.
        """
        ...


class MemoryJournal:
    """A journal that keeps nothing, or the last few entries for `history`.

    An append is durable at once: there is nothing that a crash could leave behind.
    """

    def __init__(self, history_entries: int = 0) -> None:
        self.durable_sequence = 0
        self.keeps_nothing = not history_entries
        self._kept: deque[Sequence[AnyEvent]] | None = None
        if history_entries:
            self._kept = deque(maxlen=history_entries)

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        self.durable_sequence += 1
        if self._kept is not None:
            self._kept.append(events)
        return self.durable_sequence, ()

    def make_room(self, command: Command[Any]) -> None:
        pass

    def has_room(self, events: int) -> bool:
        return True

    def load(self, place: int) -> Pushed:
        raise AssertionError("a memory journal hands out no places")

    def wait(self, sequence: int) -> None:
        pass

    def notify(self, sequence: int, done: Callable[[], None]) -> None:
        done()

    def history(self, number: int) -> list[AnyEvent]:
        if self._kept is None:
            raise UnsupportedOperation(
                "history: this memory engine keeps none; open it as memory:?history=10000"
            )
        return [event for entry in self._kept for event in entry if concerns(event, number)]

    def close(self) -> None:
        if self._kept is not None:
            self._kept.clear()


def concerns(event: AnyEvent, number: int) -> bool:
    """Whether the event is about this one message."""
    return getattr(event, "number", None) == number
