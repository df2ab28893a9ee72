"""Journals make events durable: the interface between the engine and its storage.

An engine appends the events of one command at a time, and answers when they are durable. Each
append gets a sequence from the journal, which is the order of all events.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

from penstock.core.events import AnyEvent, Pushed
from penstock.errors import UnsupportedOperation
from penstock.service import Command

# The number by which `history` gives the events of queues.
QUEUES: Final = 0


class Journal(Protocol):
    """The storage that an engine needs."""

    durable_sequence: int
    keeps_nothing: bool

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        """Appends the events as one entry, which is stored completely or not at all.

        Returns its sequence, and for each `Pushed` in it the place that `load` takes; no places if
        the journal keeps none. Raises JournalError: the engine then stops.
        """
        ...

    def make_room(self, command: Command[Any]) -> None:
        """Makes room for all that the command may append. Raises StoreFull."""
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
        """The events of one message that the journal still has, oldest first; 0: of all queues.

        Yields None each time that reading took some milliseconds, so that the caller can do other
        work on the journal in between. Raises Overloaded, which says how far it is, when it has
        read for long what is not indexed yet: the next call goes on from there.
        """
        ...

    def close(self) -> None:
        """Makes durable what was appended, and closes the storage."""
        ...


class StoredJournal(Journal, Protocol):
    """The journal that upkeep needs: one that keeps its entries and can drop the oldest of them.

    A position is a number of bytes from the beginning of the journal: the part of a place that
    `core` does not read.
    """

    def index_rest(self) -> Iterator[None]:
        """Prepares what was there at the opening for `history`, some milliseconds in each step."""
        ...

    shard: int
    """The number of the shard whose events these are."""
    term: int
    """The term of the owner that appends."""
    growth_limit: int
    """The position at which `grown` is called, once."""
    grown: Callable[[], None]
    """Called when the journal has passed `growth_limit`, or has no room left."""
    syncs_snapshots: bool
    """Whether the file of a snapshot must be durable; not if the snapshot is stored elsewhere."""

    @property
    def first_position(self) -> int:
        """Where the journal begins; entries before it were dropped."""
        ...

    @property
    def end_position(self) -> int:
        """Where the next entry will begin."""
        ...

    @property
    def region_bytes(self) -> int:
        """The size of a region, which is dropped as a whole: dropping less frees no room."""
        ...

    def set_message_counter(self, count: Callable[[], int]) -> None:
        """Sets the function that counts the messages for whose deletes room is kept back."""
        ...

    def check_usable(self) -> None:
        """Raises JournalError if nothing more can be appended, as after a failed sync."""
        ...

    def ensure_room(self, size_bytes: int, *, reserved: bool = False) -> None:
        """Makes room for so many bytes, from the reserve if allowed. Raises StoreFull."""
        ...

    def prepare_room(self) -> None:
        """Makes room ahead of time; it may take long. Raises StoreFull."""
        ...

    def sync(self) -> int:
        """Makes durable what was appended; returns the sequence that is durable then."""
        ...

    def entry_before(self, position: int) -> int:
        """The beginning of an entry at or shortly before `position`; the journal may begin there.

        The first position if no such entry is known.
        """
        ...

    def drop_before(self, position: int, archive: str | os.PathLike[str] | None = None) -> None:
        """Drops what is before this position: regions are moved to `archive`, or removed.

        Raises JournalError or StoreFull, with nothing dropped.
        """
        ...


class MemoryJournal:
    """A journal that keeps nothing, or the last few entries for `history`.

    An append counts as durable at once: nothing of it is meant to survive the process.
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
    """Whether the event is about this one message, or with 0 about a queue as a whole."""
    return getattr(event, "number", 0) == number
