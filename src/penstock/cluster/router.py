"""The cluster as one queue service: each command goes to the owner of its queue's shard.

A router knows who owns which shard from what owners announce, and looks again whenever it is told
otherwise. A command that was not done is sent again, to the owner of the day. If it may have been
done, it is sent again only if doing it twice comes to the same (`remote.retry`): a push with a
dedup id does, one without ends in BackendLost.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final, TypeVar, cast

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.backends.remote.retry import is_repeatable, settle_repeated, still_to_wait
from penstock.cluster import calls
from penstock.cluster.jetstream import JetStream
from penstock.cluster.log import Look, LookAll, Register, Unanswered
from penstock.cluster.membership import ClusterSettings
from penstock.cluster.owner import owner_key
from penstock.cluster.placement import first_shard, shard_of_id
from penstock.cluster.serving import end_tasks
from penstock.errors import (
    BackendLost,
    EngineClosed,
    InvalidField,
    InvalidReceipt,
    MessageNotFound,
    PenstockError,
    StaleReceipt,
)
from penstock.service import (
    PEEK_LIMIT_MAX,
    REDRIVE_MAX,
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
    ListQueues,
    Message,
    Peek,
    Pull,
    Push,
    PushMany,
    QueueInfo,
    Redrive,
    Release,
    check_name,
    check_number,
    check_unused,
)

R = TypeVar("R")
# How long a command is tried before it fails: a shard is without an owner for less than this.
PATIENCE_S: Final = 25.0
# Without a word from an owner for once or twice so long, the router looks whether there is another.
_SILENCE_S: Final = 0.35
_RETRY_S: Final = 0.02
_RETRY_S_MAX: Final = 0.25
# The note in a message's context that says which queue it was dead-lettered from.
SOURCE_NOTE: Final = ".source"
_BY_RECEIPT: Final = (Delete, Extend, Release)


class _NotDone(Exception):
    """The owner did nothing of it: it is not the owner, or is not there."""


class _MayBeDone(Exception):
    """The owner was replaced before it answered, and may have fallen silent before that."""


class _Call:
    """A command on its way to an owner."""

    __slots__ = ("answer", "at_it", "parts", "shard", "term")

    def __init__(
        self, shard: int, term: int, answer: "asyncio.Future[tuple[bytes, bytes]]"
    ) -> None:
        self.shard = shard
        self.term = term
        self.answer = answer
        self.parts: list[bytes] = []
        self.at_it = True


class Router:
    """An `AsyncQueueService` over all shards of a cluster."""

    LACKS: ClassVar[Mapping[str, str]] = {
        "dead-letter id": "a dead letter whose queue is in another shard is a new message there",
    }
    redrive_max: int = REDRIVE_MAX

    def __init__(
        self, replicated: JetStream, client: Client, name: str, settings: ClusterSettings
    ) -> None:
        self._replicated = replicated
        self._client = client
        self._name = name
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._inbox = client.new_inbox()
        self._sender = calls.Sender(client, self._inbox)
        self._tokens = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._terms: dict[int, int] = {}
        # Set, and forgotten, when a shard has a new owner.
        self._news: dict[int, asyncio.Event] = {}
        self._subscriptions: list[Subscription] = []
        self._closed = False
        self._owns_client = False
        self._looking: asyncio.Task[None] | None = None
        self._sweeper = self._loop.call_later(_SILENCE_S, self._sweep)
        if settings.shards == 1:
            # A class attribute of services; what is lacking here is lacking between shards only.
            vars(self)["LACKS"] = {}

    @classmethod
    async def open(
        cls,
        replicated: JetStream,
        client: Client,
        name: str,
        settings: ClusterSettings,
        *,
        owns_client: bool,
    ) -> "Router":
        """Opens a router; one that owns its connection ends it when it is closed."""
        router = cls(replicated, client, name, settings)
        router._owns_client = owns_client
        for subject, take in (
            (f"{router._inbox}.*", router._take_reply),
            (f"{name}.owned.*", router._take_ownership),
        ):
            router._subscriptions.append(await client.subscribe(subject, cb=take))
        for register in await replicated.execute(LookAll("owner.")):
            router._note(int(register.key.rpartition(".")[2]), register)
        return router

    async def close(self) -> None:
        """Ends all commands under way with EngineClosed."""
        if self._closed:
            return
        self._closed = True
        self._sweeper.cancel()
        if self._looking is not None:
            await end_tasks([self._looking])
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.set_exception(EngineClosed("the connection to the cluster was closed"))
        for subscription in self._subscriptions:
            with suppress(Exception):
                await subscription.unsubscribe()
        if self._owns_client:
            await self._replicated.close()

    # One command to one shard.

    async def ask(self, shard: int, command: Command[R]) -> R:
        """Has the shard's owner do it, whoever that is by then. Raises PenstockError."""
        messages = calls.write_command(command)
        began_s = self._loop.time()
        give_up = began_s + PATIENCE_S
        if type(command) is Pull and command.wait_ms:
            give_up += command.wait_ms / 1_000
        pause_s = 0.0
        may_be_done = False
        while True:
            try:
                reply = await self._try(shard, command, messages)
                return cast(R, settle_repeated(command, reply) if may_be_done else reply)
            except StaleReceipt as error:
                if may_be_done and settle_repeated(command, error) is None:
                    return cast(R, None)
                raise
            except _NotDone as error:
                reason = str(error)
            except _MayBeDone as error:
                reason = str(error)
                may_be_done = True
                if not is_repeatable(command):
                    hint = "; give a push a dedup_id and it is sent again safely"
                    raise BackendLost(
                        f"shard {shard}: {reason}; whether this {type(command).__name__} was done "
                        f"is unknown{hint if isinstance(command, Push | Batch | PushMany) else ''}"
                    ) from None
            if self._loop.time() > give_up:
                raise BackendLost(f"shard {shard}: {reason}, again and again")
            await self._news_of(shard, pause_s)
            pause_s = min(max(2 * pause_s, _RETRY_S), _RETRY_S_MAX)
            await self._look(shard)
            left = still_to_wait(command, _monotonic(began_s - self._loop.time()))
            if left is not command:
                messages = calls.write_command(left)

    async def _try(self, shard: int, command: Command[R], messages: list[bytes]) -> R:
        """Sends a command to the owner that is known. Raises _NotDone or _MayBeDone."""
        if self._closed:
            raise EngineClosed("the connection to the cluster was closed")
        term = self._terms.get(shard)
        if term is None:
            raise _NotDone("it has no owner yet")
        token = next(self._tokens)
        subject = f"{self._name}.serve.{shard}.{term}"
        call = _Call(shard, term, self._loop.create_future())
        self._calls[token] = call
        try:
            for message in messages:
                self._sender.send(subject, token, message)
            kind, body = await call.answer
        except asyncio.CancelledError:
            self._sender.send(subject, token, calls.CANCEL)
            raise
        finally:
            del self._calls[token]
        if kind == calls.NOT_OWNER:
            raise _NotDone("the node that was asked is not its owner")
        if kind == calls.LOST:
            raise _MayBeDone("its owner was replaced before it answered")
        if kind == calls.REFUSED:
            raise calls.read_error(body)
        return cast(R, calls.read_reply(command, body))

    def _sweep(self) -> None:
        """Looks for another owner where one has said nothing since the last sweep but one."""
        self._sweeper = self._loop.call_later(_SILENCE_S, self._sweep)
        silent = {call.shard for call in self._calls.values() if not call.at_it}
        for call in self._calls.values():
            call.at_it = False
        if silent and self._looking is None:
            self._looking = self._loop.create_task(self._look_for_others(silent))

    async def _look_for_others(self, shards: set[int]) -> None:
        try:
            for shard in shards:
                await self._look(shard)
                self._leave_silent(shard)
        finally:
            self._looking = None

    async def _take_reply(self, message: Msg) -> None:
        if message.subject.endswith(calls.REPLIES):
            for token, data in calls.unpack(message.data):
                self._take_item(token, data)
        elif (message.headers or {}).get("Status") == "503":
            # NATS says that nobody listens there.
            for token in self._sender.unheard(int(message.subject.rpartition(".")[2])):
                self._take_item(token, calls.NOT_OWNER)

    def _take_item(self, token: int, data: bytes) -> None:
        call = self._calls.get(token)
        if call is None or call.answer.done():
            return
        kind, body = data[:1], data[1:]
        call.at_it = True
        if kind == calls.REPLY_PART:
            call.parts.append(body)
        elif kind == calls.REPLY_WHOLE:
            call.answer.set_result((kind, b"".join([*call.parts, body])))
        elif kind != calls.AT_IT:
            call.answer.set_result((kind, body))

    # Who owns what.

    async def _take_ownership(self, message: Msg) -> None:
        shard, term = message.subject.rpartition(".")[2], message.data
        if shard.isdigit() and term.isdigit():
            number = int(shard)
            self._terms[number] = max(self._terms.get(number, 0), int(term))
            self._leave_silent(number)
            news = self._news.pop(number, None)
            if news is not None:
                news.set()

    async def _news_of(self, shard: int, pause_s: float) -> None:
        """Waits until a new owner of the shard says so, but not for longer than this."""
        news = self._news.setdefault(shard, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await news.wait()

    def _leave_silent(self, shard: int) -> None:
        """The calls to an owner before this one that has said nothing lately are asked again."""
        term = self._terms.get(shard)
        for call in self._calls.values():
            is_left = call.shard == shard and call.term != term and not call.at_it
            if is_left and not call.answer.done():
                call.answer.set_result((calls.LOST, b""))

    async def _look(self, shard: int) -> None:
        with suppress(Unanswered):
            self._note(shard, await self._replicated.execute(Look(owner_key(shard))))

    def _note(self, shard: int, register: Register | None) -> None:
        if register is not None:
            self._terms[shard] = max(self._terms.get(shard, 0), register.revision)

    def shard_of(self, queue: object) -> int:
        """The shard of a queue. Raises InvalidField for what is no name."""
        return first_shard(check_name(queue), self._settings.shards)

    # Commands.

    async def execute(self, command: Command[R]) -> R:
        """Executes the command, and returns once its changes are in the replicated log."""
        kind = type(command)
        special = _SPECIAL.get(kind)
        if special is not None:
            return cast(R, await special(self, command))
        if not hasattr(command, "queue"):
            raise InvalidField(f"command: {kind.__name__} is not one the cluster knows")
        return await self.ask(self.shard_of(command.queue), command)

    async def _pull(self, command: Pull) -> list[Claim]:
        shard = self.shard_of(command.queue)
        claims = await self.ask(shard, command)
        return [_shown(claim, shard) for claim in claims]

    async def _peek(self, command: Peek) -> list[Message]:
        found = await self.ask(self.shard_of(command.queue), command)
        return [_with_source(message) for message in found]

    async def _by_receipt(self, command: Any) -> Any:
        shard, receipt = self._read_receipt(command.receipt)
        if shard != self.shard_of(command.queue):
            raise _not_ours()
        return await self.ask(shard, msgspec.structs.replace(command, receipt=receipt))

    def _read_receipt(self, receipt: object) -> tuple[int, str]:
        """The shard of a receipt, and the receipt as that shard knows it. Raises InvalidReceipt."""
        shard, dash, rest = str(receipt).partition("-")
        if not dash or len(shard) != 3 or shard.strip("0123456789abcdef"):
            raise _not_ours()
        number = int(shard, 16)
        if number >= self._settings.shards:
            raise _not_ours()
        return number, rest

    async def _batch(self, command: Batch) -> list[Any]:
        items: Any = command.items
        if type(items) is not list:
            return await self.ask(0, command)
        by_shard: dict[int, list[tuple[int, Any]]] = {}
        replies: list[Any] = [None] * len(items)
        for place, item in enumerate(items):
            try:
                shard, item = self._locate(item)
                by_shard.setdefault(shard, []).append((place, item))
            except PenstockError as error:
                replies[place] = error
        if len(items) > 10_000 or not by_shard:
            # The engine says what is wrong with it, or that there is nothing to do.
            return await self.ask(0, command)

        async def ask_one(shard: int, placed: list[tuple[int, Any]]) -> None:
            results = await self.ask(shard, Batch([item for _, item in placed]))
            for (place, _), result in zip(placed, results, strict=True):
                replies[place] = result

        await _all(ask_one(shard, placed) for shard, placed in by_shard.items())
        return replies

    def _locate(self, item: Any) -> tuple[int, Any]:
        """The shard an item of a batch is for, and the item as that shard knows it."""
        if isinstance(item, _BY_RECEIPT):
            shard, receipt = self._read_receipt(item.receipt)
            if shard != self.shard_of(item.queue):
                raise _not_ours()
            return shard, msgspec.structs.replace(item, receipt=receipt)
        return self.shard_of(getattr(item, "queue", None)), item

    async def _history(self, command: History) -> Any:
        shard = shard_of_id(command.id, self._settings.identity)
        if shard is None or shard >= self._settings.shards:
            raise MessageNotFound(f"id: {str(command.id)[:60]!r} names no message of this cluster")
        return await self.ask(shard, command)

    # Queues.

    async def _create(self, command: CreateQueue) -> QueueInfo:
        made = await self._make_dead_letter(command)
        try:
            info = await self.ask(self.shard_of(command.queue), command)
        except PenstockError:
            for name in made:
                await self._unmake(name)
            raise
        return msgspec.structs.replace(info, also_created=made) if made else info

    async def _make_dead_letter(self, command: CreateQueue | ConfigureQueue) -> list[str]:
        """Makes the dead-letter queue that a queue names, if it is in another shard and missing."""
        settings: Any = command.settings
        dead = settings.get("dead_letter") if type(settings) is dict else None
        if type(dead) is not str or dead == command.queue:
            return []
        shard = self.shard_of(command.queue)
        target = first_shard(check_name(dead, "dead_letter"), self._settings.shards)
        if target == shard:
            return []
        fifo = bool(settings.get("fifo", False))
        if type(command) is ConfigureQueue:
            info = await self.ask(shard, DescribeQueue(command.queue))
            fifo = info.settings.fifo
        try:
            found = await self.ask(target, DescribeQueue(dead))
        except PenstockError:
            await self.ask(target, CreateQueue(dead, {"fifo": fifo}))
            return [dead]
        if found.settings.fifo != fifo:
            raise InvalidField(
                f"dead_letter: {command.queue!r} and {dead!r} must both be fifo, or neither"
            )
        return []

    async def _unmake(self, name: str) -> None:
        with suppress(PenstockError):
            await self.ask(self.shard_of(name), DeleteQueue(name))

    async def _configure(self, command: ConfigureQueue) -> QueueInfo:
        made = await self._make_dead_letter(command)
        info = await self.ask(self.shard_of(command.queue), command)
        return msgspec.structs.replace(info, also_created=made) if made else info

    async def _remove(self, command: DeleteQueue) -> None:
        shard = self.shard_of(command.queue)
        if not command.force:
            await self.ask(shard, DescribeQueue(command.queue))
            every = await self._describe_all(DescribeQueues(limit=2**31))
            check_unused(
                command.queue,
                [
                    info.queue
                    for info in every
                    if info.settings.dead_letter == command.queue and info.queue != command.queue
                ],
            )
        await self.ask(shard, command)

    async def _list(self, command: ListQueues) -> list[str]:
        lists = await self._ask_all(command)
        return sorted(itertools.chain.from_iterable(lists))[: command.limit]

    async def _describe_all(self, command: DescribeQueues) -> list[QueueInfo]:
        lists = await self._ask_all(command)
        every = sorted(itertools.chain.from_iterable(lists), key=lambda info: info.queue)
        return every[: command.limit]

    async def _ask_all(self, command: Command[R]) -> Sequence[R]:
        shards = range(self._settings.shards)
        return await _all(self.ask(shard, command) for shard in shards)

    # Between shards.

    async def push_to(self, shard: int, push: Push, source: str | None) -> None:
        """Brings a dead letter to its shard, with a note of where it came from."""
        if source is not None:
            context = {**(push.context or {}), SOURCE_NOTE: source}
            push = msgspec.structs.replace(push, context=context)
        await self.ask(shard, push)

    async def _redrive(self, command: Redrive) -> int:
        """Redrives within the shard, then message by message what has to go to another."""
        shard = self.shard_of(command.queue)
        if command.to is not None and self.shard_of(command.to) == shard:
            return await self.ask(shard, command)
        check_number("limit", command.limit, 1, 10_000)
        info = await self.ask(shard, DescribeQueue(command.queue))
        if command.to is not None:
            other = await self.ask(self.shard_of(command.to), DescribeQueue(command.to))
            if other.settings.fifo != info.settings.fifo:
                raise InvalidField(
                    f"to: {command.to!r} and {command.queue!r} must both be fifo, or neither"
                )
        moved = 0
        if command.to is None:
            try:
                moved = await self.ask(shard, command)
            except InvalidField:
                # No message knows a source in this shard; some may have a note of another.
                if not await self._has_notes(shard, command.queue):
                    raise
        return moved + await self._carry_back(shard, command, command.limit - moved)

    async def _has_notes(self, shard: int, queue: str) -> bool:
        """Whether a message came from a queue in another shard that still exists."""
        ahead = await self.ask(shard, Peek(queue, PEEK_LIMIT_MAX))
        notes = {(message.context or {}).get(SOURCE_NOTE) for message in ahead} - {None}
        return any([await self._exists(cast(str, source)) for source in notes])

    async def _carry_back(self, shard: int, command: Redrive, limit: int) -> int:
        """Pulls, pushes and deletes messages that go to another shard; how many did."""
        carried = 0
        left: list[Claim] = []
        try:
            while carried < limit:
                wanted = min(100, limit - carried)
                claims = await self.ask(shard, Pull(command.queue, wanted, wait_ms=0))
                if not claims:
                    break
                for claim in claims:
                    source = (claim.context or {}).get(SOURCE_NOTE)
                    to = command.to or source
                    if to is None or not await self._exists(to):
                        left.append(claim)
                        continue
                    await self.ask(self.shard_of(to), _pushed_back(claim, to))
                    await self.ask(shard, Delete(command.queue, claim.receipt))
                    carried += 1
        finally:
            for claim in left:
                with suppress(PenstockError):
                    await self.ask(shard, Release(command.queue, claim.receipt))
        return carried

    async def _exists(self, queue: str) -> bool:
        try:
            await self.ask(self.shard_of(queue), DescribeQueue(queue))
        except PenstockError:
            return False
        return True


_SPECIAL: Final[Mapping[type, Callable[[Router, Any], Awaitable[Any]]]] = {
    Pull: Router._pull,
    Peek: Router._peek,
    Delete: Router._by_receipt,
    Extend: Router._by_receipt,
    Release: Router._by_receipt,
    Batch: Router._batch,
    History: Router._history,
    CreateQueue: Router._create,
    ConfigureQueue: Router._configure,
    DeleteQueue: Router._remove,
    ListQueues: Router._list,
    DescribeQueues: Router._describe_all,
    Redrive: Router._redrive,
}


def _shown(claim: Claim, shard: int) -> Claim:
    """A claim as callers see it: its receipt names the shard."""
    claim = cast(Claim, _with_source(claim))
    return msgspec.structs.replace(claim, proof=f"{shard:03x}-{claim.proof}")


def _with_source(message: Message) -> Message:
    """A message with the queue it was dead-lettered from, if that is noted."""
    if message.context is None or SOURCE_NOTE not in message.context:
        return message
    context = {name: text for name, text in message.context.items() if name != SOURCE_NOTE}
    source = message.source or message.context[SOURCE_NOTE]
    return msgspec.structs.replace(message, source=source, context=context or None)


def _pushed_back(claim: Claim, to: str) -> Push:
    """The push that brings a dead letter back; repeated, it adds nothing."""
    context = {name: text for name, text in (claim.context or {}).items() if name != SOURCE_NOTE}
    return Push(
        to,
        claim.body,
        delay_ms=0,
        priority=claim.priority,
        dedup_id=f"redriven-{claim.id}",
        group=claim.group,
        attributes=claim.attributes or None,
        context=context or None,
    )


def _not_ours() -> InvalidReceipt:
    return InvalidReceipt(
        "receipt: not one that this cluster has made for this queue; use the one the pull gave"
    )


def _monotonic(offset_s: float) -> float:
    """An instant relative to now, by the clock that `still_to_wait` uses."""
    import time

    return time.monotonic() + offset_s


async def _all(works: Any) -> list[Any]:
    """The results of all; if one raises, the others are ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
