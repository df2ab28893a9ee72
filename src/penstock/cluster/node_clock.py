"""The time of a process of the cluster, on machines whose clocks may be wrong.

A shard's time never runs back, but each new owner continues it by its own clock. One whose clock is
days ahead would end all claims and expire all messages, for good. So a process compares its clock
with those of the NATS servers when it starts, and takes the middle one; from then on its time is
monotonic, and a jump of the machine's clock changes nothing.
"""

import statistics
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from penstock.clock import SystemClock
from penstock.cluster.jetstream import JetStream
from penstock.output import logger

# A smaller difference may be the time that the answer took.
_APART_MS_MAX: Final = 10_000
_logger: Final = logger("penstock.cluster")


class NodeClock:
    """The time of a node; `ahead_ms` is how far its machine is ahead of it, 0 if only a little."""

    def __init__(self, ahead_ms: int = 0) -> None:
        self.ahead_ms = ahead_ms
        self.now_ms = SystemClock(wall_ms=_wall_ms() - ahead_ms).now_ms

    def for_shard(self, last_ms: int) -> SystemClock:
        """The clock of a shard whose last event was at `last_ms`."""
        return SystemClock(last_ms, wall_ms=self.now_ms())


async def open_clock(replicated: JetStream, shards: int) -> NodeClock:
    """The time of this process, by its own clock and those of the NATS servers that answer."""
    ahead: dict[str, int] = {}
    for info in await replicated.stream_infos(shards):
        ahead.setdefault(*_ahead_of(info))
    ahead_ms = middle(ahead.values())
    if ahead_ms:
        direction = "ahead of" if ahead_ms > 0 else "behind"
        _logger.warning(
            "the clock of this machine is %d s %s those of the NATS servers; their time is used",
            abs(ahead_ms) // 1_000,
            direction,
        )
    return NodeClock(ahead_ms)


def _ahead_of(info: dict[str, Any]) -> tuple[str, int]:
    """The NATS server that answered, and how far this machine's clock is ahead of it."""
    leader = str((info.get("cluster") or {}).get("leader", ""))
    theirs_ms = round(datetime.fromisoformat(info["ts"]).timestamp() * 1_000)
    return leader, info["answered_ms"] - theirs_ms


def middle(ahead_ms: Iterable[int]) -> int:
    """How far this machine is ahead of the middle one of all clocks; 0 if only a little.

    Of an even number of clocks the later one of the middle is not taken: time that is behind only
    delays, and time that is ahead expires messages.
    """
    found = statistics.median_high([0, *ahead_ms])
    return found if abs(found) > _APART_MS_MAX else 0


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
