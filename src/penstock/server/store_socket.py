"""The Unix socket of a store, by which `file:PATH` in other processes reaches the holder."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from penstock.backends.loop import LoopService
from penstock.errors import PenstockError
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.server.frames.ipc import listen_unix
from penstock.server.frames.server import FrameServer
from penstock.server.holder import StoreHolder


class StoreSocket:
    """A frame server on the socket of a store, beside the other servers of this process."""

    def __init__(
        self,
        holder: StoreHolder,
        service: LoopService,
        options: Mapping[str, str],
        faults: Faults,
        failed: Callable[[PenstockError], None] | None = None,
        counts: CommandCounts | None = None,
    ) -> None:
        """`options` are the store's settings for WELCOME frames; `holder` is added to them."""
        self.frames = FrameServer(
            service,
            options={**options, "holder": holder.kind},
            failed=failed,
            faults=faults,
            counts=counts,
        )
        self._holder = holder
        self._listeners: list[asyncio.Server] = []

    def add_listener(self, listener: asyncio.Server) -> None:
        """Adds another listener of the frame server, to be closed together with the socket."""
        self._listeners.append(listener)

    async def listen(self) -> None:
        """Opens the socket; call it last: when a client can connect, all else must be ready."""
        self._listeners.append(await listen_unix(self.frames, self._holder.socket))
        self._holder.started()

    async def close(self, reason: str) -> None:
        """Answers the requests read so far, sends GOODBYE with the reason, and disconnects."""
        for listener in self._listeners:
            listener.close()
        with suppress(OSError):
            self._holder.socket.unlink()
        await self.frames.stop(reason)
