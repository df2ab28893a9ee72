"""The engine answers commands with the pure state machine, a journal and a clock.
Long, because the handler of every command is beside the one `submit` that runs them all.

It is synchronous and never blocks: `submit` settles what is due, decides, applies, appends, and
returns the reply; `answer_sequence` is then the sequence that must be durable before the reply may
be shown. `BlockingEngine` and `LoopEngine` do the waiting.

A pull that finds nothing may wait (`waiting`), without polling and without a timer per message.
"""

import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, repeat, takewhile
from typing import Any, Final, NoReturn, Protocol, TypeVar, cast

import msgspec

from penstock.backends.engine.waiting import Tried, Waiter, WaitingLine
from penstock.clock import Clock, SystemClock
from penstock.core import runs
from penstock.core.delivery import Content, Delivery, receives, size_bytes
from penstock.core.departures import Owed
from penstock.core.events import (
    AnyEvent,
    Arrived,
    Carried,
    DelayEnded,
    Departed,
    Extended,
    Lost,
    Moved,
    Pushed,
    QueueCreated,
    QueueStated,
    Released,
)
from penstock.core.queue import QueueState
from penstock.core.receipts import (
    IDENTITY_BYTES,
    KEY_BYTES,
    MessageIds,
    Receipts,
    Ticket,
)
from penstock.core.runs import Run
from penstock.core.shard import SETTLE_MAX, ShardState
from penstock.errors import (
    CorruptEntry,
    EngineClosed,
    InvalidField,
    JournalError,
    MessageNotFound,
    PenstockError,
    RequestError,
    StaleReceipt,
    StoreFull,
)
from penstock.forked import start_over_when_forked
from penstock.journal import QUEUES, Journal, MemoryJournal
from penstock.output import Lines, logger
from penstock.service import (
    BATCH_ITEMS_MAX,
    PEEK_LIMIT_MAX,
    PULL_LIMIT_MAX,
    PUSHER,
    QUEUES_LIMIT_MAX,
    WAIT_MS_MAX,
    Batch,
    Claim,
    Command,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    DescribeQueues,
    Extend,
    History,
    HistoryEvent,
    ListQueues,
    Message,
    NumberedReplies,
    Peek,
    PeekFrom,
    PeekIds,
    Pull,
    PullIds,
    Purge,
    Push,
    PushMany,
    PushReply,
    QueueCounts,
    QueueInfo,
    QueueStats,
    Redrive,
    RedriveIds,
    Release,
    ReturnIds,
    Stats,
    check_number,
    unseen_claims,
)

R = TypeVar("R")
# How long settling is put off on a full disk before the next try.
_NO_ROOM_MS: Final = 1_000
_BATCHABLE: Final = frozenset({Push, Delete, Extend, Release})
# The fields of an event that the history tells, if they are set.
_TOLD: Final = (
    "deadline_ms",
    "visible_at_ms",
    "expires_at_ms",
    "holder",
    "dead",
    "to_queue",
)
# Commands whose answer promises no change, so that it need not wait for the disk.
_READ_ONLY: Final = frozenset(
    {Peek, PeekFrom, PeekIds, Stats, DescribeQueue, DescribeQueues, ListQueues, History}
)


class Housekeeping(Protocol):
    """Background work on an engine's storage: taking snapshots, dropping old files."""

    # The error of the last step; None if it succeeded.
    last_error: Exception | None

    def start(
        self, exclusive: Callable[[Callable[[], object]], object], *, indexes: bool = False
    ) -> None:
        """Begins; `exclusive` runs a function while no other thread uses the engine.

        With `indexes`, what the journal had at the start is prepared for History.
        """
        ...

    def stop(self) -> None:
        """Ends; must not be called by a thread that has exclusive use of the engine (deadlock)."""
        ...


