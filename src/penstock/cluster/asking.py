"""Asks the owners of shards, whoever they are by the time it is answered.

An asker knows who owns which shard from what owners announce, and looks again whenever it is told
otherwise. A command that was not done is sent again, to the owner of the day. If it may have been
done, it is sent again only if doing it twice comes to the same (`remote.retry`): a push with a
dedup id does, one without ends in BackendLost.
"""

import asyncio
import itertools
import time
from contextlib import suppress
from typing import Final, TypeVar, cast

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.backends.remote.retry import is_repeatable, settle_repeated, still_to_wait
from penstock.cluster import calls
from penstock.cluster.jetstream import JetStream
from penstock.cluster.log import Look, LookAll, Register, Unanswered
from penstock.cluster.owner import owner_key
from penstock.cluster.serving import end_tasks
from penstock.errors import BackendLost, EngineClosed, StaleReceipt
from penstock.service import Batch, Command, Pull, Push, PushMany

R = TypeVar("R")
# How long a command is tried before it fails: a shard is without an owner for less than this.
PATIENCE_S: Final = 25.0
_RETRY_S: Final = 0.02
_RETRY_S_MAX: Final = 0.25


class _NotDone(Exception):
    """The owner did nothing of it: it is not the owner, or is not there."""


class _MayBeDone(Exception):
    """The owner was replaced before it answered, or its answer was lost."""


class _Call(calls.CallUnderWay):
    """A command on its way to an owner."""

    __slots__ = ("answer", "parts")

    def __init__(
        self, shard: int, term: int, answer: "asyncio.Future[tuple[bytes, bytes]]"
    ) -> None:
        super().__init__(shard, term)
        self.answer = answer
        self.parts: list[bytes] = []


class ShardAsker:
    """Sends commands to the owners of shards over one connection."""

    def __init__(self, replicated: JetStream, client: Client, name: str) -> None:
        self._replicated = replicated
        self._client = client
        self._name = name
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
        self._looking: asyncio.Task[None] | None = None
        self._sweeper = self._loop.call_later(calls.SILENCE_S, self._sweep)

    async def open(self) -> None:
        """Begins to listen for replies, and learns who owns what."""
        for subject, take in (
            (f"{self._inbox}.*", self._take_reply),
            (f"{self._name}.owned.*", self._take_ownership),
        ):
            self._subscriptions.append(await self._client.subscribe(subject, cb=take))
        for register in await self._replicated.execute(LookAll("owner.")):
            self._note(int(register.key.rpartition(".")[2]), register)

    async def close(self) -> None:
        """Ends all commands under way with EngineClosed."""
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
            left = still_to_wait(command, time.monotonic() - (self._loop.time() - began_s))
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
            raise _MayBeDone("its owner was replaced before it answered, or its answer was lost")
        if kind == calls.REFUSED:
            raise calls.read_error(body)
        return cast(R, calls.read_reply(command, body))

    def _sweep(self) -> None:
        """Looks for another owner where one has said nothing since the last sweep but one."""
        self._sweeper = self._loop.call_later(calls.SILENCE_S, self._sweep)
        silent = {call.shard for call in self._calls.values() if call.sweep()}
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
        """Calls of which nothing was heard are asked again, if it is likely that none will be."""
        term = self._terms.get(shard)
        for call in self._calls.values():
            if call.is_lost(shard, term) and not call.answer.done():
                call.answer.set_result((calls.LOST, b""))

    async def _look(self, shard: int) -> None:
        with suppress(Unanswered):
            self._note(shard, await self._replicated.execute(Look(owner_key(shard))))

    def _note(self, shard: int, register: Register | None) -> None:
        if register is not None:
            self._terms[shard] = max(self._terms.get(shard, 0), register.revision)
