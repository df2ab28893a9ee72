"""A store under random commands, with upkeep between them, kills, and checks of its state.

The reference is an exact replay: every event ever written, from the archive and the journal, is
applied one by one to an empty shard. A recovered state must equal it, contents included.
"""

import random
import shutil
from collections import Counter
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

from penstock.backends.engine import upkeep as upkeep_module
from penstock.backends.engine.store import open_engine
from penstock.clock import ManualClock
from penstock.core.delivery import OUTBOX, VISIBLE
from penstock.core.shard import replay
from penstock.errors import RequestError
from penstock.journal import file_journal as file_module
from penstock.journal import room as room_module
from penstock.journal.reader import JournalReader
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    Pull,
    Purge,
    Push,
    Redrive,
    Release,
)

NAMES = ["plain", "fifo", "lazy", "plain-dead", "fifo-dead", "late"]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"dead_letter": "plain-dead", "max_receives": 2, "visibility_ms": 4_000},
    "fifo": {"fifo": True, "dead_letter": "fifo-dead", "max_receives": 2, "visibility_ms": 3_000},
    "lazy": {
        "delay_ms": 2_000,
        "visibility_ms": 1_000,
        "retention_ms": 60_000,
        "priority_age_ms": 4_000,
    },
    "plain-dead": {},
    "fifo-dead": {"fifo": True},
    "late": {"dedup_by_content": True},
    "remote": {"dead_letter": "away", "max_receives": 1, "visibility_ms": 2_000},
}


def exact_replay(root):
    """The state after all events, of which none may be missing."""
    with JournalReader(root / "store" / "journal", archive=root / "archive") as reader:
        seen = list(reader.events(reader.first_offset))
        assert reader.first_offset == 0
        assert reader.damage == []
        assert sorted({each.entry_id for each in seen}) == list(range(1, reader.next_id))
    return replay(each.event for each in seen)


def plain_state(shard, load=None):
    """All of a state as plain data, each message with its content instead of its place."""
    snapshot = shard.snapshot()
    queues = {}
    for kept in snapshot.queues:
        if kept.number == OUTBOX:
            queues[OUTBOX] = {
                "deliveries": [_plain_delivery(each, load) for each in kept.deliveries],
                "counts": shard.departed.stored_bytes,
                # Messages that departed in the same millisecond are in no particular order.
                "owed": sorted(each[1:] for each in shard.outbox(100_000)),
            }
            continue
        queue = shard.queues[kept.number]
        queues[kept.number] = {
            "settings": (kept.name, kept.settings, kept.created_at_ms, kept.configured_at_ms),
            "deliveries": [_plain_delivery(each, load) for each in kept.deliveries],
            "ahead": [each.number for each in _ahead(queue)],
            "counts": (queue.visible, queue.delayed, queue.in_flight, queue.stored_bytes),
            "dedups": kept.dedups,
            "attempts": kept.attempts,
        }
    return {"next": (snapshot.next_number, snapshot.next_queue), "queues": queues}


def _ahead(queue):
    if queue.settings.fifo:
        return queue.in_state(VISIBLE, 100_000)
    return queue.order.ahead(100_000)


def _plain_delivery(delivery, load):
    pushed = delivery.content
    if isinstance(pushed, int):
        pushed = load(pushed)
    content = (pushed.number, pushed.body, pushed.attributes, pushed.group, pushed.dedup_id)
    assert pushed.number == delivery.number
    plain = {name: getattr(delivery, name) for name in delivery.__struct_fields__}
    return plain | {"content": content}


def first_difference(found, expected):
    """The first difference of two states as plain data; None if they are equal."""
    if found == expected:
        return None
    if found["next"] != expected["next"] or found["queues"].keys() != expected["queues"].keys():
        return found["next"], expected["next"], list(found["queues"]), list(expected["queues"])
    for number, queue in expected["queues"].items():
        for part, value in queue.items():
            other = found["queues"][number][part]
            if other != value:
                if isinstance(value, list):
                    pairs = zip_longest(other, value)
                    return number, part, next(pair for pair in pairs if pair[0] != pair[1])
                return number, part, other, value
    return "?"


