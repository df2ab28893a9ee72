"""In which shards a queue is: the note in its settings, and which pushes a shard accepts.

A queue without a note is in its home shard (`placement.first_shard`). The settings of a queue that
is spread over several shards, or was moved to another one, contain a note, `.spread`: in which
shards it is, in which it was before, and the version of the note. The note in the home shard is
authoritative, even if the queue's messages are in other shards; these have a queue of the same name
and a copy of the note. Every request contains the version that its sender knows, and a shard whose
note has another version refuses it. So all requests that shards accept agree about the spread,
without any coordination between routers.

A push is placed by its key: the group in a FIFO queue, else the dedup id; a push without a key goes
to any of the shards. While the note contains earlier places, a push with a key is first offered to
the shards that had this key then. Such a shard accepts it only if it still has messages of the
group, or knows the dedup id. Otherwise it never accepts that key again. So at every instant all
messages of a group are in one shard. A dedup id of a group may be in another shard than its
messages: before a push to a FIFO queue is offered to one of several shards, the others are asked
whether they know its dedup id. So a repeated push reaches the shard that knows it. Nothing here
does I/O.
"""

import hashlib
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from penstock.cluster.placement import first_shard, shard_for, shards_of
from penstock.core.queue import QueueState
from penstock.core.shard import ShardState
from penstock.core.visible import FifoOrder
from penstock.errors import InvalidField
from penstock.service import (
    DEDUP_WINDOW_MS,
    Batch,
    ConfigureQueue,
    DeleteQueue,
    Peek,
    Pull,
    Purge,
    Push,
    PushMany,
    QueueInfo,
    QueueSettings,
    Redrive,
    Stats,
)

NOTE: Final = ".spread"
VERSION_MAX: Final = 2**32 - 1
_QUEUE_COMMANDS: Final = (Push, PushMany, Pull, Peek, Stats, Purge, Redrive)


class SpreadChanged(Exception):
    """The shard's note of the queue has another version than the request; nothing was changed."""


class NotPlaced(Exception):
    """The push belongs to another shard of the queue; nothing was changed."""


# So many shards, from the home shard on; or the shards with these numbers.
Places = int | tuple[int, ...]


class Spread(msgspec.Struct, frozen=True, array_like=True):
    """The note: in which shards a queue is, and in which it was before."""

    version: int = 0
    shards: Places = 1
    before: tuple[Places, ...] = ()
    changed_at_ms: int = 0
    # Whether an operator chose the shards: it stays there when the cluster grows.
    by_hand: bool = False

    @property
    def is_by_hand(self) -> bool:
        """Whether it stays where it is when the cluster grows."""
        places = self.shards
        return self.by_hand or (places if isinstance(places, int) else len(places)) > 1


UNSPREAD: Final = Spread()


@lru_cache(maxsize=1024)
def _read_note(text: str) -> Spread:
    """The spread of this note; `UNSPREAD` for a text that no version of Penstock has written."""
    try:
        found = msgspec.json.decode(text, type=Spread)
    except msgspec.MsgspecError:
        return UNSPREAD
    are_valid = all(map(_are_places, (found.shards, *found.before)))
    return found if are_valid and 1 <= found.version <= VERSION_MAX else UNSPREAD


def _are_places(places: Places) -> bool:
    if isinstance(places, int):
        return places >= 1
    return bool(places) and min(places) >= 0 and len(set(places)) == len(places)


def spread_of(settings: QueueSettings) -> Spread:
    """The note in a queue's settings; `UNSPREAD` if there is none."""
    text = settings.annotations.get(NOTE)
    return UNSPREAD if text is None else _read_note(text)


def with_note(annotations: dict[str, str], spread: Spread) -> dict[str, str]:
    """Annotations with this note; without one if the queue is no longer spread."""
    others = {name: text for name, text in annotations.items() if name != NOTE}
    if spread.shards == 1 and not spread.before and not spread.by_hand:
        return others
    return {**others, NOTE: msgspec.json.encode(spread).decode()}


def without_note(info: QueueInfo) -> QueueInfo:
    """The description of a queue for callers, without the note."""
    if NOTE not in info.settings.annotations:
        return info
    annotations = with_note(info.settings.annotations, UNSPREAD)
    settings = msgspec.structs.replace(info.settings, annotations=annotations)
    return msgspec.structs.replace(info, settings=settings)


