"""The delivery contract in the plainest code there is: lists, dicts, and a scan for everything.

It is slow and has no journal, no index and no laziness, so that a reader can see that it is right.
The engine is held against it, step by step, by `test_model`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from penstock.core.visible import NOISY_IN_FLIGHT_MIN, NOISY_SHARE
from penstock.errors import (
    AttemptLapsed,
    InFlightLimit,
    InvalidField,
    InvalidReceipt,
    MessageGone,
    QueueDeleted,
    QueueFull,
    QueueNotFound,
    RequestError,
    StaleReceipt,
)
from penstock.service import (
    DAY_MS,
    DEDUP_WINDOW_MS,
    Pull,
    Push,
    QueueSettings,
    Redrive,
    changed_settings,
)

ATTEMPT_WINDOW_MS = 14 * DAY_MS
Given = tuple[int, int, int]  # a claim: the message's number, its epoch, its deadline


@dataclass
class Item:
    """A message in a queue."""

    number: int
    rank: int
    body: bytes
    priority: int
    group: str | None
    pushed_at_ms: int
    arrived_at_ms: int
    expires_at_ms: int
    state: str = "visible"
    due_at_ms: int = 0
    epoch: int = 0
    receives: int = 0
    source: int | None = None


@dataclass
class Queue:
    """A queue and its messages in the order of their arrival."""

    number: int
    name: str
    settings: QueueSettings
    items: list[Item] = field(default_factory=list)
    dedups: dict[object, tuple[int, int]] = field(default_factory=dict)
    attempts: dict[str, tuple[int, list[tuple[int, int]]]] = field(default_factory=dict)

    def in_state(self, state: str) -> list[Item]:
        return [item for item in self.items if item.state == state]

    def find(self, number: int) -> Item | None:
        return next((item for item in self.items if item.number == number), None)

    def dedup_key(self, dedup_id: str, group: str | None) -> object:
        return (group, dedup_id) if self.settings.dedup_per_group else dedup_id


@dataclass
class Wait:
    """A pull that waits, and what became of it."""

    command: Pull
    queue: int
    deadline_ms: int
    done: bool = False
    given: list[Given] = field(default_factory=list)
    error: type[RequestError] | None = None


class Model:
    """Every queue there is; commands raise the errors the engine must raise."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.queues: dict[str, Queue] = {}
        self.next_number = 1
        self.next_queue = 1
        self.waits: list[Wait] = []
        self.pushed = 0
        self.ended = 0
        # What the pull under way has taken.
        self.just_taken: set[int] = set()

    def queue(self, name: str) -> Queue:
        if name not in self.queues:
            raise QueueNotFound(name)
        return self.queues[name]

    # What happens by itself.

    def settle(self) -> None:
        """Ends what is due, earliest first; then removes what is too old."""
        due = [
            (item.due_at_ms, item.number, queue, item)
            for queue in self.queues.values()
            for item in queue.items
            if item.state != "visible" and item.due_at_ms <= self.now_ms
        ]
        for _, _, queue, item in sorted(due, key=lambda each: each[:2]):
            was_claimed = item.state == "in_flight"
            self._return(queue, item)
            if was_claimed:
                self._after_claim(queue, item)
        for queue in self.queues.values():
            for item in [*queue.items]:
                if item.state != "in_flight" and self._too_old(queue, item):
                    self._end(queue, item)

    def _return(self, queue: Queue, item: Item) -> None:
        """Makes a message visible; a FIFO queue notes when one that was claimed came back."""
        came_back = queue.settings.fifo and item.epoch
        item.state, item.due_at_ms = "visible", self.now_ms if came_back else 0

    def _too_old(self, queue: Queue, item: Item) -> bool:
        limit_ms = item.expires_at_ms or item.arrived_at_ms + queue.settings.retention_ms
        return limit_ms <= self.now_ms

    def _after_claim(self, queue: Queue, item: Item) -> bool:
        """What befalls a message whose claim ended; true if it is not in the queue any more."""
        if self._too_old(queue, item):
            self._end(queue, item)
            return True
        return self._dead_letter(queue, item)

    def _dead_letter(self, queue: Queue, item: Item) -> bool:
        """Moves a message that had its chances to the dead-letter queue, if there is one."""
        settings = queue.settings
        if settings.max_receives is None or item.receives < settings.max_receives:
            return False
        target = self.queues.get(settings.dead_letter or "")
        if target is None or target.settings.fifo != settings.fifo:
            return False
        self._move(queue, item, target, source=queue.number)
        return True

    def _move(self, queue: Queue, item: Item, target: Queue, source: int | None) -> None:
        queue.items.remove(item)
        target.items.append(
            Item(
                number=item.number,
                rank=self.next_number,
                body=item.body,
                priority=item.priority,
                group=item.group,
                pushed_at_ms=item.pushed_at_ms,
                arrived_at_ms=self.now_ms,
                expires_at_ms=0,
                epoch=item.epoch,
                source=source,
            )
        )
        self.next_number += 1

    def _end(self, queue: Queue, item: Item) -> None:
        queue.items.remove(item)
        self.ended += 1

    # What may be pulled next.

    def line(self, queue: Queue) -> list[Item]:
        """The visible messages in the order `peek` shows them."""
        return sorted(queue.in_state("visible"), key=lambda item: (-item.priority, item.rank))

    def _next(self, queue: Queue, mine: list[str], aside: set[int]) -> Item | None:
        """The next message to give out; `mine` are the FIFO groups this pull took from."""
        if queue.settings.fifo:
            return self._next_of_groups(queue, mine, aside)
        line = [item for item in self.line(queue) if item.number not in aside]
        if not line:
            return None
        return self._first_of(queue, line, line[0].priority)

    def _first_of(self, queue: Queue, line: list[Item], priority: int) -> Item:
        level = [item for item in line if item.priority == priority]
        quiet = [item for item in level if not self._is_noisy(queue, item)]
        return (quiet or level)[0]

    def _next_by_age(self, queue: Queue) -> Item | None:
        """Of the first messages of all priorities the oldest, if it has the priority age."""
        age_ms = queue.settings.priority_age_ms
        if age_ms is None:
            return None
        line = self.line(queue)
        firsts = [self._first_of(queue, line, each) for each in {item.priority for item in line}]
        aged = [item for item in firsts if item.arrived_at_ms + age_ms <= self.now_ms]
        return min(aged, key=lambda item: item.rank, default=None)

    def _is_noisy(self, queue: Queue, item: Item) -> bool:
        if item.group is None:
            return False
        all_held = queue.in_state("in_flight")
        same = [one for one in all_held if (one.group, one.priority) == (item.group, item.priority)]
        return len(same) >= NOISY_IN_FLIGHT_MIN and len(same) * NOISY_SHARE > len(all_held)

    def _next_of_groups(self, queue: Queue, mine: list[str], aside: set[int]) -> Item | None:
        """Goes on with the group taken from last; then with the one to be had for longest."""
        if mine:
            members = [item for item in queue.items if item.group == mine[-1]]
            rest = [item for item in members if item.number not in self.just_taken]
            if rest and rest[0].state == "visible" and rest[0].number not in aside:
                return rest[0]
        heads = []
        for group in {item.group or "" for item in queue.items}:
            head = next(item for item in queue.items if item.group == group)
            if head.state == "visible" and head.number not in aside:
                heads.append(head)
        return min(heads, key=self._turn, default=None)

    def _turn(self, head: Item) -> tuple[int, bool, int]:
        return head.due_at_ms or head.arrived_at_ms, bool(head.due_at_ms), head.rank

    # Commands.

    def push(self, command: Push) -> tuple[int, bool]:
        queue = self.queue(command.queue)
        settings = queue.settings
        if settings.fifo and (command.group is None or command.priority):
            raise InvalidField("group or priority")
        key = queue.dedup_key(command.dedup_id or "", command.group)
        at_ms, number = queue.dedups.get(key, (-DEDUP_WINDOW_MS, 0))
        if command.dedup_id is not None and at_ms + DEDUP_WINDOW_MS > self.now_ms:
            return number, True
        if settings.messages_max is not None and len(queue.items) >= settings.messages_max:
            raise QueueFull(queue.name)
        number = self.next_number
        self.next_number += 1
        ttl_ms = command.ttl_ms
        item = Item(
            number=number,
            rank=number,
            body=command.body,
            priority=command.priority,
            group=command.group,
            pushed_at_ms=self.now_ms,
            arrived_at_ms=self.now_ms,
            expires_at_ms=0 if ttl_ms is None else self.now_ms + ttl_ms,
        )
        if command.delay_ms:
            item.state, item.due_at_ms = "delayed", self.now_ms + command.delay_ms
        queue.items.append(item)
        if command.dedup_id is not None:
            queue.dedups[key] = (self.now_ms, number)
        self.pushed += 1
        return number, False

    def pull(self, command: Pull) -> list[Given]:
        queue = self.queue(command.queue)
        settings = queue.settings
        attempt_id = command.attempt_id
        if attempt_id is not None and attempt_id in queue.attempts:
            at_ms, pairs = queue.attempts[attempt_id]
            if at_ms + ATTEMPT_WINDOW_MS > self.now_ms:
                return [self._still_held(queue, *pair) for pair in pairs]
        limit = command.limit
        if settings.in_flight_max is not None:
            room = settings.in_flight_max - len(queue.in_state("in_flight"))
            if room <= 0:
                raise InFlightLimit(queue.name)
            limit = min(limit, room)
        visibility_ms = command.visibility_ms
        if visibility_ms is None:
            visibility_ms = settings.visibility_ms
        given: list[Given] = []
        mine: list[str] = []
        self.just_taken = set()
        while len(given) < limit:
            item = self._next_by_age(queue) or self._next(queue, mine, set())
            if item is None:
                break
            mine.append(item.group or "")
            if self._dead_letter(queue, item):
                continue
            item.state, item.due_at_ms = "in_flight", self.now_ms + visibility_ms
            item.epoch += 1
            item.receives += 1
            self.just_taken.add(item.number)
            given.append((item.number, item.epoch, item.due_at_ms))
        if given and attempt_id is not None:
            queue.attempts[attempt_id] = (self.now_ms, [each[:2] for each in given])
        return given

    def _still_held(self, queue: Queue, number: int, epoch: int) -> Given:
        item = queue.find(number)
        if item is None or item.state != "in_flight" or item.epoch != epoch:
            raise AttemptLapsed(queue.name)
        return number, epoch, item.due_at_ms

    def _held(self, name: str, claim: "KnownReceipt", late: bool) -> tuple[Queue, Item | None]:
        queue = self.queue(name)
        if claim.queue != queue.number:
            raise InvalidReceipt(name)
        item = queue.find(claim.number)
        if item is None:
            return queue, None
        states = {"in_flight", "visible"} if late and not queue.settings.fifo else {"in_flight"}
        if item.state not in states or item.epoch != claim.epoch:
            raise StaleReceipt(name)
        return queue, item

    def delete(self, name: str, claim: "KnownReceipt", late: bool = False) -> bool:
        queue, item = self._held(name, claim, late)
        if item is None:
            return False
        self._end(queue, item)
        return True

    def extend(
        self, name: str, claim: "KnownReceipt", visibility_ms: int, late: bool = False
    ) -> int:
        _, item = self._held(name, claim, late)
        if item is None:
            raise MessageGone(name)
        item.state = "in_flight"
        item.due_at_ms = self.now_ms + visibility_ms
        return item.due_at_ms

    def release(self, name: str, claim: "KnownReceipt", delay_ms: int, late: bool = False) -> None:
        queue, item = self._held(name, claim, late)
        if item is None:
            raise MessageGone(name)
        self._return(queue, item)
        if not self._after_claim(queue, item) and delay_ms:
            item.state, item.due_at_ms = "delayed", self.now_ms + delay_ms

    def purge(self, name: str) -> int:
        queue = self.queue(name)
        count = len(queue.items)
        self.ended += count
        queue.items.clear()
        if queue.settings.fifo:
            queue.dedups.clear()
        return count

    def redrive(self, command: Redrive) -> int:
        queue = self.queue(command.queue)
        to = None if command.to is None else self.queue(command.to)
        if to is queue or (to is not None and to.settings.fifo != queue.settings.fifo):
            raise InvalidField("to")
        numbers = {each.number: each for each in self.queues.values()}
        aside: set[int] = set()
        mine: list[str] = []
        self.just_taken = set()
        moved = 0
        while moved < command.limit:
            item = self._next(queue, mine, aside)
            if item is None:
                break
            mine.append(item.group or "")
            target = to or numbers.get(item.source or 0)
            if target is None:
                aside.add(item.number)
                continue
            self._move(queue, item, target, source=None)
            moved += 1
        if aside and not moved:
            raise InvalidField("to")
        return moved

    def create(self, name: str, settings: dict[str, object]) -> None:
        if name in self.queues:
            return
        self._add_queue(name, changed_settings(QueueSettings(), settings))
        dead = self.queues[name].settings.dead_letter
        if dead is not None and dead not in self.queues:
            self._add_queue(dead, QueueSettings(fifo=self.queues[name].settings.fifo))

    def _add_queue(self, name: str, settings: QueueSettings) -> None:
        self.queues[name] = Queue(self.next_queue, name, settings)
        self.next_queue += 1

    def configure(self, name: str, settings: dict[str, object]) -> None:
        queue = self.queue(name)
        queue.settings = msgspec.structs.replace(queue.settings, **settings)
        dead = queue.settings.dead_letter
        if settings and dead is not None and dead not in self.queues:
            self._add_queue(dead, QueueSettings(fifo=queue.settings.fifo))

    def remove(self, name: str) -> None:
        queue = self.queue(name)
        self.ended += len(queue.items)
        del self.queues[name]
        for wait in self.waits:
            if wait.queue == queue.number:
                wait.done, wait.error = True, QueueDeleted
        self.waits = [wait for wait in self.waits if not wait.done]

    # Waiting.

    def wait(self, command: Pull, wait_ms: int) -> Wait:
        wait = Wait(command, self.queue(command.queue).number, self.now_ms + wait_ms)
        self.waits.append(wait)
        return wait

    def serve(self) -> None:
        """Lets those who wait try again, first come first: nobody overtakes on a queue."""
        in_vain: set[int] = set()
        for wait in self.waits:
            if wait.queue in in_vain or wait.done:
                continue
            try:
                wait.given = self.pull(wait.command)
            except InFlightLimit:
                pass  # there will be room again, and then the line is served again
            except RequestError as refused:
                wait.error = type(refused)
            wait.done = bool(wait.given or wait.error)
            if not wait.done:
                in_vain.add(wait.queue)
            elif wait.given and wait.command.attempt_id is not None:
                self._answer_alike(wait)
        self.waits = [wait for wait in self.waits if not wait.done]

    def _answer_alike(self, served: Wait) -> None:
        """Gives the same claims to whoever waits under the same attempt id."""
        for wait in self.waits:
            same = wait.command.attempt_id == served.command.attempt_id
            if wait.queue == served.queue and same and not wait.done:
                wait.done, wait.given = True, served.given

    def time_out(self) -> None:
        """Sends home everyone who waited long enough."""
        for wait in self.waits:
            wait.done = wait.deadline_ms <= self.now_ms
        self.waits = [wait for wait in self.waits if not wait.done]


@dataclass(frozen=True)
class KnownReceipt:
    """What a receipt is known to say."""

    name: str
    queue: int
    number: int
    epoch: int
    receipt: str


def outcome(run: Callable[[], object]) -> object:
    """What a command gives: its reply, or the class of the error that refused it."""
    try:
        return run()
    except RequestError as refused:
        return type(refused)
