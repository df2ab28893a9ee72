"""The queues of a simulated run, and in which shards they are."""

from dataclasses import dataclass, field
from typing import Any

from penstock.cluster.placement import first_shard
from penstock.testing.simulation.schedule import RunSchedule


@dataclass(frozen=True)
class SimulatedQueue:
    """A queue that clients create and use."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    # The queue whose dead letters are here; clients do not push to such a queue.
    source: str | None = None
    # Whether clients change over how many shards it is spread.
    is_spread: bool = False

    @property
    def is_fifo(self) -> bool:
        """Whether its messages have groups."""
        return bool(self.settings.get("fifo"))

    @property
    def dedups_content(self) -> bool:
        """Whether equal bodies are duplicates: clients then push without dedup ids."""
        return bool(self.settings.get("dedup_by_content"))


def name_in(prefix: str, shard: int, shards: int) -> str:
    """A name whose home shard is this one."""
    number = 0
    while first_shard(f"{prefix}{number}", shards) != shard:
        number += 1
    return f"{prefix}{number}"


def make_queues(schedule: RunSchedule, shards: int) -> tuple[SimulatedQueue, ...]:
    """The queues of a run: a standard queue, a FIFO queue, or both, and their dead letters."""
    kinds = schedule.pick([["q"], ["q"], ["f"], ["q", "f"]])
    has_dead = schedule.chance() < 0.6
    is_spread = shards > 1 and schedule.chance() < 0.6
    found: list[SimulatedQueue] = []
    for kind in kinds:
        home = schedule.below(shards)
        name = name_in(kind, home, shards)
        settings: dict[str, Any] = {"visibility_ms": 500}
        if kind == "f":
            settings |= {"fifo": True, "dedup_per_group": True}
        by_content = schedule.chance() < 0.25
        if has_dead:
            step = 0 if schedule.chance() < 0.2 else 1
            dead = name_in(f"{kind}-dead", (home + step) % shards, shards)
            found.append(SimulatedQueue(dead, settings, name, is_spread))
            settings = {**settings, "dead_letter": dead}
            settings["max_receives"] = 1 + schedule.below(2)
        if by_content:
            settings = {**settings, "dedup_by_content": True}
        found.append(SimulatedQueue(name, settings, None, is_spread))
    return tuple(found)
