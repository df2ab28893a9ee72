"""The state of a shard as read from the replicated log: for standbys and for takeovers.

A replica starts from the newest complete snapshot, then applies one slot after another. A standby
catches up repeatedly, so that little is left to read when it becomes the owner. The replica checks
that no slot is missing. If one is, it makes another server the leader of the log and reads from
that one; it never continues past a gap.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.backends.engine.engine import Engine
from penstock.clock import Clock
from penstock.cluster.extent import BrokenChain, ChainPoint, ExtentChain
from penstock.cluster.journal import MARK_BYTES, ReplicatedJournal
from penstock.cluster.log import (
    READ_SLOTS_MAX,
    RETRY_MS,
    Demote,
    LogSlot,
    LogSteps,
    Pause,
    ReadSlots,
    until_answered,
)
from penstock.cluster.snapshots import load_snapshot, read_manifest
from penstock.cluster.stream_copy import FileCopy, StreamCopy
from penstock.errors import Fenced, StoreUnusable
from penstock.journal import codec
from penstock.journal.entry import StoredEntry
from penstock.journal.restore import Recovery

# After this many reads that lack a slot which must exist, another server is made the leader.
_MISSES_MAX: Final = 50
# After this many slots, or this many bytes of their entries, a node serves its other shards: about
# 0.5 ms. An append of theirs waits for several such steps.
_SLOTS_PER_STEP: Final = 10
_BYTES_PER_STEP: Final = 8 * 1024
# A standby reads so many slots at once, which takes about 5 ms, and then pauses for as long: no
# client waits for it, but clients of other shards wait for its node. A takeover reads more at once.
_STANDBY_SLOTS: Final = 100
_STANDBY_PAUSE_MS: Final = 5
# While reading is paused, this is checked again after this time.
_PAUSED_MS: Final = 5
# A read of fewer slots was not cut short by the limit of bytes: the log ends there.
_SLOTS_AT_END: Final = 8


class ShardReplica:
    """The state of one shard, up to the slot that was read last.

    `directory` is for the snapshot that was loaded and, unless `make_contents` is given, for the
    local copy of the stream. `gaps` counts how often slots were missing. `mark_bytes` is that of
    the owner's journal.
    """

    def __init__(
        self,
        shard: int,
        directory: Path,
        make_contents: Callable[[int], StreamCopy] | None = None,
        mark_bytes: int = MARK_BYTES,
    ) -> None:
        self.shard = shard
        self.directory = directory
        self.gaps = 0
        # Whether reading has to wait, for work of the node that clients wait for (`standby`).
        self.is_paused: Callable[[], bool] = never_paused
        self._make_contents = make_contents or self._files
        self._chain: ExtentChain | None = None
        self._recovery = Recovery(None)
        self._contents: StreamCopy | None = None
        self._marks: deque[ChainPoint] = deque()
        self._mark_bytes = mark_bytes
        # Entries of the last slot that are still to be applied. Reading may end between them, if
        # its task is cancelled, and goes on there.
        self._unapplied: deque[StoredEntry] = deque()
        self._step_bytes = 0
        # Entries before this position are in the snapshot, except for the bodies of messages.
        self._snapshot_position = 0

    def _files(self, first_position: int) -> StreamCopy:
        return FileCopy(self.directory / "stream", first_position)

    @property
    def next_slot(self) -> int:
        """The slot to read next; 0 before the first read."""
        return 0 if self._chain is None else self._chain.slot

    def catch_up(self, until: int | None = None) -> LogSteps[None]:
        """Reads the log up to slot `until`, which is known to be kept; with None, up to its end.

        Raises StoreUnusable if no snapshot is complete, or an entry has another format.
        """
        misses = 0
        while True:
            if self._chain is None:
                yield from self._begin()
            assert self._chain is not None
            yield from self._apply_all()
            if until is not None and self._chain.slot > until:
                return
            limit = READ_SLOTS_MAX if until is not None else _STANDBY_SLOTS
            request = ReadSlots(self.shard, self._chain.slot, limit)
            slots: list[LogSlot] = yield from until_answered(request)
            try:
                for count, (number, extent) in enumerate(slots, 1):
                    self._read_slot(self._chain, number, extent)
                    yield from self._apply_all()
                    if count % _SLOTS_PER_STEP == 0:
                        yield from self._give_turn()
            except BrokenChain:
                yield from self._mend(self._chain)
                continue
            if until is None:
                if len(slots) < _SLOTS_AT_END:
                    # The owner appends meanwhile: reading until nothing is left might never end.
                    return
                yield Pause(_STANDBY_PAUSE_MS)
            misses = 0 if slots else misses + 1
            if misses:
                # The server that answered lags: slot `until` exists.
                if misses % _MISSES_MAX == 0:
                    yield from until_answered(Demote(self.shard))
                yield Pause(RETRY_MS)

    def _give_turn(self) -> LogSteps[None]:
        """Gives the event loop a turn: it serves other shards, too."""
        yield Pause(0)
        while self.is_paused():
            yield Pause(_PAUSED_MS)

    def take_if_next(self, number: int, extent: bytes) -> None:
        """Applies a slot that is known to be kept without reading it, if it is the next one."""
        if self._chain is not None and self._chain.slot == number and not self._unapplied:
            self._read_slot(self._chain, number, extent)
            while self._unapplied:
                self._apply(self._unapplied.popleft())

    def _begin(self) -> LogSteps[None]:
        """Loads the newest snapshot, and prepares to read the log from the manifest's start."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.directory.glob("snapshot*"):
            left.unlink()
        start, taken = yield from load_snapshot(self.shard, self.directory)
        self.close()
        self._recovery = Recovery(taken)
        self._snapshot_position = 0 if taken is None else taken.outline.offset
        self._contents = self._make_contents(start.position)
        self._marks.clear()
        self._unapplied.clear()
        self._chain = ExtentChain(self.shard, start)

    def _read_slot(self, chain: ExtentChain, number: int, extent: bytes) -> None:
        point = chain.point
        data, entries = chain.read(number, extent)
        is_far = not self._marks or chain.position - self._marks[-1].position >= self._mark_bytes
        if point is not None and data and is_far:
            self._marks.append(point)
        assert self._contents is not None
        if data:
            self._contents.append(data)
        self._unapplied.extend(entries)

    def _apply_all(self) -> LogSteps[None]:
        """Applies the entries of the last slot. Raises StoreUnusable if one has another format."""
        while self._unapplied:
            if self._step_bytes >= _BYTES_PER_STEP:
                self._step_bytes = 0
                yield from self._give_turn()
            self._step_bytes += len(self._unapplied[0].data)
            self._apply(self._unapplied[0])
            self._unapplied.popleft()

    def _apply(self, entry: StoredEntry) -> None:
        if entry.version != codec.VERSION:
            raise StoreUnusable(
                f"shard {self.shard}: entry {entry.entry_id} has the format "
                f"{entry.version!r}; this version of Penstock reads {codec.VERSION!r}"
            )
        if entry.offset >= self._snapshot_position:
            self._recovery.apply_entry(entry)

    def _mend(self, chain: ExtentChain) -> LogSteps[None]:
        """Handles missing slots: they were purged meanwhile, or a server's copy is damaged."""
        self.gaps += 1
        manifest, _ = yield from read_manifest(self.shard)
        if manifest.start.slot > chain.slot:
            # A later snapshot includes them: begin again with that.
            self._chain = None
            return
        yield from until_answered(Demote(self.shard))
        yield Pause(RETRY_MS)

    def journal(self, term: int) -> ReplicatedJournal:
        """The journal for the owner of this term, once its first extent was read. Raises Fenced."""
        chain, contents = self._chain, self._contents
        assert chain is not None
        assert contents is not None
        assert not self._unapplied
        end = chain.point
        if chain.term != term or end is None:
            raise Fenced(f"shard {self.shard}: term {term} was replaced by term {chain.term}")
        return ReplicatedJournal(self.shard, term, contents, end, self._marks, self._mark_bytes)

    def engine(
        self,
        journal: ReplicatedJournal,
        make_clock: Callable[[int], Clock],
        identity: bytes,
        key: bytes,
    ) -> Engine:
        """The engine for the shard's owner; `make_clock` gets the last instant in the log.

        The engine takes the state over: this replica must not be used again.
        """
        state = self._recovery.finish()
        state.number = self.shard
        self._contents = None
        return Engine(
            journal,
            make_clock(self._recovery.last_ms),
            shard=state,
            identity=identity,
            key=key,
        )

    def close(self) -> None:
        """Removes the local copy."""
        if self._contents is not None:
            self._contents.close()
            self._contents = None


def never_paused() -> bool:
    """The `is_paused` of a replica that is not a standby's."""
    return False