class RandomStore:
    """A store under random commands; `root` has it and its archive, and is another after a kill.

    With `departs`, there is a queue whose dead letters go to another shard.
    """

    def __init__(
        self, path: Path, seed: int, *, file_bytes: int = 16_384, departs: bool = False
    ) -> None:
        self.names = [*NAMES, "remote"] if departs else NAMES
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.file_bytes = file_bytes
        self._roots = (path / f"root-{number}" for number in count())
        self.root = next(self._roots)
        self.root.mkdir()
        self.bodies: dict[str, bytes] = {}
        self.claims: dict[tuple[str, str], str] = {}
        self.done: Counter[str] = Counter()
        self.engine = self.open()
        for name in [*NAMES[:3], *self.names[len(NAMES) :]]:
            self.submit(CreateQueue(name, SETTINGS[name]))

    def open(self) -> Any:
        engine = open_engine(
            self.root / "store",
            clock=self.clock,
            archive=self.root / "archive",
            file_bytes=self.file_bytes,
            # No thread creates files while a copy is taken.
            background=False,
        )
        upkeep: Any = engine.upkeep
        upkeep._exclusive = self._between_slices
        engine.shard.elsewhere = {"away": 7}
        return engine

    def submit(self, command):
        try:
            return self.engine.submit(command)
        except RequestError as refused:
            self.done[type(refused).__name__] += 1
            return None

    def act(self) -> None:
        """Does one random operation."""
        actions = [self._push, self._pull, self._settle_claim, self._pass_time, self._rare]
        self.rng.choices(actions, [30, 25, 30, 8, 7])[0]()

    def _push(self) -> None:
        queue = self.rng.choice(self.names)
        body = self.rng.randbytes(self.rng.choice([0, 1, 30, 300, 3_000]))
        options: dict[str, Any] = {}
        if self.rng.random() < 0.3:
            options["dedup_id"] = f"d{self.rng.randrange(40)}"
        if "fifo" in queue or self.rng.random() < 0.3:
            options["group"] = self.rng.choice("xyz")
        if "fifo" not in queue:
            options["priority"] = self.rng.choice([0, 0, 0, 5])
        if self.rng.random() < 0.15:
            options["delay_ms"] = self.rng.randrange(1, 5_000)
        if self.rng.random() < 0.1:
            options["ttl_ms"] = self.rng.randrange(1, 20_000)
        if self.rng.random() < 0.1:
            options["attributes"] = {"kind": "test", "raw": b"\0\1"}
        reply = self.submit(Push(queue, body, **options))
        if reply is not None and not reply.duplicate:
            self.done["push"] += 1
            self.bodies[reply.id] = body

    def _pull(self) -> None:
        queue = self.rng.choice(self.names)
        attempt = f"a{self.rng.randrange(30)}" if self.rng.random() < 0.2 else None
        claims = self.submit(Pull(queue, self.rng.choice([1, 1, 3, 10]), attempt_id=attempt))
        for claim in claims or ():
            self.done["pull"] += 1
            assert claim.body == self.bodies[claim.id]
            self.claims[claim.queue, claim.id] = claim.receipt

    def _settle_claim(self) -> None:
        if not self.claims:
            return
        queue, number = self.rng.choice(sorted(self.claims))
        receipt = self.claims[queue, number]
        kind = self.rng.random()
        if kind < 0.15:
            self.submit(Extend(queue, receipt, self.rng.randrange(1, 10_000)))
            return
        del self.claims[queue, number]
        if kind < 0.5:
            self.submit(Release(queue, receipt, self.rng.choice([0, 0, 2_500])))
        elif self.submit(Delete(queue, receipt)):
            self.done["delete"] += 1

    def _pass_time(self) -> None:
        self.clock.advance(ms=self.rng.choice([1, 500, 1_500, 5_000]))
        self.engine.tick()

    def _rare(self) -> None:
        rng = self.rng
        queue = rng.choice(self.names)
        kind = rng.random()
        if kind < 0.35:
            self.submit(CreateQueue(queue, SETTINGS[queue]))
        elif kind < 0.55:
            to = rng.choice([None, "plain", "late", "plain-dead"])
            if self.submit(Redrive(queue, to, rng.choice([1, 5, 100]))):
                self.done["redrive"] += 1
        elif kind < 0.7:
            self.submit(ConfigureQueue(queue, {"visibility_ms": rng.randrange(500, 9_000)}))
        elif kind < 0.8:
            self.submit(Purge(queue))
        elif kind < 0.87:
            self.submit(DeleteQueue(queue))
            self.done["queue removed"] += 1
        elif "remote" in self.names:
            self._route(rng.choice([1, 3]))

    def _route(self, limit: int) -> None:
        """Does what a router does for departed messages, but does not confirm every arrival."""
        for owed, content in self.engine.departures(limit):
            number = owed.delivery.number
            assert owed.push(content).body == self.bodies[self.engine._ids.show(number)]
            if self.rng.random() < 0.7:
                assert self.engine.arrived(number, owed.delivery.epoch)
                self.done["arrival"] += 1

    def upkeep(self) -> None:
        """Runs a whole pass, with commands and checks of copies between its slices."""
        self.engine.upkeep.run_pass()
        self.done["pass"] += 1

    def _between_slices(self, step):
        for _ in range(self.rng.randrange(12)):
            self.act()
        if self.rng.random() < 0.1:
            self.done["copy during a pass"] += 1
            self.inspect_copy()
        return step()

    def inspect_copy(self) -> None:
        """Opens a copy of what `kill -9` would leave at this moment, and checks its state."""
        copy = self._copy()
        shutil.rmtree(copy)

    def kill(self) -> None:
        """Kills the process, and continues with the store that it left."""
        old, engine = self.root, self.engine
        copy = self._copy(keep=True)
        engine.close()
        shutil.rmtree(old)
        self.root = copy
        self.done["kill"] += 1

    def reopen(self) -> None:
        """Closes the store and opens it again."""
        self.engine.close()
        self.engine = self.open()
        self.done["reopen"] += 1
        self.compare(self.engine, self.root)

    def _copy(self, keep=False):
        copy = next(self._roots)
        shutil.copytree(self.root, copy)
        running = plain_state(self.engine.shard, self.engine.journal.load)
        root, self.root = self.root, copy
        engine = self.open()
        self.root = root
        assert first_difference(plain_state(engine.shard, engine.journal.load), running) is None
        self.compare(engine, copy)
        if keep:
            self.engine = engine
        else:
            engine.close()
        return copy

    def compare(self, engine, root):
        exact = plain_state(exact_replay(root))
        assert first_difference(plain_state(engine.shard, engine.journal.load), exact) is None

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for _ in range(self.rng.randrange(60)):
                self.act()
            kind = self.rng.random()
            if kind < 0.5:
                self.upkeep()
            elif kind < 0.8:
                self.kill()
            else:
                self.reopen()
        self.kill()
        self.engine.close()


def small_slices(monkeypatch):
    """Makes the limits so small that a pass over a small store has many slices."""
    monkeypatch.setattr(upkeep_module, "SLICE", 5)
    monkeypatch.setattr(file_module, "_MARK_BYTES", 2_000)
    monkeypatch.setattr(room_module, "_AMPLE_BYTES", 2_000)
