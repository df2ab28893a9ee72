"""A shard as the replicated log tells it: the state of a standby, and what a new owner begins with.

A replica starts from the newest whole snapshot, then applies slot after slot. A standby catches up
again and again, so that it has little left to read when it becomes the owner. It checks that no
slot is missing; if one is, it has another replica of the log answer, and goes on only over a
log without a gap.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.backends.engine.engine import Engine
from penstock.clock import Clock
from penstock.cluster.contents import Contents, FileContents
from penstock.cluster.extent import BrokenChain, ChainPoint, ExtentChain
from penstock.cluster.journal import MARK_BYTES, ReplicatedJournal
from penstock.cluster.log import (
    RETRY_MS,
    Demote,
    LogSlot,
    LogSteps,
    Pause,
    ReadSlots,
    insist,
)
from penstock.cluster.snapshots import load_snapshot, look_at_manifest
from penstock.errors import Fenced, StoreUnusable
from penstock.journal import codec
from penstock.journal.restore import Recovery

# How often a slot is missed at the end of a read before another replica is made to answer.
_MISSES_MAX: Final = 50
# Fewer slots than this are never cut off to limit the bytes: the log ends there.
_AT_END: Final = 8


class ShardReplica:
    """The state of one shard, as far as it was read from the log.

    `directory` is for the snapshot that was loaded and, unless `make_contents` says otherwise, for
    the local copy of the stream. `gaps` counts how often slots were found missing. `mark_bytes` is
    that of the owner's journal.
    """

    def __init__(
        self,
        shard: int,
        directory: Path,
        make_contents: Callable[[int], Contents] | None = None,
        mark_bytes: int = MARK_BYTES,
    ) -> None:
        self.shard = shard
        self.directory = directory
        self.gaps = 0
        self._make_contents = make_contents or self._files
        self._chain: ExtentChain | None = None
        self._recovery = Recovery(None)
        self._contents: Contents | None = None
        self._marks: deque[ChainPoint] = deque()
        self._mark_bytes = mark_bytes
        # Entries before this position are in the snapshot; their content is still needed.
        self._snapshot_position = 0

    def _files(self, first_position: int) -> Contents:
        return FileContents(self.directory / "stream", first_position)

    @property
    def next_slot(self) -> int:
        """The slot that is to be read next; 0 before the first."""
        return 0 if self._chain is None else self._chain.slot

    def catch_up(self, until: int | None = None) -> LogSteps[None]:
        """Reads the log up to this slot, which is known to be kept; without one, as far as it goes.

        Raises StoreUnusable if the log has no whole snapshot any more, or is of another format.
        """
        misses = 0
        while True:
            if self._chain is None:
                yield from self._begin()
            assert self._chain is not None
            if until is not None and self._chain.slot > until:
                return
            slots: list[LogSlot] = yield from insist(ReadSlots(self.shard, self._chain.slot))
            try:
                for number, extent in slots:
                    self._take(self._chain, number, extent)
            except BrokenChain:
                yield from self._mend(self._chain)
                continue
            if until is None and len(slots) < _AT_END:
                # Whoever appends goes on: reading until nothing more comes would never end.
                return
            misses = 0 if slots else misses + 1
            if misses:
                # The replica that answered is behind: that slot was kept.
                if misses % _MISSES_MAX == 0:
                    yield from insist(Demote(self.shard))
                yield Pause(RETRY_MS)

    def take_if_next(self, number: int, extent: bytes) -> None:
        """Takes a slot that is known to be kept without reading it, if it is the next one."""
        if self._chain is not None and self._chain.slot == number:
            self._take(self._chain, number, extent)

    def _begin(self) -> LogSteps[None]:
        """Loads the newest snapshot; the log is to be read from its start."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.directory.glob("snapshot*"):
            left.unlink()
        start, taken = yield from load_snapshot(self.shard, self.directory)
        self.close()
        self._recovery = Recovery(taken)
        self._snapshot_position = 0 if taken is None else taken.outline.offset
        self._contents = self._make_contents(start.position)
        self._marks.clear()
        self._chain = ExtentChain(self.shard, start)

    def _take(self, chain: ExtentChain, number: int, extent: bytes) -> None:
        point = chain.point
        data, entries = chain.take(number, extent)
        is_far = not self._marks or chain.position - self._marks[-1].position >= self._mark_bytes
        if point is not None and data and is_far:
            self._marks.append(point)
        assert self._contents is not None
        if data:
            self._contents.append(data)
        for entry in entries:
            if entry.version != codec.VERSION:
                raise StoreUnusable(
                    f"shard {self.shard}: entry {entry.entry_id} is of the format "
                    f"{entry.version!r}; this version of Penstock reads {codec.VERSION!r}"
                )
            if entry.offset >= self._snapshot_position:
                self._recovery.apply_entry(entry)

    def _mend(self, chain: ExtentChain) -> LogSteps[None]:
        """Slots were missing: they were purged since, or a replica of the log is damaged."""
        self.gaps += 1
        manifest, _ = yield from look_at_manifest(self.shard)
        if manifest.start.slot > chain.slot:
            # A snapshot holds what they held: begin again from there.
            self._chain = None
            return
        yield from insist(Demote(self.shard))
        yield Pause(RETRY_MS)

    def journal(self, term: int) -> ReplicatedJournal:
        """The journal of the owner of this term, whose beginning was read. Raises Fenced."""
        chain, contents = self._chain, self._contents
        assert chain is not None
        assert contents is not None
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
        """The engine of the shard's owner; `make_clock` gets the last instant the log knows of.

        The state belongs to the engine from here on: this replica is not to be used again.
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
