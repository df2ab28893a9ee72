"""The events of a journal: what happened to queues and messages. An event is never changed.

Every event has the time at which it happened and the queue's number; numbers are never reused.
Replaying the events in order through `ShardState.apply` gives the state.
An event of a claim has its epoch: the claim's number among those of its message.
"""

import msgspec

from penstock.service import Attributes, QueueSettings


class Event(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The fields that all events share."""

    at_ms: int
    queue: int


class QueueCreated(Event, frozen=True, gc=False, array_like=True, tag=1):
    name: str
    settings: QueueSettings


class QueueConfigured(Event, frozen=True, gc=False, array_like=True, tag=2):
    settings: QueueSettings


class QueueRemoved(Event, frozen=True, gc=False, array_like=True, tag=3):
    """The queue and its messages are gone; `count` is how many they were."""

    count: int


class QueuePurged(Event, frozen=True, gc=False, array_like=True, tag=4):
    """All messages the queue held at this point are gone: those of a rank below `before`."""

    count: int
    before: int


class Pushed(Event, frozen=True, gc=False, array_like=True, tag=5):
    """A message was pushed. `visible_at_ms` and `expires_at_ms` are 0 for "at once" and "by the
    queue's retention"."""

    number: int
    body: bytes
    attributes: Attributes | None = None
    priority: int = 0
    group: str | None = None
    dedup_id: str | None = None
    visible_at_ms: int = 0
    expires_at_ms: int = 0
    context: dict[str, str] | None = None
    size_bytes: int = 0


class DelayEnded(Event, frozen=True, gc=False, array_like=True, tag=6):
    """A message that was delayed since its push (epoch 0) or since this claim is visible again."""

    number: int
    epoch: int


class Claimed(Event, frozen=True, gc=False, array_like=True, tag=7):
    number: int
    epoch: int
    deadline_ms: int
    attempt_id: str | None = None
    holder: str | None = None


class Extended(Event, frozen=True, gc=False, array_like=True, tag=8):
    number: int
    epoch: int
    deadline_ms: int


class Released(Event, frozen=True, gc=False, array_like=True, tag=9):
    """The holder gave the message back; it is delayed until `visible_at_ms` if that is not 0."""

    number: int
    epoch: int
    visible_at_ms: int = 0


class ClaimExpired(Event, frozen=True, gc=False, array_like=True, tag=10):
    """The deadline of the claim with this epoch passed; the message is visible again."""

    number: int
    epoch: int


class Deleted(Event, frozen=True, gc=False, array_like=True, tag=11):
    number: int
    epoch: int


class Expired(Event, frozen=True, gc=False, array_like=True, tag=12):
    """The message outlived its TTL or the queue's retention."""

    number: int


class Moved(Event, frozen=True, gc=False, array_like=True, tag=13):
    """The message left this queue for the end of another, keeping its number.

    `rank` is its place there. `dead` is true for a dead letter, and false for a redrive.
    """

    number: int
    to: int
    rank: int
    dead: bool


class Lost(Event, frozen=True, gc=False, array_like=True, tag=14):
    """The content of a claimed message failed its checksum: the message is removed."""

    number: int
    epoch: int


class Carried(Event, frozen=True, gc=False, array_like=True, tag=15):
    """The content of a message, written again so that the file it was in can be dropped.

    It changes no state, only the place of the content.
    """

    number: int
    pushed: Pushed


class QueueStated(Event, frozen=True, gc=False, array_like=True, tag=16):
    """The state of a queue, repeated because the files with the events that led to it are dropped.

    It changes no state: a reader that begins here learns the queue's name and settings from it.
    """

    name: str
    settings: QueueSettings
    created_at_ms: int
    configured_at_ms: int


class Departed(Event, frozen=True, gc=False, array_like=True, tag=17):
    """A dead letter left this queue for one that is in another shard.

    It is in no queue then; this shard keeps it in its outbox until `Arrived`.
    `epoch` is its last claim here.
    """

    number: int
    epoch: int
    to_shard: int
    to_queue: str


class Arrived(Event, frozen=True, gc=False, array_like=True, tag=18):
    """A message that departed is durable in the other shard, and is removed from the outbox.

    `queue` and `epoch` are those of its `Departed`. It is message `to_number` of shard `to_shard`;
    0 in journals of versions that did not note it.
    """

    number: int
    epoch: int
    to_shard: int = 0
    to_number: int = 0


AnyEvent = (
    QueueCreated
    | QueueConfigured
    | QueueRemoved
    | QueuePurged
    | Pushed
    | DelayEnded
    | Claimed
    | Extended
    | Released
    | ClaimExpired
    | Deleted
    | Expired
    | Moved
    | Lost
    | Carried
    | QueueStated
    | Departed
    | Arrived
)
