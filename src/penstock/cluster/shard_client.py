"""Sends commands to the owners of shards, and follows a shard when its owner changes.

Owners announce themselves, and the register of a shard is read whenever a node answers that it is
not the owner. A command is then sent to the current owner, by the rules of `retry`: a push with
a dedup id always is; one without ends in BackendLost if the old owner may have carried it out.

Small commands for one shard that are issued in one turn of the event loop are sent as one Batch,
which costs the owner one journal entry and one reply. Each of them is answered, refused and
repeated separately.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Final, TypeVar, cast

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.backends.remote.retry import is_repeatable, with_remaining_wait
from penstock.cluster.jetstream import JetStream
from penstock.cluster.log import ReadRegister, ReadRegisters, Register, Unanswered
from penstock.cluster.owned_shard import end_tasks
from penstock.cluster.placement import read_shard
from penstock.cluster.retry import Attempts, MayBeDone, NotDone, read_answer
from penstock.cluster.sender import Sender, in_slices
from penstock.cluster.spread_rules import SpreadChanged
from penstock.cluster.takeover import owner_key
from penstock.errors import (
    EngineClosed,
    InvalidField,
    PenstockError,
    StaleReceipt,
    StoreFull,
)
from penstock.service import Batch, BatchItem, Claim, Command, Delete, Extend, Pull, Push, Release
from penstock.wire import shard_protocol as protocol

R = TypeVar("R")
# How many commands share a Batch, and the largest body of one. A Batch of this size is decoded by
# the fast path of `wire.frames`, and the owner starts to append it before it reads the next one.
_SHARED_MAX: Final = 32
_SHARED_BODY_BYTES_MAX: Final = 1_024
_TERM_DIGITS_MAX: Final = 20
# A command in a shared Batch, and the future of its reply.
_Shared = tuple[Any, "asyncio.Future[Any]"]
# After this many intervals, a command to an owner that was not replaced is sent again.
_SILENT_SWEEPS_MAX: Final = 10


class _CommandCall:
    """A command that was sent to the owner of a term and is not answered yet.

    `sweeps` is how many intervals began since the owner last sent something. An owner that sends
    nothing for a whole interval may have been replaced. If it was not replaced and still sends
    nothing, the command or its answer was lost.
    """

    __slots__ = (
        *("answer", "command", "may_leave_claims", "parts", "shard", "subject", "sweeps", "term"),
        "token",
    )

    def __init__(
        self,
        shard: int,
        term: int,
        subject: str,
        token: int,
        command: Command[Any],
        answer: "asyncio.Future[tuple[bytes, bytes]]",
    ) -> None:
        self.shard = shard
        self.term = term
        self.subject = subject
        self.token = token
        self.command = command
        self.answer = answer
        self.parts: list[bytes] = []
        self.sweeps = 0
        # Whether a reply that no caller gets leaves messages claimed.
        self.may_leave_claims = False

    @property
    def is_silent(self) -> bool:
        """Whether the owner has sent nothing for a whole interval."""
        return self.sweeps >= 2

    @property
    def is_forgotten(self) -> bool:
        """Whether the owner has sent nothing for so long that no answer is expected."""
        return self.sweeps >= _SILENT_SWEEPS_MAX

    def is_given_up(self, shard: int, term: int | None) -> bool:
        """Whether to stop waiting for this call; `term` is that of the shard's owner as known now.

        After a change of owners a repeatable call is given up at once: the new owner answers it
        sooner. A call that must not be repeated still waits for the old owner's reply, and so does
        a pull: if its reply were ignored, the claims in it would block their messages.
        """
        if self.shard != shard:
            return False
        if self.term == term:
            return self.is_forgotten
        may_go = type(self.command) is not Pull and is_repeatable(self.command)
        return self.is_silent or may_go

    @property
    def answer_kind(self) -> bytes:
        """The kind of the answer; empty if there is none, or if its caller was cancelled."""
        answer = self.answer
        has_none = not answer.done() or answer.cancelled() or answer.exception() is not None
        return b"" if has_none else answer.result()[0]


class OpenWait:
    """Ends the wait of a pull before its time."""

    def __init__(self) -> None:
        self.is_over = False
        # Asks the owner that has the pull to end its wait.
        self.end_at_owner: Callable[[], None] = _nothing

    def end(self) -> None:
        """Has the pull answered at once; with claims, if it got some meanwhile."""
        self.is_over = True
        self.end_at_owner()


class ShardClient:
    """Sends commands to the owners of shards over one connection."""

    def __init__(self, replicated: JetStream, client: Client, name: str) -> None:
        self._replicated = replicated
        self._client = client
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._inbox = client.new_inbox()
        self._sender = Sender(client, self._inbox)
        self._tokens = itertools.count(1)
        self._calls: dict[int, _CommandCall] = {}
        # Pulls whose callers were cancelled, or wait no longer for this owner: if a reply still
        # comes, its claims are released.
        self._abandoned: dict[int, _CommandCall] = {}
        # Commands of this turn of the event loop, by shard and by version of the queue's spread.
        self._shared: dict[tuple[int, int], list[_Shared]] = {}
        self._terms: dict[int, int] = {}
        # An event is set and removed when a new owner of the shard announces itself; these
        # announcements are counted.
        self._owner_events: dict[int, asyncio.Event] = {}
        self._announced: dict[int, int] = {}
        self._subscriptions: list[Subscription] = []
        self._closed = False
        self._reading_owners: asyncio.Task[None] | None = None
        self._sweeper = self._loop.call_later(protocol.SILENCE_S, self._sweep)

    async def open(self) -> None:
        """Subscribes to replies and announcements, and reads the current owners."""
        for subject, take in (
            (f"{self._inbox}.*", self._take_reply),
            (f"{self._name}.owned.*", self._take_ownership),
        ):
            self._subscriptions.append(await self._client.subscribe(subject, cb=take))
        for register in await self._replicated.execute(ReadRegisters("owner.")):
            self._set_owner(int(register.key.rpartition(".")[2]), register)

    async def close(self) -> None:
        """Ends all commands under way with EngineClosed."""
        self._closed = True
        self._sweeper.cancel()
        if self._reading_owners is not None:
            await end_tasks([self._reading_owners])
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.set_exception(EngineClosed("the connection to the cluster was closed"))
        for subscription in self._subscriptions:
            with suppress(Exception):
                await subscription.unsubscribe()

    async def ask(
        self,
        shard: int,
        command: Command[R],
        version: int = 0,
        *,
        watch_only: bool = False,
        alone: bool = False,
        wait: OpenWait | None = None,
    ) -> R:
        """Has the current owner of the shard execute a command; returns its reply.

        `version` is that of the queue's spread. A `watch_only` pull claims nothing
        (`shard_protocol`). A push that the shard may refuse with NotPlaced must be sent `alone`: of
        a Batch, a shard checks only the version. Raises PenstockError, SpreadChanged or NotPlaced.
        """
        kind = protocol.WATCH if watch_only else protocol.COMMAND
        messages: list[bytes] = []
        if alone or not _may_share(command):
            messages = protocol.write_command(command, version, kind)
        began_s = self._loop.time()
        attempts = Attempts(shard, command, began_s)
        while True:
            known = self._known_owner(shard)
            try:
                reply = await self._try(shard, command, version, messages, wait)
                return attempts.outcome(reply)
            except StaleReceipt as error:
                return attempts.outcome(error)
            except StoreFull as error:
                raise attempts.refusal(error) from None
            except (NotDone, MayBeDone) as error:
                pause_s = attempts.pause_s(error, self._loop.time())
            if not await self._wait_for_owner(shard, known, pause_s):
                await self._read_owner(shard)
            left = with_remaining_wait(command, self._loop.time() - began_s)
            if wait is not None and wait.is_over:
                left = msgspec.structs.replace(left, wait_ms=0)
            if left is not command:
                messages = protocol.write_command(left, version, kind)

    async def _try(
        self,
        shard: int,
        command: Command[R],
        version: int,
        messages: list[bytes],
        wait: OpenWait | None,
    ) -> R:
        """Sends a command to the owner known now. Raises NotDone or MayBeDone."""
        if not messages:
            return cast(R, await self._share((shard, version), command))
        call = self._send(shard, command, messages)
        if type(command) is Pull and command.attempt_id is None:
            # A watch claims nothing.
            call.may_leave_claims = messages[-1][:1] == protocol.COMMAND
        if wait is not None:
            wait.end_at_owner = partial(
                self._sender.send, call.subject, call.token, protocol.END_WAIT
            )
        try:
            kind, body = await call.answer
        except asyncio.CancelledError:
            self._sender.send(call.subject, call.token, protocol.CANCEL)
            self._abandon(call)
            raise
        finally:
            del self._calls[call.token]
        if kind == protocol.LOST:
            self._abandon(call)
        return cast(R, read_answer(command, kind, body))

    def _abandon(self, call: _CommandCall) -> None:
        """Has the claims released that a pull gets, or got, and that no caller waits for."""
        if not call.may_leave_claims:
            return
        if call.answer_kind == protocol.REPLY_WHOLE:
            self._release_answer(call, call.answer.result()[1])
        else:
            call.sweeps = 0
            self._abandoned[call.token] = call

    def _release_answer(self, call: _CommandCall, body: bytes) -> None:
        self.release(call.shard, protocol.read_reply(call.command, body))

    def release(self, shard: int, claims: Sequence[Claim]) -> None:
        """Releases claims that no caller gets, without waiting for the answers.

        If the shard moves at this instant, they end with their visibility timeout instead.
        """
        term = self._terms.get(shard)
        if self._closed or term is None or not claims:
            return
        token = next(self._tokens)
        batch = Batch([Release(claim.queue, claim.receipt) for claim in claims])
        for message in protocol.write_command(batch):
            self._sender.send(f"{self._name}.serve.{shard}.{term}", token, message)

    def _send(self, shard: int, command: Command[Any], messages: list[bytes]) -> _CommandCall:
        """Sends a command; the caller removes the call once it is answered. Raises NotDone."""
        if self._closed:
            raise EngineClosed("the connection to the cluster was closed")
        term = self._terms.get(shard)
        if term is None:
            raise NotDone("no node owns it yet")
        token = next(self._tokens)
        subject = f"{self._name}.serve.{shard}.{term}"
        call = _CommandCall(shard, term, subject, token, command, self._loop.create_future())
        self._calls[token] = call
        for message in messages:
            self._sender.send(subject, token, message)
        return call

    # Commands that share a Batch.

    def _share(self, key: tuple[int, int], command: Command[Any]) -> "asyncio.Future[Any]":
        """Sends a command with the others of this turn of the event loop; its reply."""
        waiting: asyncio.Future[Any] = self._loop.create_future()
        shared = self._shared.setdefault(key, [])
        shared.append((command, waiting))
        if len(shared) == 1:
            self._loop.call_soon(self._send_waiting, key)
        elif len(shared) == _SHARED_MAX:
            self._send_shared(key, self._shared.pop(key))
        return waiting

    def _send_waiting(self, key: tuple[int, int]) -> None:
        shared = self._shared.pop(key, None)
        if shared:
            self._send_shared(key, shared)

    def _send_shared(self, key: tuple[int, int], shared: Sequence[_Shared]) -> None:
        """Sends several commands as one Batch; a single one as it is."""
        shard, version = key
        command = shared[0][0]
        if len(shared) > 1:
            command = Batch([cast(BatchItem, each) for each, _ in shared])
        try:
            call = self._send(shard, command, protocol.write_command(command, version))
        except PenstockError as error:
            if len(shared) == 1:
                _finish(shared[0][1], error)
            else:
                # One of them cannot be encoded: sent alone, it gets its own error.
                for each in shared:
                    self._send_shared(key, [each])
        except NotDone as error:
            for _, waiting in shared:
                _finish(waiting, copy(error))
        else:
            call.answer.add_done_callback(partial(self._answer_shared, key, call, shared))

    def _answer_shared(
        self,
        key: tuple[int, int],
        call: _CommandCall,
        shared: Sequence[_Shared],
        answer: "asyncio.Future[tuple[bytes, bytes]]",
    ) -> None:
        del self._calls[call.token]
        replies: Sequence[Any]
        try:
            reply = read_answer(call.command, *answer.result())
            replies = [reply] if len(shared) == 1 else reply
        except SpreadChanged as error:
            if len(shared) > 1:
                # The spread of one queue has changed: the other commands do not depend on it.
                for each in shared:
                    self._send_shared(key, [each])
                return
            replies = [error]
        except Exception as error:
            replies = [copy(error) for _ in shared]
        for each, reply in zip(shared, replies, strict=True):
            if isinstance(reply, InvalidField) and str(reply).startswith("items["):
                # The error names its index in the Batch: sent alone, its error does not.
                self._send_shared(key, [each])
            else:
                _finish(each[1], reply)

    # Replies.

    def _sweep(self) -> None:
        """Reads the register of each shard whose owner has sent nothing for a whole interval."""
        self._sweeper = self._loop.call_later(protocol.SILENCE_S, self._sweep)
        for call in (*self._calls.values(), *self._abandoned.values()):
            call.sweeps += 1
        for token in [token for token, call in self._abandoned.items() if call.is_forgotten]:
            del self._abandoned[token]
        silent = {call.shard for call in self._calls.values() if call.is_silent}
        if silent and self._reading_owners is None:
            self._reading_owners = self._loop.create_task(self._read_owners(silent))

    async def _read_owners(self, shards: set[int]) -> None:
        try:
            for shard in shards:
                await self._read_owner(shard)
                self._abandon_calls(shard)
        finally:
            self._reading_owners = None

    async def _take_reply(self, message: Msg) -> None:
        if message.subject.endswith(protocol.REPLIES):
            async for token, data in in_slices(message.data):
                self._take_item(token, data)
        elif (message.headers or {}).get("Status") == "503":
            # NATS answers so if the subject has no subscriber.
            for token in self._sender.take_undelivered(message.subject.rpartition(".")[2]):
                self._take_item(token, protocol.NOT_OWNER)

    def _take_item(self, token: int, data: bytes) -> None:
        kind, body = data[:1], data[1:]
        call = self._calls.get(token)
        if call is None or call.answer.done():
            if call is not None and call.answer_kind in (b"", protocol.LOST):
                # Its caller has not run since it was cancelled, or since the owner was replaced.
                self._abandon(call)
            self._take_abandoned(token, kind, body)
            return
        call.sweeps = 0
        if kind == protocol.REPLY_PART:
            call.parts.append(body)
        elif kind == protocol.REPLY_WHOLE:
            call.answer.set_result((kind, b"".join([*call.parts, body])))
        elif kind != protocol.IN_PROGRESS:
            call.answer.set_result((kind, body))

    def _take_abandoned(self, token: int, kind: bytes, body: bytes) -> None:
        """Handles an answer for which no caller waits."""
        call = self._abandoned.get(token)
        if call is None:
            return
        if kind == protocol.REPLY_PART:
            call.parts.append(body)
        elif kind != protocol.IN_PROGRESS:
            del self._abandoned[token]
            if kind == protocol.REPLY_WHOLE:
                self._release_answer(call, b"".join([*call.parts, body]))

    async def register(self, key: str) -> Register | None:
        """A register; None if there is none, or if it cannot be read now."""
        with suppress(Unanswered):
            return await self._replicated.execute(ReadRegister(key))
        return None

    # Who owns what.

    async def _take_ownership(self, message: Msg) -> None:
        number, term = read_shard(message.subject.rpartition(".")[2]), message.data
        if number is not None and term.isdigit() and len(term) <= _TERM_DIGITS_MAX:
            self._announced[number] = self._announced.get(number, 0) + 1
            self._terms[number] = max(self._terms.get(number, 0), int(term))
            self._abandon_calls(number)
            event = self._owner_events.pop(number, None)
            if event is not None:
                event.set()

    def _known_owner(self, shard: int) -> tuple[int | None, int]:
        """The term of a shard's owner as known here, and the number of announcements so far."""
        return self._terms.get(shard), self._announced.get(shard, 0)

    async def _wait_for_owner(
        self, shard: int, known: tuple[int | None, int], pause_s: float
    ) -> bool:
        """Waits for an announcement after `known`, for at most `pause_s`; whether there was one.

        One that came while the command was under way counts: the term may have been read from the
        register before the new owner subscribed to its subject.
        """
        if self._known_owner(shard) == known:
            event = self._owner_events.setdefault(shard, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await event.wait()
        return self._known_owner(shard) != known

    def _abandon_calls(self, shard: int) -> None:
        """Ends calls to earlier owners of a shard, and calls without a sign of life for long."""
        term = self._terms.get(shard)
        for call in self._calls.values():
            if call.is_given_up(shard, term) and not call.answer.done():
                call.answer.set_result((protocol.LOST, b""))

    async def _read_owner(self, shard: int) -> None:
        with suppress(Unanswered):
            self._set_owner(shard, await self._replicated.execute(ReadRegister(owner_key(shard))))

    def _set_owner(self, shard: int, register: Register | None) -> None:
        if register is not None:
            self._terms[shard] = max(self._terms.get(shard, 0), register.revision)


def _may_share(command: Command[Any]) -> bool:
    """Whether a command may share a Batch: it is small and never waits at the owner."""
    if type(command) is Push:
        return type(command.body) is bytes and len(command.body) <= _SHARED_BODY_BYTES_MAX
    return type(command) is Delete or type(command) is Extend


def _finish(waiting: "asyncio.Future[Any]", reply: Any) -> None:
    """Sets the result of a future, or its exception, unless it is done or cancelled."""
    if waiting.done():
        return
    if isinstance(reply, Exception):
        waiting.set_exception(reply)
    else:
        waiting.set_result(reply)


def _nothing() -> None:
    pass
