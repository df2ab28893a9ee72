"""The order of a queue's messages: which one is pulled next.

Standard queues: highest priority first, then arrival. Among groups, one that holds more than its
share of what is in flight (a noisy group) waits until no other group has a message of that
priority. With a priority age, the first messages of all priorities are compared, and the one that
arrived first is next if it has that age. FIFO queues: within a group strictly by arrival, and
nothing past a message in flight; among groups, first the one whose first message has been available
longest.

Removal is mostly lazy: a message that is no longer VISIBLE is skipped when it comes to the front. A
line's new messages are already in order (a deque); only those that come back need a heap.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, nsmallest
from operator import attrgetter, itemgetter
from typing import Final

from penstock.core.delivery import GONE, VISIBLE, Delivery, arrived_at_ms
from penstock.core.discards import Container
from penstock.core.lazyheap import LazyHeap

NOISY_IN_FLIGHT_MIN: Final = 30
NOISY_SHARE: Final = 10
ABSENT_MIN: Final = 64
# Messages that left a line longer than this are removed in pieces of this size, one piece after
# every SWEEP_EVERY that leave: removing a million at once would delay other commands.
SWEEP_PIECE: Final = 8_192
SWEEP_EVERY: Final = 1_024
# Since when a FIFO group can be served: the instant, whether its first message came back then, and
# that message's rank.
Turn = tuple[int, bool, int]


class Line:
    """Messages in order of rank; a message that comes back takes its old place.

    `listed` holds the ranks under which a level lists the line as ready.
    """

    __slots__ = ("_gone", "_since_sweep", "_swept", "fresh", "in_flight", "listed", "returned")

    def __init__(self) -> None:
        self.fresh: deque[Delivery] = deque()
        self.returned: list[tuple[int, Delivery]] = []
        self.in_flight = 0
        self.listed: set[int] = set()
        # How many messages kept are not visible any more; how many have left since a piece was
        # swept; and where the next piece begins. That place is only about right, because messages
        # are taken from the front.
        self._gone = 0
        self._since_sweep = 0
        self._swept = 0

    def first(self) -> Delivery | None:
        """The next visible message, which stays where it is."""
        fresh = self.fresh
        while fresh and fresh[0].state != VISIBLE:
            fresh.popleft()
            self._gone -= 1
        returned = self.returned
        while returned and returned[0][1].state != VISIBLE:
            heappop(returned)
            self._gone -= 1
        if not returned:
            return fresh[0] if fresh else None
        if fresh and fresh[0].rank < returned[0][0]:
            return fresh[0]
        return returned[0][1]

    def take(self) -> Delivery | None:
        """Takes out the next visible message."""
        delivery = self.first()
        if delivery is not None:
            if self.returned and self.returned[0][1] is delivery:
                heappop(self.returned)
            else:
                self.fresh.popleft()
        return delivery

    def leave(self) -> Delivery | None:
        """Counts a message that left from the middle; returns the next visible one.

        Once most entries of the line are no longer visible, they are removed. `first` removes those
        at the front, so messages that leave in order need no sweep.
        """
        self._gone = max(self._gone, 0) + 1
        kept = len(self.fresh) + len(self.returned)
        if self._gone > ABSENT_MIN and 2 * self._gone > kept:
            if kept <= SWEEP_PIECE:
                self._sweep(0, len(self.fresh))
                self._sweep_returned()
                self._gone = 0
            else:
                self._since_sweep += 1
                if self._since_sweep == SWEEP_EVERY:
                    self._sweep_piece()
        return self.first()

    def _sweep_piece(self) -> None:
        self._since_sweep = 0
        if len(self.returned) > len(self.fresh):
            self._gone -= self._sweep_returned()
            return
        if self._swept >= len(self.fresh):
            self._swept = 0
        removed = self._sweep(self._swept, SWEEP_PIECE)
        self._swept += SWEEP_PIECE - removed
        self._gone -= removed

    def _sweep(self, start: int, count: int) -> int:
        """Removes from `count` messages those that are not visible; returns how many.

        In place: StandardOrder keeps a reference to the deque of the line without group.
        """
        fresh = self.fresh
        fresh.rotate(-start)
        piece = [fresh.popleft() for _ in range(min(count, len(fresh) - start))]
        present = [delivery for delivery in reversed(piece) if delivery.state == VISIBLE]
        fresh.extendleft(present)
        fresh.rotate(start)
        return len(piece) - len(present)

    def _sweep_returned(self) -> int:
        """The same for all messages that came back: a heap cannot be swept in pieces."""
        present = [pair for pair in self.returned if pair[1].state == VISIBLE]
        removed = len(self.returned) - len(present)
        heapify(present)
        self.returned = present
        return removed

    def parts(self) -> Iterator[Container]:
        """The containers, for `Discards`."""
        yield from (self.fresh, self.returned)

    def ahead(self, limit: int) -> list[Delivery]:
        """The next messages, which stay where they are."""
        by_rank: dict[int, Delivery] = {}
        for delivery in self.fresh:
            if len(by_rank) == limit:
                break
            if delivery.state == VISIBLE:
                by_rank[delivery.rank] = delivery
        back = nsmallest(limit, (pair for pair in self.returned if pair[1].state == VISIBLE))
        by_rank.update(back)
        return [by_rank[rank] for rank in sorted(by_rank)[:limit]]


class Level:
    """The messages of one priority: a line without group, and a line for each group."""

    __slots__ = ("groups", "line", "ready")

    def __init__(self) -> None:
        self.line = Line()
        self.groups: dict[str, Line] = {}
        # The groups with a visible message, by the rank of their first one.
        self.ready: LazyHeap[int, Line] = LazyHeap(self.groups, _rank)

    def add(self, delivery: Delivery, back: bool) -> None:
        """Adds a visible message: at the end, or in its old place."""
        group = delivery.group
        if group is None:
            line = self.line
        else:
            line = self.groups.get(group) or self.groups.setdefault(group, Line())
            if back or not line.fresh:
                self.ready.enlist(group, line, delivery)
        if back:
            heappush(line.returned, (delivery.rank, delivery))
        else:
            line.fresh.append(delivery)

    def first(self, in_flight: int) -> Delivery | None:
        """The next message, which stays where it is."""
        return (self._next_group(in_flight) or self.line).first()

    def take(self, in_flight: int) -> Delivery | None:
        """Takes out the next message."""
        chosen = self._next_group(in_flight)
        if chosen is None:
            return self.line.take()
        delivery = chosen.take()
        following = chosen.first()
        if following is not None:
            self.ready.enlist(following.group or "", chosen, following)
        return delivery

    def _next_group(self, in_flight: int) -> Line | None:
        """The group with the next message, quiet before noisy; None if it is one without group."""
        plain = self.line.first()
        noisy: list[tuple[int, str]] = []
        chosen: Line | None = None
        while (top := self.ready.first()) is not None:
            first, line = top
            if plain is not None and plain.rank < first.rank:
                break
            if not _is_noisy(line, in_flight):
                chosen = line
                break
            # At most nine groups can each hold more than a tenth: this list stays short.
            noisy.append(heappop(self.ready))
        for entry in noisy:
            heappush(self.ready, entry)
        if chosen is None and plain is None and noisy:
            chosen = self.groups[noisy[0][1]]
        return chosen

    def count_in_flight(self, group: str, change: int) -> None:
        """Counts how many messages of a group are in flight."""
        line = self.groups.get(group) or self.groups.setdefault(group, Line())
        line.in_flight += change

    def trim(self, group: str | None) -> None:
        """After a message left from the middle: removes it when due, and an empty group."""
        if group is None:
            self.line.leave()
            return
        line = self.groups.get(group)
        if line is not None and line.leave() is None and not line.in_flight:
            del self.groups[group]

    def lines(self) -> Iterator[Line]:
        """Every line of this priority."""
        yield self.line
        yield from self.groups.values()


class StandardOrder:
    """The order of a standard queue."""

    __slots__ = ("_by_priority", "_levels", "_plain")

    def __init__(self) -> None:
        level = Level()
        self._by_priority = {0: level}
        self._levels = [level]
        # The line of messages with neither priority nor group, which most are: saves a lookup.
        self._plain = level.line.fresh

    @property
    def is_by_arrival(self) -> bool:
        """Whether messages stand in the order in which they arrived: they have one priority."""
        return len(self._levels) == 1

    def join(self, delivery: Delivery) -> None:
        """Adds a message that arrived; a delayed one is added later, by `come_back`."""
        if delivery.state == VISIBLE:
            if delivery.group is None and delivery.priority == 0:
                self._plain.append(delivery)
            else:
                self._level(delivery.priority).add(delivery, back=False)

    def join_plain(self, deliveries: list[Delivery]) -> None:
        """Adds messages that arrived, in order: all visible, without priority or group."""
        self._plain.extend(deliveries)

    def come_back(self, delivery: Delivery) -> None:
        """Adds a message that became visible again, in its old place."""
        self._level(delivery.priority).add(delivery, back=True)

    def take(self, in_flight: int) -> Delivery | None:
        """Takes out the next message; the caller claims or moves it."""
        for level in self._levels:
            line = level.line
            if level.ready:
                delivery = level.take(in_flight)
            elif line.fresh and not line.returned and line.fresh[0].state == VISIBLE:
                return line.fresh.popleft()
            else:
                delivery = line.take()
            if delivery is not None:
                return delivery
        return None

    def take_by_age(self, aged_at_ms: int, in_flight: int) -> Delivery | None:
        """Takes out the next message if those that arrived by `aged_at_ms` are first.

        Ranks are in the order of arrival: if the lowest among the first messages of all priorities
        is too young, so are all others.
        """
        if self.is_by_arrival:
            return self.take(in_flight)
        firsts = (level.first(in_flight) for level in self._levels)
        oldest = min((each for each in firsts if each is not None), key=_rank, default=None)
        if oldest is None or arrived_at_ms(oldest) > aged_at_ms:
            return self.take(in_flight)
        return self._by_priority[oldest.priority].take(in_flight)

    def take_plain(self, limit: int) -> list[Delivery]:
        """Takes out up to `limit` messages at once; none unless arrival alone decides the order."""
        level = self._levels[0]
        if len(self._levels) > 1 or level.ready or level.line.returned:
            return []
        fresh = self._plain
        taken: list[Delivery] = []
        while fresh and len(taken) < limit:
            delivery = fresh.popleft()
            if delivery.state == VISIBLE:
                taken.append(delivery)
        return taken

    def put_back_plain(self, deliveries: list[Delivery]) -> None:
        """Undoes `take_plain` for the last messages it took, which are still visible."""
        self._plain.extendleft(reversed(deliveries))

    def begin_pull(self) -> None:
        """Begins a pull: the calls of `take` that follow belong to it."""

    def claimed(self, group: str, delivery: Delivery) -> None:
        """A message of this group is in flight now."""
        self._level(delivery.priority).count_in_flight(group, 1)

    def unclaimed(self, group: str, delivery: Delivery) -> None:
        """Its claim has ended: the message is gone, delayed, or about to `come_back`."""
        level = self._level(delivery.priority)
        level.count_in_flight(group, -1)
        level.trim(group)

    def leave(self, delivery: Delivery) -> None:
        """The message left the line from the middle: it need not be kept there."""
        level = self._by_priority.get(delivery.priority)
        if level is not None:
            level.trim(delivery.group)

    def ahead(self, limit: int) -> list[Delivery]:
        """The next messages in order of priority and arrival; none is taken."""
        deliveries: list[Delivery] = []
        for level in self._levels:
            room = limit - len(deliveries)
            if not room:
                break
            # At most `room` lines can have one of the next messages: those with the lowest ranks.
            firsts = [(first.rank, line) for line in level.lines() if (first := line.first())]
            lines = [line for _, line in nsmallest(room, firsts, key=itemgetter(0))]
            level_ahead = [d for line in lines for d in line.ahead(room)]
            deliveries += sorted(level_ahead, key=lambda delivery: delivery.rank)[:room]
        return deliveries

    def parts(self) -> Iterator[Container]:
        """The containers, for `Discards`."""
        for level in self._levels:
            yield from (level.groups, level.ready)
            yield from level.line.parts()

    def _level(self, priority: int) -> Level:
        level = self._by_priority.get(priority)
        if level is None:
            level = self._by_priority[priority] = Level()
            ordered = sorted(self._by_priority, reverse=True)
            self._levels = [self._by_priority[each] for each in ordered]
        return level


class Group:
    """One group of a FIFO queue: all its messages in order, whatever their state.

    `listed` holds the turns under which the group is listed as open. `taken` is how many messages
    at the front the pull numbered `pulled_in` has taken.
    """

    __slots__ = ("_gone", "listed", "order", "pulled_in", "taken")

    def __init__(self) -> None:
        self.order: deque[Delivery] = deque()
        self.listed: set[Turn] = set()
        self.pulled_in = 0
        self.taken = 0
        self._gone = 0

    def first(self) -> Delivery | None:
        """The oldest message that is not gone."""
        order = self.order
        while order and order[0].state == GONE:
            order.popleft()
            self._gone -= 1
        return order[0] if order else None

    def leave(self) -> None:
        """Counts a message that is gone; removes such messages once they are many."""
        self._gone = max(self._gone, 0) + 1
        if self._gone > ABSENT_MIN and 2 * self._gone > len(self.order):
            self.order = deque(delivery for delivery in self.order if delivery.state != GONE)
            self._gone = 0

    def parts(self) -> Iterator[Container]:
        """The containers, for `Discards`."""
        yield self.order


class FifoOrder:
    """The order of a FIFO queue.

    A group is open when its first message is visible: nothing overtakes a message in flight. One
    pull takes as many messages of a group as it may, in order, before it takes from the next.
    Groups are ordered by when their first message became available: by arrival, or by coming back.
    """

    __slots__ = ("_current", "_groups", "_open", "_pull")

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        # The groups whose first message is visible, by its turn.
        self._open: LazyHeap[Turn, Group] = LazyHeap(self._groups, _turn)
        self._pull = 0
        # The group this pull took from last.
        self._current: Group | None = None

    def join(self, delivery: Delivery) -> None:
        """A message arrived at the end of its group."""
        name = delivery.group or ""
        group = self._groups.get(name) or self._groups.setdefault(name, Group())
        group.order.append(delivery)
        if group.first() is delivery:
            self._offer(name, group)

    def come_back(self, delivery: Delivery) -> None:
        """A message became visible again; it has kept its place in the group."""
        self._offer_group_of(delivery)

    def begin_pull(self) -> None:
        """Begins a pull: the calls of `take` that follow belong to it."""
        self._pull += 1
        self._current = None

    def take(self, in_flight: int) -> Delivery | None:
        """The next message of an open group; the caller claims or moves it before the next take."""
        if self._current is not None:
            delivery = self._next_in(self._current)
            if delivery is not None:
                return delivery
            self._current = None
        top = self._open.first()
        if top is None:
            return None
        first, self._current = top
        return first

    def _next_in(self, group: Group) -> Delivery | None:
        """The message of the group that this pull may take, if any."""
        first = group.first()
        if first is None or first.state == VISIBLE:
            return first
        if group.pulled_in != self._pull:
            return None
        # This pull has claimed the front of the group: it may take what directly follows.
        order = group.order
        while group.taken < len(order) and order[group.taken].state == GONE:
            group.taken += 1
        if group.taken < len(order) and order[group.taken].state == VISIBLE:
            return order[group.taken]
        return None

    def claimed(self, group: str, delivery: Delivery) -> None:
        """A message of this group is in flight now; those behind it are blocked for other pulls."""
        held = self._groups[group]
        if held.pulled_in != self._pull:
            held.pulled_in = self._pull
            held.taken = 0
        held.taken += 1

    def unclaimed(self, group: str, delivery: Delivery) -> None:
        """Its claim has ended: the group may open."""
        if delivery.state == GONE:
            self._groups[group].leave()
        self._offer_group_of(delivery)

    def leave(self, delivery: Delivery) -> None:
        """The message left from the middle: its group may open, or have ended."""
        group = self._groups.get(delivery.group or "")
        if group is not None and delivery.state == GONE:
            group.leave()
        self._offer_group_of(delivery)

    def is_next(self, delivery: Delivery) -> bool:
        """Whether a visible message is the first of its group."""
        group = self._groups.get(delivery.group or "")
        return group is not None and group.first() is delivery

    def has_group(self, name: str) -> bool:
        """Whether a message of this group is there, whatever its state."""
        return name in self._groups and self._groups[name].first() is not None

    def parts(self) -> Iterator[Container]:
        """The containers, for `Discards`."""
        yield from (self._groups, self._open)

    def _offer_group_of(self, delivery: Delivery) -> None:
        name = delivery.group or ""
        group = self._groups.get(name)
        if group is None:
            return
        if group.first() is None:
            del self._groups[name]
        else:
            self._offer(name, group)

    def _offer(self, name: str, group: Group) -> None:
        first = group.first()
        if first is not None:
            self._open.enlist(name, group, first)


_rank = attrgetter("rank")


def _is_noisy(line: Line, in_flight: int) -> bool:
    held = line.in_flight
    return held >= NOISY_IN_FLIGHT_MIN and held * NOISY_SHARE > in_flight


def _turn(first: Delivery) -> Turn | None:
    """Since when a group's first message can be pulled; None if it is not visible.

    At the same instant, a message that came back is ordered after new arrivals.
    """
    if first.state != VISIBLE:
        return None
    if first.due_at_ms:
        return first.due_at_ms, True, first.rank
    # As `arrived_at_ms`, without the call: this is done several times for each message.
    move = first.move
    return first.pushed_at_ms if move is None else move.at_ms, False, first.rank
