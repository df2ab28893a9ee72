"""The status of a service's queues: how deep they are, what happens in them, what needs attention.

Every view of queues stands on this: the console in a browser, and other programs for people. It
reads by ordinary commands, so it works over any `LoopService`; what a backend does not report is
None here, and named in `lacking`. Nothing happens on the path of a push or a pull: queues are read
every second while somebody looks, and otherwise once in a bucket, and rates are differences
between counts that were read.

Reading is never more than about a hundredth of a core: the pause after it grows with its time.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping
from operator import gt
from time import perf_counter, thread_time
from typing import Final

import msgspec
from msgspec.structs import astuple, replace

from penstock.backends.loop import LoopService, Steps, result_of
from penstock.errors import PenstockError, QueueNotFound
from penstock.service import (
    MINUTE_MS,
    DescribeQueues,
    QueueCounts,
    QueueInfo,
    QueueSettings,
    QueueStats,
    Stats,
)

# The last hour, in buckets of 20 seconds.
BUCKET_MS: Final = 20_000
BUCKETS: Final = 180
QUEUES_MAX: Final = 10_000
# How often queues are read while somebody looks; elsewhere each of them costs a request.
WATCHED_S: Final = 1.0
WATCHED_ELSEWHERE_S: Final = 5.0
# The pause after reading, as a multiple of what it cost: here the processor time of this thread, as
# a machine that is busy with other programs must not make the pages late; elsewhere the time of the
# store's answers.
_PAUSE_RATIO: Final = 100
_PAUSE_RATIO_ELSEWHERE: Final = 5
_PAGE: Final = 500
_SLICE: Final = 50
# Over how many buckets a queue is judged: five minutes.
_JUDGED: Final = 15
_JUDGED_MS: Final = _JUDGED * BUCKET_MS
# How much more must be pushed than deleted, and how many claims must come back, to be named.
_BEHIND_MIN: Final = 20
_RETURNS_MIN: Final = 10
_COUNTS: Final = QueueCounts.__struct_fields__
_UINT_MAX: Final = 2**32 - 1

# What needs attention, most urgent first, with the sentence for it.
STUCK: Final = 2
WATCH: Final = 1
CALM: Final = 0


class Attention(msgspec.Struct, frozen=True, gc=False):
    """Whether a queue needs a person, and why."""

    level: int
    why: str


_CALM: Final = Attention(CALM, "")
_IDLE: Final = Attention(STUCK, "Messages wait, and nobody pulls.")
_BLOCKED: Final = Attention(STUCK, "Messages wait, and so do consumers: groups are blocked.")
_FULL: Final = Attention(STUCK, "The queue is full: pushes are refused.")
_NO_ROOM: Final = Attention(STUCK, "As many messages are in flight as may be.")
_RETURNS: Final = Attention(WATCH, "Half of the claims end without a delete.")
_PAUSED: Final = Attention(WATCH, "Delivery is paused: pulls get nothing.")
_DEAD: Final = Attention(WATCH, "Dead letters wait for a decision.")
_BEHIND: Final = Attention(WATCH, "More is pushed than deleted.")


class Series:
    """A queue's last hour: for each bucket its depth at the end, and what happened in it."""

    __slots__ = ("_columns", "last")

    def __init__(self, bucket: int, stats: QueueStats) -> None:
        self.last = bucket
        self._columns = {name: array("I", bytes(4 * BUCKETS)) for name in ("depth", "in_flight")}
        if stats.counts is not None:
            self._columns |= {name: array("I", bytes(4 * BUCKETS)) for name in _COUNTS}
        for at in range(BUCKETS):
            self._set(at, stats)

    def _set(self, at: int, stats: QueueStats) -> None:
        self._columns["depth"][at] = min(stats.messages, _UINT_MAX)
        self._columns["in_flight"][at] = min(stats.in_flight, _UINT_MAX)

    def add(self, bucket: int, before: QueueStats, now: QueueStats) -> None:
        """Adds what was read in a bucket; those since the last one were like `before`."""
        for passed in range(max(self.last + 1, bucket - BUCKETS + 1), bucket + 1):
            for column in self._columns.values():
                column[passed % BUCKETS] = 0
            self._set(passed % BUCKETS, before)
        self.last = max(self.last, bucket)
        at = bucket % BUCKETS
        self._set(at, now)
        for name, more in differences(before.counts, now.counts).items():
            column = self._columns[name]
            column[at] = min(column[at] + more, _UINT_MAX)

    def columns(self, count: int = BUCKETS) -> dict[str, list[int]]:
        """The last `count` buckets, oldest first, by name."""
        start = (self.last + 1 - count) % BUCKETS
        return {
            name: [*(column[start:] + column[:start])][:count]
            for name, column in self._columns.items()
        }

    def total(self, name: str, count: int) -> int:
        """How often something happened in the last `count` buckets; 0 if that is not counted."""
        column = self._columns.get(name)
        if column is None:
            return 0
        return sum(column[(self.last - back) % BUCKETS] for back in range(count))

    def is_flat(self) -> bool:
        """Whether nothing happened, so that the series says nothing that the last stats do not."""
        depth, in_flight = self._columns["depth"], self._columns["in_flight"]
        return (
            depth.count(depth[0]) == BUCKETS
            and in_flight.count(in_flight[0]) == BUCKETS
            and not any(any(self._columns[name]) for name in _COUNTS if name in self._columns)
        )