class Engine:
    """One shard in this process. Not thread-safe: its callers must make one call at a time."""

    # How many messages are settled at once before the next command is served.
    settle_max = SETTLE_MAX
    # How many of the command's own queue at most. On an event loop fewer than a pull may ask for.
    own_settle_max = PULL_LIMIT_MAX
    # How many messages a pull claims in one step, if its steps are executed on an event loop.
    pull_part_max = 500

    def __init__(
        self,
        journal: Journal | None = None,
        clock: Clock | None = None,
        *,
        shard: ShardState | None = None,
        identity: bytes | None = None,
        key: bytes | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.shard = shard or ShardState()
        self.journal: Journal = journal or MemoryJournal()
        self._now_ms = self.clock.now_ms
        self._alarm = self.shard.alarm
        # If the journal keeps nothing and no pull waits, events are dropped once applied.
        self._is_volatile = self.journal.keeps_nothing
        self._make_room = None if self._is_volatile else self.journal.make_room
        self._ids = MessageIds(identity or secrets.token_bytes(IDENTITY_BYTES))
        self._receipts = Receipts(key or secrets.token_bytes(KEY_BYTES))
        self._line = WaitingLine(self._alarm, self._pull_now, self._has_visible)
        # The line's own dict: every command tests whether it is empty.
        self._waiting = self._line.queues
        self._stopped: PenstockError | None = None
        self._handlers: dict[type, Callable[[Any, int], Any]] = {
            Push: self._push,
            Pull: self._pull,
            Delete: self._delete,
            Extend: self._extend,
            Release: self._release,
            Peek: self._peek,
            Stats: self._stats,
            Purge: self._purge,
            Redrive: self._redrive,
            CreateQueue: self._create,
            ConfigureQueue: self._configure,
            DeleteQueue: self._remove,
            DescribeQueue: self._describe,
            ListQueues: self._list,
            History: self._history,
            Batch: self._batch,
            PushMany: self._push_many,
            DescribeQueues: self._describe_all,
            PeekFrom: self._peek_from,
            PeekIds: self._peek_ids,
            PullIds: self._pull_ids,
            ReturnIds: self._return_ids,
            RedriveIds: self._redrive_ids,
        }
        # The events of the command under way, in order; appended together as one entry.
        self._events: list[AnyEvent] = []
        # Commands are answered from here on, so containers are freed in parts.
        self.shard.discards.is_deferred = True
        self._sequence = 0
        self.answer_sequence = 0
        # The contents that the pull under way has read; None for a damaged message. With a journal
        # that keeps nothing there is nothing to read: the messages hold their content themselves.
        self._loaded: list[Pushed | None] = []
        self._load = None if self._is_volatile else self._load_content
        self.upkeep: Housekeeping | None = None
        # The sorted names of the queues, and the shard's counters for which they are valid.
        self._sorted_names: list[str] = []
        self._sorted_state = (0, 0)
        start_over_when_forked(self)

    def start_over(self) -> None:
        """In the child of a fork: refuses every command, because the state is only a copy.

        Nobody is told of it: who waits, waits in the parent.
        """
        is_memory = isinstance(self.journal, MemoryJournal)
        advice = "use file:PATH, which processes share" if is_memory else "open it here again"
        self._handlers = {}
        self._stopped = JournalError(f"store: the process that forked this one opened it; {advice}")

    def submit(self, command: Command[R]) -> R:
        """The reply; `answer_sequence` must be durable before it may be shown."""
        try:
            handler = self._handlers[type(command)]
        except KeyError:
            self._refuse(command)
        make_room, read_clock = self._make_room, self._now_ms
        if make_room is not None:
            make_room(command)
        now_ms = read_clock()
        try:
            try:
                if now_ms >= self._alarm.next_ms:
                    self._settle(now_ms, command)
                reply: R = handler(command, now_ms)
                if not self._events:
                    # An answer without a change may depend on one that is not durable yet, such as
                    # "this is a duplicate", "the message is gone" or "these are your claims".
                    self.answer_sequence = 0 if type(command) in _READ_ONLY else self._sequence
                elif self._is_volatile and not self._waiting:
                    self._events = []
                else:
                    # The same as `_append`, with one call less.
                    events = self._events
                    self._events = []
                    try:
                        sequence, places = self.journal.append(events)
                    except PenstockError as error:
                        self._fail(error)
                    self.answer_sequence = self._sequence = sequence
                    if places:
                        self._place(events, places)
                    if self._waiting:
                        self._line.serve(events)
            except StaleReceipt as stale:
                self._keep_events()
                raise self._with_life(stale, command) from None
            except PenstockError:
                self._keep_events()
                raise
        except PenstockError:
            raise
        except BaseException as error:
            # An interrupt, or an error that no handler raises on purpose: the state may contain
            # changes that are not in the journal.
            self._fail(error)
        return reply

    def _with_life(self, stale: StaleReceipt, command: Any) -> StaleReceipt:
        """The error with the command that says who held the message, if the journal knows it."""
        if self._is_volatile or isinstance(command, Batch):
            return stale
        ticket = command.receipt
        if type(ticket) is not Ticket:
            ticket = self._receipts.read(ticket)
        shown = self._ids.show(ticket.number)
        return type(stale)(f"{stale}; penstock why {shown} says what happened to it")

    def _keep_events(self) -> None:
        """Appends the events that happened before a command was refused.

        A handler raises before it changes anything for its command. But before that it may have
        removed damaged messages, or moved some with too many receives.
        """
        if self._events:
            self._append()

    def _refuse(self, command: object) -> NoReturn:
        if self._stopped is not None:
            raise self._stopped
        raise InvalidField(f"command: the engine has no command {type(command).__name__}")

    def _append(self, serves: bool = True) -> int:
        """Appends the events of the command to the journal; returns their sequence.

        Serves the pulls that waited, unless it is called for one of them.
        """
        events = self._events
        self._events = []
        try:
            sequence, places = self.journal.append(events)
        except PenstockError as error:
            # The state has changes that are not in the journal: no more answers from it.
            self._fail(error)
        self._sequence = sequence
        if places:
            self._place(events, places)
        if self._waiting and serves:
            self._line.serve(events)
        return sequence

    def _place(self, events: list[AnyEvent], places: Sequence[int]) -> None:
        """Stores in each message that was pushed the place of its content in the journal."""
        if type(events) is Run:
            for delivery, place in zip(events.deliveries, places, strict=True):
                delivery.content = place
            return
        if len(events) == 1:
            # The usual push: only `Pushed` has a place, so this is one, and its message is there.
            event: Any = events[0]
            self.shard.queues[event.queue].deliveries[event.number].content = places[0]
            return
        pushed = [event for event in events if type(event) is Pushed]
        for each, place in zip(pushed, places, strict=True):
            self.shard.place(each.queue, each.number, place)

    def _settle(self, now_ms: int, command: Command[Any] | None = None) -> None:
        """Settles some of what is due, and in the command's own queue as much as it needs."""
        wanted = min(_messages_wanted(command), self.own_settle_max)
        own_limit = max(self.settle_max, wanted)
        if not self.journal.has_room(2 * (self.settle_max + 3 * own_limit)):
            # Without a later instant, waiting callers would try again at once, in a busy loop.
            self._alarm.next_ms = now_ms + _NO_ROOM_MS
            return
        self._events += self.shard.settle(now_ms, self.settle_max)
        if self._alarm.next_ms <= now_ms:
            queue = self.shard.names.get(_queue_of(command))
            if queue is not None and queue.is_due(now_ms):
                self._events += self.shard.settle_queue(queue, now_ms, own_limit)
        if self._events:
            self._append()
        elif self._waiting:
            self._line.serve()

    # Messages.

    def _push(self, command: Push, now_ms: int) -> PushReply:
        decided = self.shard.push(command, now_ms)
        if isinstance(decided, int):
            return PushReply(self._ids.show(decided), decided, True)
        self._events.append(decided)
        number = decided.number
        return PushReply(self._ids.show(number), number, False)

    def _pull(self, command: Pull, now_ms: int) -> list[Claim]:
        if command.wait_ms is not None:
            check_number("wait_ms", command.wait_ms, 0, WAIT_MS_MAX)
        if self._load is None:
            # Without a journal to read them from, messages hold their content themselves.
            held = self.shard.pull(command, now_ms, self._events)
            if command.attempt_id is not None and held and not self._events:
                self._repeat(command, held, now_ms)
            name = command.queue
            if len(held) == 1:
                return [self._claim(held[0], name, held[0].content)]
            return [self._claim(each, name, each.content) for each in held]
        claims: list[Claim] = []
        while True:
            loaded: list[Pushed | None] = []
            self._loaded = loaded
            deliveries = self.shard.pull(command, now_ms, self._events, self._load)
            if command.attempt_id is not None and deliveries and not self._events:
                self._repeat(command, deliveries, now_ms)
            if len(deliveries) == 1 and loaded[0] is not None:
                return [self._claim(deliveries[0], command.queue, loaded[0])]
            for delivery, content in zip(deliveries, loaded, strict=True):
                if content is None:
                    self._commit(Lost(now_ms, delivery.queue, delivery.number, delivery.epoch))
                else:
                    claims.append(self._claim(delivery, command.queue, content))
            if claims or not deliveries or command.attempt_id is not None:
                return claims
            # All of them were damaged: the loop pulls the messages behind them.
            if len(self._events) > SETTLE_MAX:
                return claims

    def _load_content(self, delivery: Delivery) -> None:
        """Reads a message that is about to be claimed. Raises what the journal raises."""
        content: Content | None = delivery.content
        if isinstance(content, int):
            try:
                content = self.journal.load(content)
            except CorruptEntry:
                content = None
        self._loaded.append(content)

    def _repeat(self, command: Pull, deliveries: list[Delivery], now_ms: int) -> None:
        """Reads the messages of an earlier pull of this attempt; renews its claims if asked to."""
        if self._load is not None:
            for each in deliveries:
                self._load(each)
        if command.renew:
            self._renew(command, deliveries, now_ms)

    def _renew(self, command: Pull, deliveries: list[Delivery], now_ms: int) -> None:
        """Restarts the visibility of the claims that an earlier pull of this attempt made."""
        visibility_ms = command.visibility_ms
        if visibility_ms is None:
            visibility_ms = self.shard.names[command.queue].settings.visibility_ms
        for each in deliveries:
            deadline_ms = now_ms + visibility_ms
            self._commit(Extended(now_ms, each.queue, each.number, each.epoch, deadline_ms))

    def _delete(self, command: Delete, now_ms: int) -> bool:
        ticket = command.receipt
        if type(ticket) is not Ticket or ticket.made_by is not self._receipts:
            ticket = self._receipts.read(ticket)
        try:
            queue = self.shard.names[command.queue]
        except (KeyError, TypeError):
            queue = self.shard.queue(command.queue)
        deleted = queue.delete_held(ticket, now_ms)
        if deleted is None:
            self._settle_claim(command.queue, ticket, now_ms)
            events = self.shard.decide_delete(command.queue, ticket, now_ms, command.late)
            self._commit(*events)
            return bool(events)
        self._events.append(deleted)
        return True

    def _settle_claim(self, name: str, ticket: Ticket, now_ms: int) -> None:
        """Ends the claim that a receipt is for, if it is due and was not settled yet."""
        queue = self.shard.queue(name)
        if queue.number == ticket.queue:
            self._events += self.shard.settle_claim(queue, ticket, now_ms)

    def _extend(self, command: Extend, now_ms: int) -> int:
        ticket = self._receipts.read(command.receipt)
        self._settle_claim(command.queue, ticket, now_ms)
        event = self.shard.decide_extend(
            command.queue,
            ticket,
            command.visibility_ms,
            now_ms,
            command.late,
            command.held_ms_max,
        )
        self._commit(event)
        return event.deadline_ms

    def _release(self, command: Release, now_ms: int) -> None:
        ticket = self._receipts.read(command.receipt)
        self._settle_claim(command.queue, ticket, now_ms)
        events = self.shard.decide_release(
            command.queue, ticket, command.delay_ms, now_ms, command.late
        )
        self._commit(*events)

    def _commit(self, *events: AnyEvent) -> None:
        for event in events:
            self.shard.apply(event)
            self._events.append(event)

    def _batch(self, command: Batch, now_ms: int) -> list[Any]:
        items: list[Any] = command.items
        if type(items) is not list or len(items) > BATCH_ITEMS_MAX:
            raise InvalidField(f"items: expected a list of at most {BATCH_ITEMS_MAX} commands")
        run = runs.as_run(items)
        numbers = None if run is None else self._take_run(run, now_ms)
        if numbers is None:
            return self._submit_each(items, now_ms)
        return list(map(PushReply, self._ids.show_all(numbers), numbers, repeat(False)))

    def _push_many(self, command: PushMany, now_ms: int) -> Sequence[Any]:
        count = len(command.bodies)
        if count > BATCH_ITEMS_MAX:
            raise InvalidField(f"bodies: {count} of them; at most {BATCH_ITEMS_MAX} in one go")
        numbers = None
        if count >= runs.RUN_MIN and command.is_plain:
            numbers = self._take_run(command, now_ms)
        if numbers is None:
            return self._submit_each(command.pushes(), now_ms)
        return NumberedReplies(self._ids.prefix, numbers)

    def _take_run(self, command: PushMany, now_ms: int) -> range | None:
        """Pushes a run as a whole; the numbers of its messages, or None if that is not possible."""
        shard = self.shard
        try:
            queue = shard.names[command.queue]
        except (KeyError, TypeError):
            return None
        run = queue.decide_run(command, now_ms, shard.next_number)
        if run is None or not shard.push_run(queue, run):
            return None
        self._events = cast(list[AnyEvent], run)
        return run.numbers

    def _submit_each(self, items: list[Any], now_ms: int) -> list[Any]:
        handlers = self._handlers
        replies: list[Any] = []
        for number, item in enumerate(items):
            kind = type(item)
            try:
                if kind is Push:
                    reply: Any = self._push(item, now_ms)
                elif kind is Delete:
                    reply = self._delete(item, now_ms)
                elif kind in _BATCHABLE:
                    reply = handlers[kind](item, now_ms)
                else:
                    raise InvalidField(
                        f"items[{number}]: {kind.__name__} cannot be part of a batch"
                    )
                replies.append(reply)
            except RequestError as refused:
                replies.append(refused)
        return replies

    def _peek(self, command: Peek, now_ms: int) -> list[Message]:
        return self._readable(self.shard.peek(command), command.bytes_max)

    def _readable(
        self, deliveries: Sequence[Delivery], room_bytes: int | None = None
    ) -> list[Message]:
        """The messages that can be read; those after `room_bytes` are left out, but not the first.

        A damaged message is left out here; the pull that finds it makes it Lost.
        """
        messages: list[Message] = []
        if room_bytes is not None:
            check_number("bytes_max", room_bytes, 1, 2**63 - 1)
        for delivery in deliveries:
            if room_bytes is not None:
                room_bytes -= size_bytes(delivery)
                if messages and room_bytes < 0:
                    break
            with suppress(CorruptEntry):
                messages.append(self._message(delivery))
        return messages

    def _peek_from(self, command: PeekFrom, now_ms: int) -> list[Message]:
        return self._readable(self.shard.peek_from(command), command.bytes_max)

    def _peek_ids(self, command: PeekIds, now_ms: int) -> list[Message]:
        queue = self.shard.queue(command.queue)
        found = [queue.deliveries.get(number) for number in self._numbers_of(command.ids)]
        return self._readable([each for each in found if each is not None])

    def _pull_ids(self, command: PullIds, now_ms: int) -> list[Claim]:
        queue = self.shard.queue(command.queue)
        contents: dict[int, Any] = {}
        for number in self._numbers_of(command.ids):
            delivery = queue.deliveries.get(number)
            if delivery is not None:
                with suppress(CorruptEntry):
                    contents[number] = self._content(delivery)
        found = self.shard.pull_chosen(command, [*contents], now_ms, self._events)
        claims = [self._claim(each, command.queue, contents[each.number]) for each in found]
        return [msgspec.structs.replace(each, proof=each.receipt) for each in claims]

    def _return_ids(self, command: ReturnIds, now_ms: int) -> int:
        numbers = self._numbers_of(command.ids)
        events = self.shard.return_chosen(command, numbers, now_ms)
        self._events += events
        return sum(type(event) in (Released, DelayEnded) for event in events)

    def _redrive_ids(self, command: RedriveIds, now_ms: int) -> int:
        events = self.shard.redrive_chosen(command, self._numbers_of(command.ids), now_ms)
        self._events += events
        return len(events)

    def _numbers_of(self, ids: object) -> list[int]:
        """The numbers of messages by their ids, each once. Raises InvalidField."""
        if type(ids) is not list or not 1 <= len(ids) <= PEEK_LIMIT_MAX:
            raise InvalidField(f"ids: expected a list of 1 to {PEEK_LIMIT_MAX} ids")
        numbers: dict[int, None] = {}
        for each in ids:
            # An id of another store is that of no message here.
            with suppress(MessageNotFound):
                numbers[self._ids.read(each)] = None
        return [*numbers]

    def _purge(self, command: Purge, now_ms: int) -> int:
        event = self.shard.decide_purge(command.queue, now_ms)
        self._commit(event)
        return event.count

    def _redrive(self, command: Redrive, now_ms: int) -> int:
        events = self.shard.redrive(command, now_ms)
        self._events += events
        return sum(type(event) is Moved for event in events)

    def _history(self, command: History, now_ms: int) -> list[HistoryEvent]:
        return [event for event in self.history(command) if event is not None]

    def history(self, command: History) -> Iterator[HistoryEvent | None]:
        """The reply to History, event by event; between them None where other commands may run."""
        number = self._ids.read(command.id)
        queues = self.shard.queues
        # Of queues that are gone; read when the first one is met.
        removed: dict[int, str] | None = None
        is_known = False
        for event in self.journal.history(number):
            if event is None:
                yield None
                continue
            is_known = True
            named = [event.queue, event.to] if isinstance(event, Moved) else [event.queue]
            if removed is None and not all(each in queues for each in named):
                removed = {}
                for each in self.journal.history(QUEUES):
                    if isinstance(each, QueueCreated | QueueStated):
                        removed[each.queue] = each.name
                    elif each is None:
                        yield None
            names = [_name_of(each, queues, removed or {}) for each in named]
            yield _history_event(event, *names)
        if not is_known:
            raise MessageNotFound(f"id: no event of {command.id!r} is in the journal")

    # Queues.

    def _create(self, command: CreateQueue, now_ms: int) -> QueueInfo:
        return self._commit_settings(command.queue, self.shard.decide_create(command, now_ms))

    def _configure(self, command: ConfigureQueue, now_ms: int) -> QueueInfo:
        return self._commit_settings(command.queue, self.shard.decide_configure(command, now_ms))

    def _commit_settings(self, name: str, events: list[AnyEvent]) -> QueueInfo:
        """Commits the events of a queue's settings; adds the dead-letter queue they created."""
        self._commit(*events)
        info = self.shard.info(self.shard.names[name])
        created = [each.name for each in events if type(each) is QueueCreated and each.name != name]
        return msgspec.structs.replace(info, also_created=created) if created else info

    def _remove(self, command: DeleteQueue, now_ms: int) -> None:
        self._commit(self.shard.decide_remove(command.queue, now_ms, command.force))

    def _describe(self, command: DescribeQueue, now_ms: int) -> QueueInfo:
        return self.shard.info(self.shard.queue(command.queue))

    def _describe_all(self, command: DescribeQueues, now_ms: int) -> list[QueueInfo]:
        names = self._list(command, now_ms)
        return [self.shard.info(self.shard.names[name]) for name in names]

    def _list(self, command: ListQueues | DescribeQueues, now_ms: int) -> list[str]:
        check_number("limit", command.limit, 1, QUEUES_LIMIT_MAX)
        if type(command.prefix) is not str or type(command.after) is not str:
            raise InvalidField("prefix, after: expected text")
        # The names change only if a queue is created, which raises `next_queue`, or removed, which
        # lowers their number.
        state = (self.shard.next_queue, len(self.shard.names))
        if self._sorted_state != state:
            self._sorted_state, self._sorted_names = state, sorted(self.shard.names)
        names = self._sorted_names
        start = max(bisect_left(names, command.prefix), bisect_right(names, command.after))
        if not command.prefix:
            return names[start : start + command.limit]
        page = takewhile(lambda name: name.startswith(command.prefix), islice(names, start, None))
        return list(islice(page, command.limit))

    def _stats(self, command: Stats, now_ms: int) -> QueueStats:
        queue = self.shard.queue(command.queue)
        oldest = next(iter(queue.deliveries.values()), None)
        return QueueStats(
            queue.name,
            queue.visible,
            queue.delayed,
            queue.in_flight,
            queue.stored_bytes,
            None if oldest is None else now_ms - oldest.pushed_at_ms,
            self._line.count(queue.number),
            QueueCounts(
                queue.pushes, queue.claims, queue.deletes, queue.returns, queue.dead_letters
            ),
            queue.settings.paused,
        )

    # Departures to other shards.

    def departures(self, limit: int = PULL_LIMIT_MAX) -> list[tuple[Owed, Pushed]]:
        """The messages of the outbox, each with its content.

        Nothing may be pushed before `answer_sequence` is durable. A message whose content is
        damaged is removed, as by a pull.
        """
        self.check()
        found: list[tuple[Owed, Pushed]] = []
        for owed in self.shard.outbox(limit):
            delivery = owed.delivery
            try:
                content = delivery.content
                pushed = self.journal.load(content) if isinstance(content, int) else content
            except CorruptEntry:
                now_ms = self.clock.now_ms()
                self._end_departure(Lost(now_ms, owed.source, delivery.number, delivery.epoch))
                continue
            found.append((owed, pushed))
        self.answer_sequence = self._sequence
        return found

    def arrived(self, number: int, epoch: int, to: tuple[int, int] = (0, 0)) -> bool:
        """Ends a departure whose push is durable in the other shard; False if it has ended before.

        `to` is that shard, and the message's number there. Raises StoreFull; the message is then
        still in the outbox.
        """
        self.check()
        event = self.shard.decide_arrived(number, epoch, self.clock.now_ms(), to)
        if event is not None:
            self._end_departure(event)
        self.answer_sequence = self._sequence
        return event is not None

    def _end_departure(self, event: Arrived | Lost) -> None:
        if not self.journal.has_room(1):
            raise StoreFull("journal: no room for the end of a departure; free some disk space")
        try:
            self._commit(event)
            self._append()
        except PenstockError:
            raise
        except BaseException as error:
            self._fail(error)

    # Waiting.

    def wait(self, command: Pull, wake: Callable[[], None]) -> Waiter | None:
        """Adds a pull that found nothing to the waiting line; None if it is not to wait.

        To be called right after `submit`, before anything else happens to the engine.
        """
        wait_ms = self.wait_ms(command)
        if not wait_ms:
            return None
        queue = self.shard.queue(command.queue)
        return self._join(Waiter(command, queue.number, self.clock.now_ms() + wait_ms, wake))

    def watch(self, command: Pull, wake: Callable[[], None]) -> Waiter:
        """Waits, without a pull, until a message becomes visible that no pull takes, or times out.

        Messages that are visible already do not end the wait.
        """
        wait_ms = check_number("wait_ms", command.wait_ms, 0, WAIT_MS_MAX)
        queue = self.shard.queue(command.queue)
        return self._join(Waiter(command, -queue.number, self.clock.now_ms() + wait_ms, wake))

    def _join(self, waiter: Waiter) -> Waiter:
        try:
            self._line.join(waiter)
        except BaseException as error:
            # An interrupt: the line may have half of the waiter.
            self._fail(error)
        return waiter

    def _has_visible(self, number: int) -> bool:
        queue = self.shard.queues.get(number)
        return queue is not None and queue.visible > 0 and not queue.settings.paused

    def wait_ms(self, command: Pull) -> int:
        """How long a pull that finds nothing is to wait."""
        if command.wait_ms is not None:
            return command.wait_ms
        return self.shard.queue(command.queue).settings.wait_ms

    def cancel_wait(self, waiter: Waiter) -> None:
        """Cancels a wait; claims made for it meanwhile are released."""
        if waiter.done:
            self.release_unseen(waiter.command, waiter.claims)
            return
        try:
            self._line.leave(waiter)
        except BaseException as error:
            # An interrupt: the line may still have half of the waiter.
            self._fail(error)

    def release_unseen(self, command: Command[Any], claims: Sequence[Claim]) -> None:
        """Releases the claims of a pull whose caller will not get them, if it is no attempt."""
        for release in unseen_claims(command, claims):
            # A claim that cannot be released now ends when it runs out.
            with suppress(PenstockError):
                self.submit(release)

    def arrange_ticks(self, arrange: Callable[[], None]) -> None:
        """Calls the function, within a command, when `tick` must be called earlier than before."""
        self._line.arrange = arrange

    @property
    def has_waiters(self) -> bool:
        """Whether any pull is waiting."""
        return bool(self._waiting)

    @property
    def first_waiter(self) -> Waiter | None:
        """One of the pulls that wait, if any."""
        return next(iter(self._waiting.values()))[0] if self._waiting else None

    @property
    def upkeep_failed(self) -> bool:
        """Whether snapshots cannot be taken, or files not be dropped."""
        return self.upkeep is not None and self.upkeep.last_error is not None

    @property
    def next_wake_ms(self) -> int:
        """When `tick` should next be called, if any pull waits."""
        return self._line.next_wake_ms

    @property
    def has_due_work(self) -> bool:
        """Whether something is due now: `tick` should be called again soon, waiters or not."""
        return self._stopped is None and self._alarm.next_ms <= self.clock.now_ms()

    def catch_up(self) -> None:
        """Settles everything that is due, however long it takes; for a manual clock that moved."""
        self.tick()
        while self.has_due_work:
            self.tick()

    def settle_some(self, name: str) -> bool:
        """Settles some of what is due in a queue; returns whether more is due there."""
        queue = self.shard.names.get(name)
        now_ms = self.clock.now_ms()
        if self._stopped is not None or queue is None or not queue.is_due(now_ms):
            return False
        if not self.journal.has_room(6 * self.settle_max):
            return False
        try:
            self._events += self.shard.settle_queue(queue, now_ms, self.settle_max)
            if self._events:
                self._append()
        except PenstockError:
            raise
        except BaseException as error:
            self._fail(error)
        return queue.is_due(now_ms)

    def tick(self) -> None:
        """Settles some of what is due; serves the waits it can, ends those whose time is over.

        It takes milliseconds however much is due; `has_due_work` says whether there is more.
        """
        if self._stopped is not None:
            return
        now_ms = self.clock.now_ms()
        try:
            self._settle(now_ms)
            self._line.tick(now_ms)
        except PenstockError:
            raise
        except BaseException as error:
            self._fail(error)

    def _pull_now(self, command: Pull) -> Tried:
        """Tries a waiter's pull again, and leaves it to the line to serve what that changed."""
        claims: list[Claim] = []
        refused = None
        try:
            claims = self._pull(command, self.clock.now_ms())
        except PenstockError as error:
            refused = error
        events = self._events
        if events:
            self._append(serves=False)
        return Tried(claims, self._sequence, refused, events)

    # Ending.

    def close(self) -> None:
        """Ends all waits and closes the journal; every later command fails with EngineClosed."""
        if self._stopped is None:
            self._stop(EngineClosed("the engine was closed"))
        self.journal.close()

    def _fail(self, error: BaseException) -> NoReturn:
        """Stops the engine for good: its state may have half of a command, and not the other.

        Raises the error; in place of a fault, which is logged, the error that callers get.
        """
        self._events = []
        is_fault = isinstance(error, Exception) and not isinstance(error, PenstockError)
        if self._stopped is None:
            stopped = error
            if not isinstance(stopped, JournalError):
                # The text of a fault may contain a message or a receipt, and clients get this one.
                text = "" if is_fault else str(error)
                cause = " ".join(f"{type(error).__name__} {text}".split())
                again = "open a new one" if self._is_volatile else "open it again"
                stopped = JournalError(f"the engine was stopped by {cause}; {again}")
            if is_fault:
                _report_fault(error)
            self._stop(stopped)
        if is_fault:
            raise cast(PenstockError, self._stopped) from error
        raise error

    def check(self) -> None:
        """Raises the error that has stopped the engine, if one has."""
        if self._stopped is not None:
            raise self._stopped

    def _stop(self, error: PenstockError) -> None:
        self._stopped = error
        self._handlers = {}
        self._line.fail(error)

    # Replies.

    def message_id(self, number: int) -> str:
        """The id of the message with this number."""
        return self._ids.show(number)

    def _content(self, delivery: Delivery) -> Pushed:
        content = delivery.content
        return self.journal.load(content) if isinstance(content, int) else content

    def _message(self, delivery: Delivery) -> Message:
        content = self._content(delivery)
        return Message(
            self._ids.show(delivery.number),
            self.shard.queues[delivery.queue].name,
            content.body,
            content.attributes or {},
            delivery.priority,
            delivery.group,
            content.dedup_id,
            delivery.pushed_at_ms,
            delivery.rank,
            receives(delivery),
            delivery.first_claimed_at_ms or None,
            self.shard.source_name(delivery),
            content.context,
        )

    def _claim(self, delivery: Delivery, queue: str, content: Any) -> Claim:
        # The same fields as in `_message`, repeated for speed: most replies are made here.
        number = delivery.number
        epoch = delivery.epoch
        moved = delivery.move is not None
        return Claim(
            self._ids.show(number),
            queue,
            content.body,
            content.attributes or {},
            delivery.priority,
            delivery.group,
            content.dedup_id,
            delivery.pushed_at_ms,
            delivery.rank,
            receives(delivery) if moved else epoch,
            delivery.first_claimed_at_ms or None,
            self.shard.source_name(delivery) if moved else None,
            content.context,
            Ticket(delivery.queue, number, epoch, self._receipts),
            epoch,
            delivery.due_at_ms,
        )


def _report_fault(fault: BaseException) -> None:
    """Logs where an exception came from that only a mistake in Penstock can cause.

    Its text is left out: it may contain a message or a receipt.
    """
    # Imported here: most processes never need them.
    from traceback import format_tb

    place = Lines("".join(format_tb(fault.__traceback__)).rstrip())
    logger("penstock.engine").error(
        "fault in the engine, which was stopped: %s\n%s", type(fault).__name__, place
    )


def _queue_of(command: Any) -> Any:
    """The name of a command's queue; of a batch, that of its first item. None if there is none."""
    items = getattr(command, "items", None)
    name = getattr(items[0] if type(items) is list and items else command, "queue", None)
    return name if type(name) is str else None


def _messages_wanted(command: Any) -> int:
    """How many messages a command may need to have settled; it is not validated yet."""
    limit = getattr(command, "limit", 1)
    return limit if type(limit) is int and 0 < limit <= PULL_LIMIT_MAX else 1


def _name_of(number: int, queues: Mapping[int, QueueState], removed: Mapping[int, str]) -> str:
    """The name of a queue; `#1` of a removed one whose name the journal has dropped."""
    queue = queues.get(number)
    return removed.get(number, f"#{number}") if queue is None else queue.name


def _history_event(event: AnyEvent, queue: str, to: str | None = None) -> HistoryEvent:
    """The event for people; `to` is the queue that a message was moved to."""
    found = {name: getattr(event, name, None) for name in _TOLD}
    if to is not None:
        found["to"] = to
    if isinstance(event, Arrived) and event.to_number:
        found |= {"to_shard": event.to_shard, "to_number": event.to_number}
    pushed = event.pushed if isinstance(event, Carried) else event
    if isinstance(pushed, Pushed) and pushed.context is not None:
        found["holder"] = pushed.context.get(PUSHER)
    told = {name: value for name, value in found.items() if value}
    detail = ", ".join(f"{name}={value}" for name, value in told.items())
    if isinstance(event, Departed):
        told = {"to": event.to_queue, "dead": True}
    return HistoryEvent(
        event.at_ms,
        type(event).__name__,
        queue,
        getattr(event, "epoch", None),
        detail,
        **{name: value for name, value in told.items() if not name.startswith("to_")},
    )
