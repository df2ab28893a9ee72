"""A standby of a shard: a replica that a task keeps up to date with the log of its owner."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from penstock.cluster.jetstream import JetStream
from penstock.cluster.owned_shard import end_tasks
from penstock.cluster.replica import ShardReplica, never_paused
from penstock.errors import PenstockError

# The log is read again after this time, if no hint of the owner came before.
_READ_S: Final = 5.0
_RETRY_S: Final = 1.0


class Standby:
    """The replica of a shard that another node owns, and the task that reads the log into it."""

    def __init__(
        self,
        replica: ShardReplica,
        replicated: JetStream,
        began: Callable[[], None],
        failed: Callable[[PenstockError], None],
        is_paused: Callable[[], bool],
    ) -> None:
        """`began` is called when the log was read for the first time, `failed` with each error.

        While `is_paused()`, a long read waits.
        """
        self.replica = replica
        replica.is_paused = is_paused
        # Until the log was read to its end, or could not be read, for the first time.
        self.is_new = True
        self._replicated = replicated
        self._began = began
        self._failed = failed
        self._woken = asyncio.Event()
        # Set whenever the task has read the log to its end.
        self._caught_up = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep_reading())

    def wake(self) -> None:
        """Has the log read now: the owner has appended something."""
        self._woken.set()

    async def catch_up(self) -> None:
        """Waits until the task has read everything that was in the log before this call."""
        # The first event may be that of a read which began before the call.
        for _ in range(2):
            self._caught_up.clear()
            self._woken.set()
            await self._caught_up.wait()

    async def _keep_reading(self) -> None:
        while True:
            try:
                await self._replicated.run(self.replica.catch_up())
                self._caught_up.set()
                if self.is_new:
                    self.is_new = False
                    self._began()
            except PenstockError as error:
                self.is_new = False
                self._failed(error)
                await asyncio.sleep(_RETRY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_READ_S):
                    await self._woken.wait()
            self._woken.clear()

    async def end(self) -> ShardReplica | None:
        """Ends the task; the replica, unless the task has failed unexpectedly."""
        is_reading = not self._task.done()
        await end_tasks([self._task])
        # From now on clients wait for the replica.
        self.replica.is_paused = never_paused
        return self.replica if is_reading else None