class QueueStatus:
    """One queue as it was read last, and its last hour."""

    __slots__ = (
        "attention",
        "changed_tick",
        "info",
        "oldest_at_ms",
        "series",
        "since_ms",
        "stats",
    )

    def __init__(
        self, info: QueueInfo, stats: QueueStats, oldest_at_ms: int | None, since_ms: int
    ) -> None:
        # What was before is not known: the series is only true from here on.
        self.since_ms = since_ms
        self.info = info
        self.stats = stats
        self.oldest_at_ms = oldest_at_ms
        # None while nothing has changed: most of many queues are idle.
        self.series: Series | None = None
        self.attention = _CALM
        self.changed_tick = 0

    @property
    def settings(self) -> QueueSettings:
        """The queue's settings."""
        return self.info.settings

    def total(self, name: str, count: int = _JUDGED) -> int:
        """How often something happened in the last buckets."""
        return 0 if self.series is None else self.series.total(name, count)


class Status:
    """The queues of one service, read again and again; listeners are called when some changed."""

    def __init__(
        self,
        service: LoopService,
        *,
        in_process: bool,
        queues_max: int = QUEUES_MAX,
        watched_s: float | None = None,
    ) -> None:
        """`in_process`: reading costs no request to another process.

        `watched_s` is how often queues are read while somebody looks.
        """
        self.queues: dict[str, QueueStatus] = {}
        self.at_ms = 0
        # When the last reading that succeeded began: what was created later was seen by none.
        self._began_ms = 0
        # How often the queues were read; a queue has the tick at which it last changed.
        self.tick = 0
        self.gone: list[str] = []
        # Whether there are more queues than are read.
        self.is_partial = False
        self.error = ""
        self._service = service
        self._in_process = in_process
        self._period_s = watched_s or (WATCHED_S if in_process else WATCHED_ELSEWHERE_S)
        self._queues_max = queues_max
        self._listeners: set[Callable[[], None]] = set()
        self._watched = asyncio.Event()
        self._cost_s = 0.0
        self._is_expired = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to read: at once and always in this process, elsewhere while somebody looks."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="status of queues")

    async def stop(self) -> None:
        """Ends reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener()` each time after queues were read; returns a function that ends it."""
        self._listeners.add(listener)
        self._watched.set()

        def leave() -> None:
            self._listeners.discard(listener)
            if not self._listeners:
                self._watched.clear()

        return leave

    @property
    def lacking(self) -> Mapping[str, str]:
        """What this service does not report, each with the reason."""
        lacks = dict(self._service.LACKS)
        if any(each.stats.counts is None for each in self.queues.values()):
            lacks["rates"] = "this store does not count what happens in its queues"
        return lacks

    async def _run(self) -> None:
        while True:
            if not self._in_process:
                await self._watched.wait()
            await result_of(self._service.run(self.read()))
            ratio = _PAUSE_RATIO if self._in_process else _PAUSE_RATIO_ELSEWHERE
            pause_s = max(self._period_s, ratio * self._cost_s)
            if not self._listeners:
                pause_s = max(pause_s, self._before_next_bucket_s())
            if pause_s <= self._period_s:
                await asyncio.sleep(pause_s)
                continue
            # Somebody who begins to look does not wait for the next bucket.
            is_watched = self._watched.is_set()
            try:
                await asyncio.wait_for(_never() if is_watched else self._watched.wait(), pause_s)
            except TimeoutError:
                continue

    def _before_next_bucket_s(self) -> float:
        """How long to wait so that a bucket is read shortly before its end."""
        left_s = (BUCKET_MS - self._service.now_ms() % BUCKET_MS) / 1_000 - WATCHED_S
        return left_s if left_s > 0 else left_s + BUCKET_MS / 1_000

    def expire(self) -> None:
        """What was read is out of date: something was changed."""
        self._is_expired = True

    def fresh(self) -> Steps[None]:
        """Reads the queues if that was not done just now."""
        if self._is_expired or self._service.now_ms() - self.at_ms > 1_000 * self._period_s:
            yield from self.read()

    def read(self) -> Steps[None]:
        """Reads every queue once, and calls the listeners."""
        began_ms = self._service.now_ms()
        try:
            found = yield from self._read_all()
        except PenstockError as error:
            # What was read before stays, with the error beside it; the next reading may succeed.
            self.error = str(error)
        else:
            self.error = ""
            self._fold(found)
            self._began_ms = began_ms
        for listener in list(self._listeners):
            listener()

    def _read_all(self) -> Steps[dict[str, tuple[QueueInfo, QueueStats, int]]]:
        """Reads the queues in slices, between which other requests are answered."""
        found: dict[str, tuple[QueueInfo, QueueStats, int]] = {}
        self._is_expired = False
        after = ""
        cost_clock = thread_time if self._in_process else perf_counter
        cost_s, began_s = 0.0, cost_clock()
        while True:
            infos: list[QueueInfo] = yield DescribeQueues(after=after, limit=_PAGE)
            for number, info in enumerate(infos, 1):
                try:
                    stats: QueueStats = yield Stats(info.queue)
                except QueueNotFound:
                    continue  # deleted since
                found[info.queue] = info, stats, self._service.now_ms()
                if number % _SLICE == 0:
                    cost_s += cost_clock() - began_s
                    yield None
                    began_s = cost_clock()
            self.is_partial = len(infos) == _PAGE and len(found) >= self._queues_max
            if len(infos) < _PAGE or self.is_partial:
                self._cost_s = cost_s + cost_clock() - began_s
                return found
            after = infos[-1].queue

    def _fold(self, found: dict[str, tuple[QueueInfo, QueueStats, int]]) -> None:
        """Adds what was read to what is known."""
        self.tick += 1
        self.at_ms = self._service.now_ms()
        bucket = self.at_ms // BUCKET_MS
        self.gone = [name for name in self.queues if name not in found]
        for name in self.gone:
            del self.queues[name]
        dead_letters = {
            info.settings.dead_letter for info, _, _ in found.values() if info.settings.dead_letter
        }
        for name, (info, stats, at_ms) in found.items():
            oldest_at_ms = None if stats.oldest_age_ms is None else at_ms - stats.oldest_age_ms
            queue = self.queues.get(name)
            if queue is None or queue.info.created_at_ms != info.created_at_ms:
                queue = self.queues[name] = QueueStatus(info, stats, oldest_at_ms, at_ms)
                queue.changed_tick = self.tick
                self._add_beginning(queue, bucket)
            else:
                self._update(queue, info, stats, oldest_at_ms, bucket)
            attention = _attention(queue, name in dead_letters, self.at_ms)
            if attention is not queue.attention:
                queue.attention = attention
                queue.changed_tick = self.tick

    def _add_beginning(self, queue: QueueStatus, bucket: int) -> None:
        """Adds what happened in a queue that is new since the last reading: all that it counts.

        Of others it is not known when it happened, and they begin with this reading.
        """
        created_at_ms = queue.info.created_at_ms
        if not self._began_ms <= created_at_ms <= self.at_ms or not self._began_ms:
            return
        queue.since_ms = created_at_ms
        counts = None if queue.stats.counts is None else QueueCounts()
        empty = replace(
            queue.stats, visible=0, delayed=0, in_flight=0, stored_bytes=0, counts=counts
        )
        if _differs(empty, queue.stats):
            queue.series = Series(bucket, empty)
            queue.series.add(bucket, empty, queue.stats)

    def _update(
        self,
        queue: QueueStatus,
        info: QueueInfo,
        stats: QueueStats,
        oldest_at_ms: int | None,
        bucket: int,
    ) -> None:
        before = queue.stats
        if _differs(before, stats) or info.settings != queue.settings:
            queue.changed_tick = self.tick
            if queue.series is None:
                queue.series = Series(bucket, before)
        if queue.series is not None:
            is_new = bucket > queue.series.last
            queue.series.add(bucket, before, stats)
            if is_new and queue.series.is_flat():
                queue.series = None
        queue.info, queue.stats = info, stats
        if queue.changed_tick == self.tick or oldest_at_ms is None:
            queue.oldest_at_ms = oldest_at_ms

    def changed(self) -> Iterator[QueueStatus]:
        """The queues that changed when they were last read."""
        return (each for each in self.queues.values() if each.changed_tick == self.tick)


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


