"""The queues of a simulated run, and in which shards they are."""

import itertools
from dataclasses import dataclass, field
from typing import Any

from penstock.cluster.placement import first_shard, grown_shard
from tests.simulation.schedule import RunSchedule


@dataclass(frozen=True)
class SimulatedQueue:
    """A queue that clients create and use."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    # The queue whose dead letters are here; clients do not push to such a queue.
    source: str | None = None
    # Whether clients change in which shards it is.
    is_spread: bool = False

    @property
    def is_fifo(self) -> bool:
        """Whether its messages have groups."""
        return bool(self.settings.get("fifo"))

    @property
    def may_be_in_several(self) -> bool:
        """Whether it can be spread over several shards, and not only be moved to another one."""
        return not self.is_fifo or bool(self.settings.get("dedup_per_group"))

    @property
    def dedups_content(self) -> bool:
        """Whether equal bodies are duplicates: clients then push without dedup ids."""
        return bool(self.settings.get("dedup_by_content"))


def name_in(prefix: str, shard: int, homes: int, shards: int = 0) -> str:
    """A name whose home shard is this one; with `shards`, of a queue that leaves it in a cluster
    that has grown to so many."""
    for number in itertools.count():
        name = f"{prefix}{number}"
        is_home = first_shard(name, homes) == shard
        if is_home and (shards <= homes or grown_shard(name, homes, shards) != shard):
            return name
    raise AssertionError


def make_queues(schedule: RunSchedule, homes: int, shards: int) -> tuple[SimulatedQueue, ...]:
    """The queues of a run: a standard queue, a FIFO queue, or both, and their dead letters.

    The cluster is created with `homes` shards, and may grow to `shards`.
    """
    kinds = schedule.pick([["q"], ["q"], ["f"], ["q", "f"]])
    has_dead = schedule.chance() < 0.6
    is_spread = shards > 1 and schedule.chance() < (0.6 if shards == homes else 0.3)
    found: list[SimulatedQueue] = []
    for kind in kinds:
        home = schedule.below(homes)
        name = name_in(kind, home, homes, shards)
        settings: dict[str, Any] = {"visibility_ms": 500}
        if kind == "f":
            settings |= {"fifo": True, "dedup_per_group": schedule.chance() < 0.7}
        by_content = schedule.chance() < 0.25
        if has_dead:
            step = 0 if schedule.chance() < 0.2 else 1
            dead = name_in(f"{kind}-dead", (home + step) % homes, homes, shards)
            found.append(SimulatedQueue(dead, settings, name, is_spread))
            settings = {**settings, "dead_letter": dead}
            settings["max_receives"] = 1 + schedule.below(2)
        if by_content:
            settings = {**settings, "dedup_by_content": True}
        found.append(SimulatedQueue(name, settings, None, is_spread))
    return tuple(found)