def check_without_note(settings: object) -> None:
    """Raises InvalidField if a caller's settings contain the note."""
    given = settings.get("annotations") if isinstance(settings, dict) else None
    if isinstance(given, dict) and NOTE in given:
        raise InvalidField(
            f"annotations: {NOTE} is set by Penstock; `penstock cluster spread` spreads a queue"
        )


def check_spreadable(settings: QueueSettings) -> None:
    """Raises InvalidField if a queue with these settings cannot be in several shards."""
    if settings.fifo and not settings.dedup_per_group:
        raise InvalidField(
            "spread: a fifo queue in several shards needs dedup_per_group; "
            "configure the queue with it first"
        )


def next_spread(old: Spread, shards: Places, now_ms: int, by_hand: bool = False) -> Spread:
    """The note after a change to these shards.

    Versions increase, also if a queue is deleted and created again: they are at least the time.
    """
    before = tuple(each for each in (*old.before, old.shards) if each != shards)
    return Spread(_next_version(old, now_ms), shards, before, now_ms, by_hand)


def with_new_version(old: Spread, now_ms: int) -> Spread:
    """The same spread with a new version, for a change of the queue's settings."""
    return msgspec.structs.replace(old, version=_next_version(old, now_ms))


def without_past(old: Spread, now_ms: int) -> Spread:
    """The spread without earlier ones: no message is placed by these any more."""
    return Spread(_next_version(old, now_ms), old.shards, (), now_ms, old.by_hand)


