"""An engine on a manual clock whose events and state a test can inspect."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.backends.engine.engine import Engine
from penstock.clock import ManualClock
from penstock.core.events import AnyEvent
from penstock.core.shard import ShardState
from penstock.journal import MemoryJournal
from penstock.service import Command


class ListJournal(MemoryJournal):
    """A memory journal that keeps every event."""

    def __init__(self) -> None:
        super().__init__(history_entries=1)
        self.events: list[AnyEvent] = []

    def append(self, events: Sequence[AnyEvent]) -> tuple[int, Sequence[int]]:
        self.events.extend(events)
        return super().append(events)


class ObservedEngine:
    """The engine, its clock, its events and its state."""

    def __init__(self, identity: bytes | None = None) -> None:
        self.clock = ManualClock()
        self.journal = ListJournal()
        self.engine = Engine(self.journal, self.clock, identity=identity)

    @property
    def shard(self) -> ShardState:
        return self.engine.shard

    def submit(self, command: Command[Any]) -> Any:
        return self.engine.submit(command)


def as_bytes(shard: ShardState) -> bytes:
    return msgspec.msgpack.encode(shard.snapshot())
