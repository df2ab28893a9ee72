"""The commands of a queue service, its replies, and the interface that every backend implements.
Long, because it is one list: every command with its reply and the limits of its fields.

A backend is a `QueueService`: one method, `execute(command) -> reply`. `Command[R]` in the class
line of a command is the type of its reply. Durations and instants are whole milliseconds here;
`client` has seconds. On Penstock's own wire, commands are arrays tagged by a number, so fields are
only ever added at the end, always with a default.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
    overload,
)

import msgspec

from penstock.errors import InvalidField, QueueInUse, UnsupportedOperation

SECOND_MS: Final = 1_000
MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS

BODY_BYTES_MAX: Final = 64 * 1024 * 1024
VISIBILITY_MS_MAX: Final = 12 * HOUR_MS
DELAY_MS_MAX: Final = 366 * DAY_MS
TTL_MS_MAX: Final = 366 * DAY_MS
WAIT_MS_MAX: Final = DAY_MS
PRIORITY_MAX: Final = 9
PULL_LIMIT_MAX: Final = 10_000
PEEK_LIMIT_MAX: Final = 1_000
QUEUES_LIMIT_MAX: Final = 2**31
BATCH_ITEMS_MAX: Final = 10_000
ATTRIBUTES_MAX: Final = 64
ANNOTATIONS_MAX: Final = 256
ANNOTATIONS_BYTES_MAX: Final = 64 * 1024
ID_CHARS_MAX: Final = 128
DEDUP_WINDOW_MS: Final = 5 * MINUTE_MS

if TYPE_CHECKING:
    Attributes = dict[str, str | bytes]
else:
    # msgspec decodes text and bytes without a type, but not for the union `str | bytes`.
    Attributes = dict[str, Any]
State = Literal["visible", "delayed", "in_flight"]
# The entry of a push's context that names who pushed it, for its history.
PUSHER: Final = "pushed_by"
R = TypeVar("R", covariant=True)
T = TypeVar("T")
# How many messages one Redrive moves, unless a service has its own limit: other commands wait
# meanwhile.
REDRIVE_MAX: Final = 250
# What of a long request is decoded, executed or encoded in one bounded step (each takes about
# 10 ms): items with all options, items with only a body, bytes, and descriptions of queues, of
# which each has up to 64 KiB.
PART_ITEMS_MAX: Final = 200
PLAIN_PART_ITEMS_MAX: Final = 2_500
PART_BYTES_MAX: Final = 4 * 1024 * 1024
PART_QUEUES_MAX: Final = 200


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message as it was pushed, and how often it was pulled since.

    `sequence` is its place in the queue's order of arrival. `source` is the queue it was
    dead-lettered from. `context` is data that a wire protocol keeps with the message.
    """

    id: str
    queue: str
    body: bytes
    attributes: Attributes
    priority: int
    group: str | None
    dedup_id: str | None
    pushed_at_ms: int
    sequence: int
    receives: int
    first_pulled_at_ms: int | None
    source: str | None
    context: dict[str, str] | None


class Claim(Message, frozen=True, gc=False, array_like=True):
    """A message that one holder has claimed until a deadline.

    `proof` is the receipt, or an object whose `str` is the receipt.
    """

    proof: Any
    epoch: int
    deadline_ms: int

    @property
    def receipt(self) -> str:
        """The proof of this claim as text, to be stored or sent."""
        return str(self.proof)


class QueueSettings(msgspec.Struct, frozen=True, gc=False):
    """Everything that can be set on a queue; `None` means no limit.

    A message that arrived `priority_age_ms` ago or earlier is pulled before younger ones, whatever
    their priorities; with `None` priority is strict.

    Of a `paused` queue pulls get nothing; everything else goes on, its waits and its times too.

    `annotations` is kept and returned unchanged for the wire protocols. One whose name begins with
    a dot is a note: changing it does not count as configuring the queue.
    """

    visibility_ms: int = 30 * SECOND_MS
    delay_ms: int = 0
    wait_ms: int = 0
    retention_ms: int = 4 * DAY_MS
    body_bytes_max: int = 1024 * 1024
    messages_max: int | None = None
    bytes_max: int | None = None
    in_flight_max: int | None = None
    priority_age_ms: int | None = None
    dead_letter: str | None = None
    max_receives: int | None = None
    fifo: bool = False
    dedup_by_content: bool = False
    dedup_per_group: bool = False
    annotations: dict[str, str] = {}
    paused: bool = False


