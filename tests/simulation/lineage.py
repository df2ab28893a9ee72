"""The rules about messages that concern several shards.

A message has a body that no other push has. It may come to be in several shards, one after another:
a dead letter is pushed to its queue in another shard, and a redrive pushes it back, as new messages
with the same body. So what clients count as one message is all that have one body.

    dedup        a dedup id gives one message of a queue within its window, in whichever shard
    dead letter  one message for each departure; the departure ends only once that message is kept
    redrive      one message for each time that it came to be in a dead-letter queue
    group        its messages are in one shard at every instant, and are claimed in order
"""

from collections import Counter
from typing import Final

from penstock.core.events import AnyEvent, Arrived, Claimed, Departed, Moved, Pushed
from penstock.service import DEDUP_WINDOW_MS, QueueSettings
from tests.simulation.schedule import RunSchedule

VISIBLE: Final = "visible"
DELAYED: Final = "delayed"
IN_FLIGHT: Final = "in flight"
GONE: Final = "gone"
DEPARTED: Final = "departed"
# A queue by its name, and a body or a group in it.
InQueue = tuple[str, bytes]
GroupKey = tuple[str, str]


class TrueQueue:
    """A queue of one shard, according to the events that were kept."""

    __slots__ = ("name", "settings")

    def __init__(self, name: str, settings: QueueSettings) -> None:
        self.name = name
        self.settings = settings


class Life:
    """The state of one message according to the events that were kept."""

    __slots__ = (
        "body",
        "deadline_ms",
        "ended_by",
        "epoch",
        "group",
        "number",
        "queue",
        "redriven_epoch",
        "shard",
        "state",
        "to_queue",
    )

    def __init__(self, shard: int, queue: TrueQueue, pushed: Pushed, state: str) -> None:
        self.shard = shard
        self.number = pushed.number
        self.queue = queue
        self.body = pushed.body
        self.group = pushed.group
        self.state = state
        self.epoch = 0
        self.deadline_ms = 0
        # Its epoch when it was last redriven within its shard.
        self.redriven_epoch = 0
        # Where it departed to, if it did.
        self.to_queue = ""
        # The event that ended it, if one has.
        self.ended_by: AnyEvent | None = None

    @property
    def is_live(self) -> bool:
        """Whether it is in its queue."""
        return self.state not in (GONE, DEPARTED)


class MessageLineage:
    """The messages of all shards, by their bodies, dedup ids and groups."""

    def __init__(self, schedule: RunSchedule) -> None:
        self._schedule = schedule
        self._dead_letter_queues: dict[str, None] = {}
        # When a dedup id of a queue and group was used, and by which message of which shard.
        self._dedups: dict[tuple[str, str, str], tuple[int, int, int]] = {}
        # How often a body was pushed to a queue, departed to it, and ended its departure.
        self._pushes: Counter[InQueue] = Counter()
        self._pushes_in_all: Counter[bytes] = Counter()
        self._departures: Counter[InQueue] = Counter()
        self._arrivals: Counter[InQueue] = Counter()
        # How often a body came to be in any dead-letter queue.
        self._dead: Counter[bytes] = Counter()
        # The messages of each group, in the order in which they came.
        self._groups: dict[GroupKey, list[Life]] = {}

    def configured(self, settings: QueueSettings) -> None:
        """A queue was created or configured."""
        if settings.dead_letter is not None:
            self._dead_letter_queues[settings.dead_letter] = None

    def pushed(self, life: Life, event: Pushed) -> None:
        """A message was pushed."""
        queue = life.queue
        place = (queue.name, life.body)
        self._pushes[place] += 1
        self._pushes_in_all[life.body] += 1
        if queue.name in self._dead_letter_queues:
            if self._pushes[place] > self._departures[place]:
                self._wrong(life, event, f"departed {self._departures[place]} times to this queue")
            self._dead[life.body] += 1
        elif self._pushes[place] > 1 + self._dead[life.body]:
            self._wrong(life, event, f"was pushed before, and dead {self._dead[life.body]} times")
        if event.dedup_id is not None:
            self._check_dedup(life, event, event.dedup_id)
        if queue.settings.fifo:
            self._join(life, event)

    def _check_dedup(self, life: Life, event: Pushed, dedup_id: str) -> None:
        settings = life.queue.settings
        group = (life.group or "") if settings.dedup_per_group else ""
        key = (life.queue.name, group, dedup_id)
        at_ms, shard, number = self._dedups.get(key, (-DEDUP_WINDOW_MS, 0, 0))
        if event.at_ms < at_ms + DEDUP_WINDOW_MS:
            self._wrong(life, event, f"was pushed as message {number} of shard {shard} before")
        self._dedups[key] = (event.at_ms, life.shard, life.number)

    def _join(self, life: Life, event: AnyEvent) -> None:
        group = self._group_of(life, life.queue.name)
        others = [each for each in group if each.shard != life.shard]
        if others:
            self._wrong(
                life,
                event,
                f"is of a group of which message {others[0].number} is in shard {others[0].shard}",
            )
        group.append(life)

    def _group_of(self, life: Life, queue: str) -> list[Life]:
        return self._groups.setdefault((queue, life.group or ""), [])

    def check(self, life: Life, event: AnyEvent) -> None:
        """Checks an event before it changes its message."""
        if type(event) is Claimed and life.queue.settings.fifo:
            for other in self._group_of(life, life.queue.name):
                if other is life:
                    break
                if other.state in (VISIBLE, DELAYED):
                    self._wrong(
                        life,
                        event,
                        f"overtakes message {other.number} of shard {other.shard}, which is "
                        f"{other.state}",
                    )
        elif type(event) is Arrived:
            place = (life.to_queue, life.body)
            self._arrivals[place] += 1
            if self._arrivals[place] > self._pushes[place]:
                self._wrong(life, event, f"is not kept in {life.to_queue}")

    def changed(self, life: Life, event: AnyEvent, was_in: str) -> None:
        """An event has changed a message, which was in this queue."""
        if type(event) is Departed:
            life.to_queue = event.to_queue
            self._departures[event.to_queue, life.body] += 1
        elif type(event) is Moved and event.dead:
            self._dead[life.body] += 1
        elif type(event) is Moved:
            life.redriven_epoch = life.epoch
        if life.queue.settings.fifo and (type(event) is Moved or not life.is_live):
            group = self._group_of(life, was_in)
            if life in group:
                group.remove(life)
            if type(event) is Moved:
                self._join(life, event)

    def was_pushed_again(self, body: bytes) -> bool:
        """Whether a message has come to another shard: by a departure, or by a redrive."""
        return self._pushes_in_all[body] > 1

    def _wrong(self, life: Life, event: AnyEvent, problem: str) -> None:
        self._schedule.violate(
            f"shard {life.shard}, queue {life.queue.name}: {life.body!r} {problem}: {event}"
        )
