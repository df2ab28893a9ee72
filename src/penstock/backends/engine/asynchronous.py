"""The engine for callers that await: each command is submitted to the `LoopEngine`."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, TypeVar, cast

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.loop import Pending
from penstock.service import REDRIVE_MAX, Claim, Command, History, Pull

R = TypeVar("R")


class AsyncEngine:
    """An `AsyncQueueService` over an engine that belongs to one event loop."""

    LACKS: ClassVar[Mapping[str, str]] = {}
    redrive_max: int = REDRIVE_MAX

    def __init__(self, engine: Engine) -> None:
        self._loop_engine = LoopEngine(engine)
        self._loop = asyncio.get_running_loop()

    async def execute(self, command: Command[R]) -> R:
        """Executes the command, and returns once its changes are durable."""
        submit = self._loop_engine.submit
        if type(command) is History:
            submit = self._loop_engine.history  # type: ignore[assignment]
        reply = submit(command)
        if not isinstance(reply, Pending):
            return reply
        answer: asyncio.Future[R] = self._loop.create_future()
        reply.then(partial(self._resolve, command, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            reply.cancel()
            if not answer.cancelled() and not answer.exception():
                self._release_claims(command, answer.result())
            raise

    def _resolve(
        self,
        command: Command[R],
        answer: "asyncio.Future[R]",
        reply: R,
        error: Exception | None,
    ) -> None:
        if answer.done():
            # The caller was cancelled, and its task has not run since.
            self._release_claims(command, reply)
        elif error is None:
            answer.set_result(reply)
        else:
            answer.set_exception(error)

    def _release_claims(self, command: Command[R], reply: R) -> None:
        """Releases claims whose caller was cancelled before it received them."""
        if type(command) is Pull and command.attempt_id is None and reply:
            self._loop_engine.abandon(cast("list[Claim]", reply))

    async def close(self) -> None:
        """Ends all waits, makes everything durable, and closes the journal."""
        await self._loop_engine.close()