class QueueCounts(msgspec.Struct, frozen=True, gc=False):
    """How often something happened in a queue since its service was opened.

    Only the difference between two of them says something; they begin anew with the service.
    `returned` counts claims that ended without a delete, and `dead` messages that left for the
    dead-letter queue.
    """

    pushed: int = 0
    pulled: int = 0
    deleted: int = 0
    returned: int = 0
    dead: int = 0


class QueueStats(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A queue's depth, the age of its oldest message, and its counts if the backend keeps any.

    `stored_bytes` and `oldest_age_ms` are None if the backend does not know them. Pulls get
    nothing while the queue is `paused`.
    """

    queue: str
    visible: int
    delayed: int
    in_flight: int
    stored_bytes: int | None
    oldest_age_ms: int | None
    waiting_pulls: int
    counts: QueueCounts | None = None
    paused: bool = False

    @property
    def messages(self) -> int:
        """Every message the queue holds, whatever its state."""
        return self.visible + self.delayed + self.in_flight


class QueueInfo(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A queue's name, settings and dates.

    `also_created` names the dead-letter queue that the answered command created.
    """

    queue: str
    settings: QueueSettings
    created_at_ms: int
    configured_at_ms: int
    also_created: list[str] = []


class PushReply(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The id of the pushed message; `duplicate` if an earlier push had added it."""

    id: str
    sequence: int
    duplicate: bool


class HistoryEvent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One thing that happened to a message.

    `detail` has the fields after it as text. `deadline_ms` is that of a claim, `visible_at_ms` the
    end of a delay, `holder` who pulled the message, or who pushed it, `to` the queue that it moved
    to, and `dead` whether as a dead letter.
    """

    at_ms: int
    kind: str
    queue: str
    epoch: int | None = None
    detail: str = ""
    deadline_ms: int | None = None
    visible_at_ms: int | None = None
    expires_at_ms: int | None = None
    holder: str | None = None
    to: str | None = None
    dead: bool = False


class Command(
    msgspec.Struct, Generic[R], frozen=True, gc=False, array_like=True, omit_defaults=True
):
    """A request; `R` is the type of its reply."""


class Push(Command[PushReply], frozen=True, gc=False, array_like=True, tag=1):
    """Adds a message. `delay_ms` and `ttl_ms` default to the queue's own."""

    queue: str
    body: bytes
    delay_ms: int | None = None
    priority: int = 0
    ttl_ms: int | None = None
    dedup_id: str | None = None
    group: str | None = None
    attributes: Attributes | None = None
    context: dict[str, str] | None = None


class Pull(Command[list[Claim]], frozen=True, gc=False, array_like=True, tag=2):
    """Claims up to `limit` messages, waiting up to `wait_ms` for the first.

    Repeating an `attempt_id` gives the same claims while all of them are valid; with `renew` their
    visibility is restarted. With `bytes_max` the reply ends before the message whose body and
    attributes would bring the total above it; the first message is returned whatever its size.
    """

    queue: str
    limit: int = 1
    visibility_ms: int | None = None
    wait_ms: int | None = None
    attempt_id: str | None = None
    holder: str | None = None
    bytes_max: int | None = None
    renew: bool = False


class Delete(Command[bool], frozen=True, gc=False, array_like=True, tag=3):
    """Ends a claim and its message; false if the message was gone already.

    A receipt, here and below, is its text or a claim's own `proof`. With `late`, a receipt is valid
    even after its claim ran out, as long as the message was not claimed again since; never on a
    FIFO queue.
    """

    queue: str
    receipt: Any
    late: bool = False


class Extend(Command[int], frozen=True, gc=False, array_like=True, tag=4):
    """Moves a claim's deadline to `visibility_ms` from now; the new deadline is the reply.

    With `held_ms_max` it is refused with ClaimTooLong if a message that was never claimed before
    would then be held for longer than that in all.
    """

    queue: str
    receipt: Any
    visibility_ms: int
    late: bool = False
    held_ms_max: int | None = None


class Release(Command[None], frozen=True, gc=False, array_like=True, tag=5):
    """Ends a claim and returns its message to its place, at once or after `delay_ms`."""

    queue: str
    receipt: Any
    delay_ms: int = 0
    late: bool = False


class Peek(Command[list[Message]], frozen=True, gc=False, array_like=True, tag=6):
    """Reads up to `limit` messages in one state, in the queue's order, without claiming them.

    `bytes_max` limits the reply as it does that of a Pull.
    """

    queue: str
    limit: int = 1
    state: State = "visible"
    bytes_max: int | None = None


class Stats(Command[QueueStats], frozen=True, gc=False, array_like=True, tag=7):
    """Reads a queue's counts, and the age of its oldest message."""

    queue: str


class Purge(Command[int], frozen=True, gc=False, array_like=True, tag=8):
    """Removes every message of a queue, those in flight included; the reply counts them."""

    queue: str


class Redrive(Command[int], frozen=True, gc=False, array_like=True, tag=9):
    """Moves up to `limit` visible messages to `to`, or back to the queues they came from."""

    queue: str
    to: str | None = None
    limit: int = 1_000


class CreateQueue(Command[QueueInfo], frozen=True, gc=False, array_like=True, tag=10):
    """Creates a queue; one that exists with these same settings is returned."""

    queue: str
    settings: dict[str, Any] = {}


class ConfigureQueue(Command[QueueInfo], frozen=True, gc=False, array_like=True, tag=11):
    """Changes the named settings and leaves the others."""

    queue: str
    settings: dict[str, Any] = {}


class DeleteQueue(Command[None], frozen=True, gc=False, array_like=True, tag=12):
    """Removes a queue, its messages and its claims; pulls waiting on it fail.

    Without `force`, a queue that others name as their dead-letter queue is refused with QueueInUse.
    """

    queue: str
    force: bool = True


class DescribeQueue(Command[QueueInfo], frozen=True, gc=False, array_like=True, tag=13):
    """Reads a queue's settings."""

    queue: str


class ListQueues(Command[list[str]], frozen=True, gc=False, array_like=True, tag=14):
    """Lists names in alphabetical order: those that start with `prefix`, and after `after`."""

    prefix: str = ""
    after: str = ""
    limit: int = 1_000


class History(Command[list[HistoryEvent]], frozen=True, gc=False, array_like=True, tag=15):
    """Every event of one message that the journal still has, oldest first."""

    id: str


class DescribeQueues(Command[list[QueueInfo]], frozen=True, gc=False, array_like=True, tag=17):
    """Settings and dates of the queues that `ListQueues` with the same fields would name."""

    prefix: str = ""
    after: str = ""
    limit: int = 1_000


class PeekFrom(Command[list[Message]], frozen=True, gc=False, array_like=True, tag=18):
    """Reads messages in one state, page by page, in order of arrival, without claiming them.

    The first of them arrived after the message whose `sequence` is `after`.
    """

    queue: str
    after: int = 0
    limit: int = 100
    state: State = "visible"
    bytes_max: int | None = None


class PeekIds(Command[list[Message]], frozen=True, gc=False, array_like=True, tag=19):
    """Reads those of these messages that are in the queue, in any state, without claiming them."""

    queue: str
    ids: list[str]


class PullIds(Command[list[Claim]], frozen=True, gc=False, array_like=True, tag=20):
    """Claims those of these messages that a pull could claim now, whatever their place.

    On a FIFO queue this is only the first message of a group of which none is in flight. The
    proofs are text.
    """

    queue: str
    ids: list[str]
    visibility_ms: int | None = None
    holder: str | None = None


class ReturnIds(Command[int], frozen=True, gc=False, array_like=True, tag=21):
    """Makes those of these messages visible now that are delayed or in flight; counts them.

    Whoever holds one loses its claim, as by a release.
    """

    queue: str
    ids: list[str]


class RedriveIds(Command[int], frozen=True, gc=False, array_like=True, tag=22):
    """Moves those of these messages that are visible, as a Redrive does; the reply counts them."""

    queue: str
    ids: list[str]
    to: str | None = None


BatchItem = Push | Delete | Extend | Release


class Batch(Command[list[Any]], frozen=True, gc=False, array_like=True, tag=16):
    """Several commands in one append; each item's reply, or the RequestError that refused it."""

    items: list[BatchItem]


class PushMany(Command[Sequence[Any]], frozen=True, array_like=True):
    """Many pushes to one queue in one append; each PushReply, or the RequestError that refused it.

    `delay_ms` to `attributes` are shared by all. The columns after them have one value a message;
    None in a column means the shared value.
    """

    queue: str
    bodies: Sequence[bytes]
    dedup_ids: Sequence[str | None] | None = None
    delay_ms: int | None = None
    priority: int = 0
    ttl_ms: int | None = None
    group: str | None = None
    attributes: Attributes | None = None
    delays_ms: Sequence[int | None] | None = None
    priorities: Sequence[int | None] | None = None
    ttls_ms: Sequence[int | None] | None = None
    groups: Sequence[str | None] | None = None
    each_attributes: Sequence[Attributes | None] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the pushes have nothing but bodies, and either all a dedup id or none."""
        ids = self.dedup_ids
        others = (
            self.delay_ms,
            self.ttl_ms,
            self.group,
            self.attributes,
            self.delays_ms,
            self.priorities,
            self.ttls_ms,
            self.groups,
            self.each_attributes,
        )
        return (
            others.count(None) == len(others)
            and self.priority == 0
            and (ids is None or (len(ids) == len(self.bodies) and None not in ids))
        )

    @property
    def has_whole_columns(self) -> bool:
        """Whether each column has one value a message."""
        count = len(self.bodies)
        return all(len(values) == count for values in self._columns().values())

    def _columns(self) -> dict[str, Sequence[Any]]:
        values = {name: getattr(self, name) for name in _COLUMNS}
        return {name: each for name, each in values.items() if each is not None}

    def part(self, start: int, stop: int) -> "PushMany":
        """The pushes from one place to another."""
        columns = {name: values[start:stop] for name, values in self._columns().items()}
        return msgspec.structs.replace(self, bodies=self.bodies[start:stop], **columns)

    @staticmethod
    def joined(parts: Sequence["PushMany"]) -> "PushMany":
        """The pushes of all parts of one command, which have the same fields and columns."""
        columns = {
            name: [value for part in parts for value in getattr(part, name)]
            for name in ("bodies", *parts[0]._columns())
        }
        return msgspec.structs.replace(parts[0], **columns)

    def pushes(self) -> list[Push]:
        """The same pushes one by one. Raises InvalidField for a column of another length."""
        count = len(self.bodies)
        return list(
            map(
                Push,
                repeat(self.queue, count),
                self.bodies,
                _column("delays_ms", self.delays_ms, self.delay_ms, count),
                _column("priorities", self.priorities, self.priority, count),
                _column("ttls_ms", self.ttls_ms, self.ttl_ms, count),
                _column("dedup_ids", self.dedup_ids, None, count),
                _column("groups", self.groups, self.group, count),
                _column("each_attributes", self.each_attributes, self.attributes, count),
            )
        )


_COLUMNS: Final = ("dedup_ids", "delays_ms", "priorities", "ttls_ms", "groups", "each_attributes")


def part_ranges(sizes: Sequence[int], items_max: int) -> Iterator[tuple[int, int]]:
    """Where each part of items of these sizes begins and ends: it has at least one item."""
    start = 0
    part_bytes = 0
    for place, size in enumerate(sizes):
        if place > start and (place - start == items_max or part_bytes + size > PART_BYTES_MAX):
            yield start, place
            start, part_bytes = place, 0
        part_bytes += size
    if sizes:
        yield start, len(sizes)


def _column(name: str, values: Sequence[T | None] | None, shared: T, count: int) -> Iterable[T]:
    if values is None:
        return repeat(shared, count)
    if len(values) != count:
        raise InvalidField(f"{name}: {len(values)} values for {count} bodies")
    return [shared if value is None else value for value in values]


class NumberedReplies(Sequence[PushReply]):
    """The replies to pushes that all made messages, with numbers one after another.

    A sequence of PushReply, each made only when it is read. An id is `id_start` and the number in
    twelve hexadecimal digits.
    """

    __slots__ = ("id_start", "numbers")

    def __init__(self, id_start: str, numbers: range) -> None:
        self.id_start = id_start
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> PushReply: ...
    @overload
    def __getitem__(self, place: slice) -> list[PushReply]: ...
    def __getitem__(self, place: int | slice) -> PushReply | list[PushReply]:
        if isinstance(place, slice):
            return [self._reply(number) for number in self.numbers[place]]
        return self._reply(self.numbers[place])

    def _reply(self, number: int) -> PushReply:
        return PushReply(f"{self.id_start}{number:012x}", number, False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class QueueService(Protocol):
    """The interface of every backend, for callers that may block.

    `LACKS` maps each behaviour of the contract that this backend does not have to the reason.
    `redrive_max` is how many messages one Redrive command may move.
    """

    LACKS: ClassVar[Mapping[str, str]]
    redrive_max: int

    def execute(self, command: Command[R]) -> R:
        """Executes the command. Raises a PenstockError, and then nothing has changed."""
        ...

    def close(self) -> None:
        """Releases all resources; waiting commands fail with EngineClosed."""
        ...


class AsyncQueueService(Protocol):
    """The same interface for asyncio callers."""

    LACKS: ClassVar[Mapping[str, str]]
    redrive_max: int

    async def execute(self, command: Command[R]) -> R:
        """Executes the command. Raises a PenstockError, and then nothing has changed."""
        ...

    async def close(self) -> None:
        """Releases all resources; waiting commands fail with EngineClosed."""
        ...


_NEEDED_BY: Final[dict[type, str]] = {
    PeekFrom: "peek pages",
    PeekIds: "peek pages",
    PullIds: "by id",
    ReturnIds: "by id",
    RedriveIds: "by id",
}


def refuse_command(command: object, lacks: Mapping[str, str], who: str) -> NoReturn:
    """Refuses a command that a backend does not have, with the reason if `lacks` has one."""
    lacked = _NEEDED_BY.get(type(command), "")
    if lacked in lacks:
        raise UnsupportedOperation(f"{lacked}: {lacks[lacked]}")
    raise InvalidField(f"command: {who} has no command {type(command).__name__}")


_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,79}(@[A-Za-z0-9_.-]{1,80})?", re.ASCII)
_SETTING_LIMITS: Final[dict[str, tuple[int, int]]] = {
    "visibility_ms": (0, VISIBILITY_MS_MAX),
    "delay_ms": (0, DELAY_MS_MAX),
    "wait_ms": (0, WAIT_MS_MAX),
    "retention_ms": (1, TTL_MS_MAX),
    "body_bytes_max": (1, BODY_BYTES_MAX),
    "messages_max": (1, 2**63 - 1),
    "bytes_max": (1, 2**63 - 1),
    "in_flight_max": (1, 2**63 - 1),
    "priority_age_ms": (1, TTL_MS_MAX),
    "max_receives": (1, 1_000_000),
}
_OPTIONAL_SETTINGS: Final = frozenset(
    {
        "messages_max",
        "bytes_max",
        "in_flight_max",
        "priority_age_ms",
        "dead_letter",
        "max_receives",
    }
)
_BOOLEAN_SETTINGS: Final = frozenset({"fifo", "dedup_by_content", "dedup_per_group", "paused"})


def check_name(name: object, field: str = "queue") -> str:
    """Returns the queue name. Raises InvalidField."""
    if type(name) is str and _NAME.fullmatch(name):
        return name
    shown = repr(name) if len(repr(name)) <= 100 else repr(name)[:100] + "…"
    raise InvalidField(
        f"{field}: {shown} is not a queue name; use 1 to 80 of A-Z a-z 0-9 _ - . "
        "(the first not a dot), with an optional @scope"
    )


def check_unused(queue: str, sources: Sequence[str]) -> None:
    """Raises QueueInUse if any queue sends its dead letters to the one to be removed."""
    if sources:
        shown = ", ".join(map(repr, sorted(sources)[:5])) + (", …" if len(sources) > 5 else "")
        raise QueueInUse(
            f"queue: {queue!r} is the dead-letter queue of {shown}; configure "
            f"{'it' if len(sources) == 1 else 'them'} first, or remove it with force"
        )


def check_number(field: str, value: object, low: int, high: int) -> int:
    """Returns the whole number if it lies within the limits. Raises InvalidField."""
    if type(value) is not int:
        raise InvalidField(f"{field}: expected a whole number, got {type(value).__name__}")
    if not low <= value <= high:
        # Python refuses to format a number of thousands of digits.
        shown = value if -(10**30) < value < 10**30 else "a number of over 30 digits"
        raise InvalidField(f"{field}: {shown} is outside {low} to {high}")
    return value


def check_pull(command: Pull) -> None:
    """Checks the fields of a pull but its queue. Raises InvalidField."""
    check_number("limit", command.limit, 1, PULL_LIMIT_MAX)
    if command.visibility_ms is not None:
        check_number("visibility_ms", command.visibility_ms, 0, VISIBILITY_MS_MAX)
    if command.wait_ms is not None:
        check_number("wait_ms", command.wait_ms, 0, WAIT_MS_MAX)
    if command.bytes_max is not None:
        check_number("bytes_max", command.bytes_max, 0, 2**63 - 1)
    check_holder(command.holder)
    if command.attempt_id is not None:
        check_id("attempt_id", command.attempt_id)


def check_id(field: str, value: object) -> str:
    """Returns an identifier such as a dedup id, an attempt id or a group. Raises InvalidField."""
    if type(value) is not str:
        raise InvalidField(f"{field}: expected text, got {type(value).__name__}")
    if not 1 <= len(value) <= ID_CHARS_MAX or not value.isprintable():
        raise InvalidField(
            f"{field}: expected 1 to {ID_CHARS_MAX} printable characters, got {len(value)}"
            + ("" if value.isprintable() else " with an unprintable one among them")
        )
    return value


def check_holder(holder: object) -> None:
    """Checks the holder of a pull. Raises InvalidField."""
    if holder is not None and not (type(holder) is str and _is_holder(holder)):
        check_id("holder", holder)


@lru_cache(1_024)
def _is_holder(holder: str) -> bool:
    """Whether `check_id` accepts a holder: few holders make most claims."""
    return 1 <= len(holder) <= ID_CHARS_MAX and holder.isprintable()


def are_ids(values: Sequence[Any]) -> bool:
    """Whether `check_id` would accept every one of these; the fast path for many."""
    try:
        sizes = set(map(len, values))
        return (
            bool(sizes)
            and min(sizes) >= 1
            and max(sizes) <= ID_CHARS_MAX
            and ("".join(values).isprintable())
        )
    except TypeError:
        return False


def check_pairs(
    field: str, pairs: object, allow_bytes: bool, count_max: int = ATTRIBUTES_MAX
) -> int:
    """Returns the UTF-8 size of a mapping from text to text (or bytes). Raises InvalidField."""
    if type(pairs) is not dict:
        raise InvalidField(f"{field}: expected a dict, got {type(pairs).__name__}")
    if len(pairs) > count_max:
        raise InvalidField(f"{field}: {len(pairs)} entries, at most {count_max} are allowed")
    size_bytes = 0
    for name, value in pairs.items():
        if type(name) is not str or not name:
            raise InvalidField(f"{field}: names must be text that is not empty, got {name!r}")
        if type(value) is str:
            size_bytes += _utf8_bytes(f"{field}[{name!r}]", value)
        elif type(value) is bytes and allow_bytes:
            size_bytes += len(value)
        else:
            expected = "text or bytes" if allow_bytes else "text"
            raise InvalidField(
                f"{field}[{name!r}]: expected {expected}, got {type(value).__name__}"
            )
        size_bytes += _utf8_bytes(field, name)
    return size_bytes


def _utf8_bytes(field: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidField(f"{field}: holds a lone surrogate, which is not text") from None


def changed_settings(base: QueueSettings, changes: object) -> QueueSettings:
    """Returns `base` with the named settings changed. Raises InvalidField."""
    if type(changes) is not dict:
        raise InvalidField(f"settings: expected a dict, got {type(changes).__name__}")
    for name, value in changes.items():
        if name not in QueueSettings.__struct_fields__:
            known = ", ".join(QueueSettings.__struct_fields__)
            raise InvalidField(f"settings: there is no setting {name!r}; there are {known}")
        if value is None and name in _OPTIONAL_SETTINGS:
            continue
        if name in _SETTING_LIMITS:
            check_number(name, value, *_SETTING_LIMITS[name])
        elif name in _BOOLEAN_SETTINGS:
            if type(value) is not bool:
                raise InvalidField(f"{name}: expected true or false, got {type(value).__name__}")
        elif name == "dead_letter":
            check_name(value, "dead_letter")
        else:
            size_bytes = check_pairs(name, value, allow_bytes=False, count_max=ANNOTATIONS_MAX)
            if size_bytes > ANNOTATIONS_BYTES_MAX:
                raise InvalidField(
                    f"{name}: {size_bytes} bytes, at most {ANNOTATIONS_BYTES_MAX} are allowed"
                )
    settings = msgspec.structs.replace(base, **changes)
    if (settings.dead_letter is None) != (settings.max_receives is None):
        raise InvalidField("dead_letter and max_receives go together: set both or neither")
    if not settings.fifo and settings.dedup_per_group:
        raise InvalidField("dedup_per_group: only a fifo queue can have it")
    if settings.fifo and settings.priority_age_ms is not None:
        raise InvalidField("priority_age_ms: a fifo queue has no priorities and cannot have it")
    return settings


def unseen_claims(command: object, reply: Any) -> list[Release]:
    """The releases of what a command has claimed, for a caller that was interrupted before it knew.

    None of an attempt: whoever repeats it gets its claims.
    """
    is_attempt = isinstance(command, Pull) and command.attempt_id is not None
    if not isinstance(command, Pull | PullIds) or is_attempt or not reply:
        return []
    return [Release(claim.queue, claim.proof) for claim in reply]
