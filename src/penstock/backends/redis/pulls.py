"""Pull: one script call, repeated while it waits; claims for a cancelled caller are released."""

import asyncio
from contextlib import suppress
from typing import Any, Final

from penstock.backends.redis.layout import RedisQueue, decode_claim
from penstock.backends.redis.messages import RedisMessages
from penstock.backends.redis.moves import RedisMoves
from penstock.backends.redis.queues import RedisQueues
from penstock.backends.redis.waiting import RedisWaits, WaitingPull
from penstock.errors import AttemptLapsed, InFlightLimit, PenstockError, QueueDeleted, QueueNotFound
from penstock.service import (
    Claim,
    Pull,
    Release,
    check_pull,
)

_NONE: Final = -1
# The size of one answer, unless it is a single message.
_BYTES_MAX: Final = 256 * 1024 * 1024


class RedisPulls:
    """The pulls of one service."""

    def __init__(
        self, queues: RedisQueues, messages: RedisMessages, moves: RedisMoves, waits: RedisWaits
    ) -> None:
        self._queues = queues
        self._messages = messages
        self._moves = moves
        self._waits = waits
        # Waiting pulls by queue and attempt id: all of one id are given the same claims.
        self._same_attempt: dict[tuple[str, str], list[WaitingPull]] = {}

    async def pull(self, command: Pull) -> list[Claim]:
        """Claims messages, waiting for the first if the command or the queue says so."""
        check_pull(command)
        queue = await self._queues.find(command.queue)
        wait_ms = command.wait_ms
        if wait_ms is None:
            wait_ms = queue.info.settings.wait_ms
        if not wait_ms:
            return await self._answer(queue, command, await self._try(queue, command))
        waiting = await self._waits.begin(queue)
        same_attempt = self._note_attempt(command, waiting)
        served = False
        try:
            reply = await self._try(queue, command, waiting)
            while reply[3] == b"waits":
                _, waiter, wait_ms, due_ms = reply[3:7]
                self._waits.joined(waiting, waiter, wait_ms, int(due_ms))
                await waiting.woken()
                try:
                    reply = await self._try(queue, command, waiting)
                except QueueNotFound:
                    raise QueueDeleted(
                        f"queue: {queue.name!r} was deleted during the wait"
                    ) from None
            served = True
            return await self._answer(queue, command, reply)
        finally:
            self._waits.left(queue, waiting, served=served)
            if same_attempt is not None:
                same_attempt.remove(waiting)
                if served:
                    for each in same_attempt:
                        each.wake()
                if not same_attempt:
                    self._same_attempt.pop((command.queue, command.attempt_id or ""), None)

    def _note_attempt(self, command: Pull, waiting: WaitingPull) -> list[WaitingPull] | None:
        if command.attempt_id is None:
            return None
        same_attempt = self._same_attempt.setdefault((command.queue, command.attempt_id), [])
        same_attempt.append(waiting)
        return same_attempt

    async def _try(
        self, queue: RedisQueue, command: Pull, waiting: WaitingPull | None = None
    ) -> list[Any]:
        """The reply of the script; claims made after this was cancelled are released."""
        call = self._waits.start(self._call(queue, command, waiting))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if command.attempt_id is None:
                call.add_done_callback(lambda done: self._release(queue, done))
            raise

    async def _call(
        self, queue: RedisQueue, command: Pull, waiting: WaitingPull | None
    ) -> list[Any]:
        arguments = (
            command.limit,
            _NONE if command.visibility_ms is None else command.visibility_ms,
            _NONE if command.wait_ms is None else command.wait_ms,
            command.attempt_id or "",
            command.holder or "",
            _BYTES_MAX if command.bytes_max is None else min(command.bytes_max, _BYTES_MAX),
            int(command.renew),
            (waiting and waiting.id) or "",
            waiting.address if waiting else "",
            int(waiting is not None and waiting.is_over),
        )
        reply = await self._queues.run_on(queue, "pull", *arguments)
        came_back = await self._moves.carry_owed(queue, reply)
        if came_back and reply[3] == b"claims" and len(reply) == 5:
            # It found only dead letters whose queue is missing. They are back: pull them now.
            reply = await self._queues.run_on(queue, "pull", *arguments)
        return reply

    async def _answer(self, queue: RedisQueue, command: Pull, reply: list[Any]) -> list[Claim]:
        word = reply[3]
        if word == b"lapsed":
            raise AttemptLapsed(
                f"attempt_id: a claim given to {command.attempt_id!r} has ended; "
                "pull with a new attempt id"
            )
        if word == b"full":
            raise InFlightLimit(
                f"queue: {queue.name!r} has {reply[4]} messages in flight "
                f"(max_in_flight={reply[5].decode()}); delete or release some first"
            )
        return _claims(await self._queues.same_as(queue, reply), reply)

    def _release(self, queue: RedisQueue, call: "asyncio.Task[list[Any]]") -> None:
        if call.cancelled() or call.exception() is not None:
            return
        reply = call.result()
        if reply[3] != b"claims":
            return
        for claim in _claims(queue, reply):
            self._waits.start(self._release_one(claim))

    async def _release_one(self, claim: Claim) -> None:
        # A claim that cannot be released now returns when it runs out.
        with suppress(PenstockError):
            await self._messages.release(Release(claim.queue, claim.proof))


def _claims(queue: RedisQueue, reply: list[Any]) -> list[Claim]:
    if reply[3] == b"claims":
        deadline_ms = int(reply[4])
        return [
            decode_claim(queue, number, stored, state, deadline_ms)
            for number, stored, state in zip(reply[5::3], reply[6::3], reply[7::3], strict=True)
        ]
    if reply[3] == b"again":
        return [
            decode_claim(queue, number, stored, state, int(deadline_ms))
            for number, stored, state, deadline_ms in zip(
                reply[4::4], reply[5::4], reply[6::4], reply[7::4], strict=True
            )
        ]
    return []