def _next_version(old: Spread, now_ms: int) -> int:
    return min(max(old.version + 1, now_ms // 1_000), VERSION_MAX)


def may_drop_past(spread: Spread, now_ms: int) -> bool:
    """Whether every dedup id from before the last change has expired."""
    return bool(spread.before) and now_ms > spread.changed_at_ms + DEDUP_WINDOW_MS


def push_key(settings: QueueSettings, push: Push) -> str | None:
    """The key that decides the shard of a push; None if it may go to any."""
    if settings.fifo:
        return push.group if type(push.group) is str else None
    return dedup_id_of(settings, push)


def dedup_id_of(settings: QueueSettings, push: Push) -> str | None:
    """The dedup id of a push, or that of its content; None if it has none, or an invalid one."""
    if push.dedup_id is not None:
        return push.dedup_id if type(push.dedup_id) is str else None
    if settings.dedup_by_content and type(push.body) is bytes:
        return hashlib.sha256(push.body).hexdigest()
    return None


class QueuePlaces(NamedTuple):
    """The settings and the spread of a queue, as known to a router."""

    queue: str
    settings: QueueSettings
    spread: Spread
    homes: int

    @property
    def version(self) -> int:
        """The version of the note."""
        return self.spread.version

    @property
    def current(self) -> list[int]:
        """The shards that take any push that is placed in them."""
        return shards_at(self.queue, self.spread.shards, self.homes)

    @property
    def all_shards(self) -> list[int]:
        """The shards in which there may be messages; those that it leaves are the first."""
        return places_in(self.queue, self.spread, self.homes)

    @property
    def has_several(self) -> bool:
        """Whether it is spread over several shards, or was before."""
        every = (self.spread.shards, *self.spread.before)
        return any(len(shards_at(self.queue, each, self.homes)) > 1 for each in every)

    def places_of(self, key: str) -> list[int]:
        """The shards to offer a push of this key to, in this order; the last one accepts it."""
        places = [
            shard_for(key, shards_at(self.queue, each, self.homes)) for each in self.spread.before
        ]
        last = shard_for(key, self.current)
        return [*dict.fromkeys(place for place in places if place != last), last]


def places_by(info: QueueInfo, homes: int) -> QueuePlaces | None:
    """The places of a queue by its description in its home shard; None if it is not spread."""
    spread = spread_of(info.settings)
    return QueuePlaces(info.queue, info.settings, spread, homes) if spread.version else None


class SpreadGuard:
    """Refuses commands whose version of a spread is not that of the shard's note.

    `names` are the queues of this shard that have a note.
    """

    def __init__(self, shard: ShardState, homes: int) -> None:
        self._shard = shard
        self._homes = homes
        self.names = {
            name for name, queue in shard.names.items() if NOTE in queue.settings.annotations
        }

    def configured(self, name: str) -> None:
        """Notes that a queue's settings may have changed, or that it was deleted."""
        queue = self._shard.names.get(name)
        if queue is not None and NOTE in queue.settings.annotations:
            self.names.add(name)
        else:
            self.names.discard(name)

    def version(self, name: str) -> int:
        """The version of a queue's note; 0 if it has none."""
        return self._version(self._shard.names.get(name))

    def check(self, command: Any, version: int, now_ms: int) -> None:
        """Raises SpreadChanged or NotPlaced for a command that is not for this shard."""
        if not version and not self.names:
            return
        if isinstance(command, _QUEUE_COMMANDS):
            queue = self._check_version(command.queue, version)
            if queue is not None and version and type(command) is Push:
                self._check_push(queue, command, now_ms)
            elif type(command) is Redrive and command.to is not None:
                # It was sent because both queues are in this shard alone.
                self._check_version(command.to, 0)
        elif type(command) is Batch:
            for name in {each.queue for each in command.items if type(each) is Push}:
                self._check_version(name, version)
        elif type(command) is ConfigureQueue:
            self._check_configure(command, version)
        elif type(command) is DeleteQueue and version:
            # The shard is no longer in the spread: its copy may be deleted only if it is empty.
            found = self._shard.names.get(command.queue)
            if found is not None and (found.deliveries or self._version(found) > version):
                raise NotPlaced

    def _version(self, queue: QueueState | None) -> int:
        return 0 if queue is None else spread_of(queue.settings).version

    def _check_version(self, name: Any, version: int) -> QueueState | None:
        queue = self._shard.names.get(name) if type(name) is str else None
        if self._version(queue) != version:
            raise SpreadChanged
        return queue

    def _check_configure(self, command: ConfigureQueue, version: int) -> None:
        """Raises SpreadChanged: in the home shard if the version is not the current one, in other
        shards if the copy is older than the shard's."""
        queue = self._shard.names.get(command.queue)
        if queue is None:
            return
        if first_shard(queue.name, self._homes) == self._shard.number:
            self._check_version(command.queue, version)
        elif version < self._version(queue):
            raise SpreadChanged

    def _check_push(self, queue: QueueState, push: Push, now_ms: int) -> None:
        settings = queue.settings
        places = shards_at(queue.name, spread_of(settings).shards, self._homes)
        key = push_key(settings, push)
        own = self._shard.number
        if own in places if key is None else shard_for(key, places) == own:
            return
        if key is None or not _holds(queue, push, now_ms):
            raise NotPlaced


def _holds(queue: QueueState, push: Push, now_ms: int) -> bool:
    """Whether messages of the push's group, or its dedup id, are known here."""
    order = queue.order
    group = push.group if type(push.group) is str else None
    if isinstance(order, FifoOrder) and order.has_group(group or ""):
        return True
    return knows_push(queue, push, now_ms)


def knows_push(queue: QueueState, push: Push, now_ms: int) -> bool:
    """Whether the dedup id of a push is known here."""
    group = push.group if type(push.group) is str else None
    dedup_id = dedup_id_of(queue.settings, push)
    if dedup_id is None:
        return False
    return queue.dedups.find(queue.dedup_key(dedup_id, group), now_ms) is not None


def merged_order(spread: Sequence[Any]) -> list[Any]:
    """Messages of several shards, sorted by priority, then by the time they were pushed."""
    return sorted(spread, key=lambda each: (-each.priority, each.pushed_at_ms, each.sequence))


def shards_at(queue: str, places: Places, homes: int) -> list[int]:
    """The numbers of the shards of these places."""
    return shards_of(queue, homes, places) if isinstance(places, int) else [*places]


def places_at(queue: str, numbers: Sequence[int], homes: int) -> Places:
    """The places that are the shards with these numbers."""
    count = len(numbers)
    return count if [*numbers] == shards_of(queue, homes, count) else (*numbers,)


def shards_left(queue: str, spread: Spread, homes: int) -> list[int]:
    """The shards that a queue was in before, and may still have messages in."""
    found = itertools.chain.from_iterable(shards_at(queue, each, homes) for each in spread.before)
    return [*dict.fromkeys(found)]


def places_in(queue: str, spread: Spread, homes: int) -> list[int]:
    """All shards in which a queue with this spread may have messages; first those that it was in
    before."""
    current = shards_at(queue, spread.shards, homes)
    return [*dict.fromkeys((*shards_left(queue, spread, homes), *current))]