def differences(before: QueueCounts | None, now: QueueCounts | None) -> dict[str, int]:
    """What happened between two counts, by name; if they began anew, all of the later ones."""
    if now is None:
        return {}
    old = astuple(before or QueueCounts())
    new = astuple(now)
    if any(map(gt, old, new)):
        old = astuple(QueueCounts())
    return {
        name: after - earlier
        for name, earlier, after in zip(_COUNTS, old, new, strict=True)
        if after > earlier
    }


def _differs(one: QueueStats, other: QueueStats) -> bool:
    """Whether anything is different but the age, which changes by itself."""
    return (
        one.visible != other.visible
        or one.in_flight != other.in_flight
        or one.delayed != other.delayed
        or one.waiting_pulls != other.waiting_pulls
        or one.counts != other.counts
        or one.stored_bytes != other.stored_bytes
        or (one.oldest_age_ms is None) != (other.oldest_age_ms is None)
    )


def _attention(queue: QueueStatus, holds_dead_letters: bool, now_ms: int) -> Attention:
    """What a queue needs, judged by the last five minutes."""
    stats, settings = queue.stats, queue.settings
    if settings.messages_max is not None and stats.messages >= settings.messages_max:
        # Before the pause: it is what producers meet.
        return _FULL
    if settings.paused:
        return _PAUSED
    if not stats.messages:
        return _CALM
    if holds_dead_letters:
        return _DEAD
    if settings.in_flight_max is not None and stats.in_flight >= settings.in_flight_max:
        return _NO_ROOM
    age_ms = 0 if queue.oldest_at_ms is None else now_ms - queue.oldest_at_ms
    pulled = queue.total("pulled")
    if stats.visible and age_ms > _JUDGED_MS and not pulled:
        if not stats.waiting_pulls and not stats.in_flight:
            return _IDLE
        if stats.waiting_pulls and settings.fifo:
            return _BLOCKED
    returned = queue.total("returned")
    if returned >= _RETURNS_MIN and 2 * returned >= pulled:
        return _RETURNS
    pushed, deleted = queue.total("pushed"), queue.total("deleted")
    if (
        stats.visible
        and age_ms > MINUTE_MS
        and pushed - deleted >= _BEHIND_MIN
        and 10 * pushed > 11 * deleted
    ):
        return _BEHIND
    return _CALM
