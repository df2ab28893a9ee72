"""The status of queues for programs in a terminal: what the console's pages read and are sent.

    http://HOST:PORT   the console of a `penstock serve`, by the requests of its own pages
    any other URL      the same interface (`server.console.status`), here, over the store's service

Both give the same values, so what shows them does not know which it is.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from penstock.backends.loop import AwaitedService, LoopService, result_of
from penstock.errors import RequestError
from penstock.server.console.reads import Reads
from penstock.server.console.status import Status
from penstock.server.console.views import changes
from penstock.server.console.visitor import Refused
from penstock.url import load_backend, read_url, without_password


class StatusSource(Protocol):
    """The status of one store's queues."""

    @property
    def shown(self) -> str:
        """The URL as it may be shown."""
        ...

    async def read(self, name: str, /, **given: str) -> Any:
        """The value that the console's pages read under this name. Raises PenstockError."""
        ...

    def changes(self, queue: str = "") -> AsyncIterator[dict[str, Any]]:
        """What changed in all queues or in one, each time they were read.

        Ends, or raises PenstockError, when the connection is lost.
        """
        ...

    async def close(self) -> None:
        """Closes all connections."""
        ...


async def open_source(url: str) -> StatusSource:
    """The status of the store, or of the server, at a URL. Raises PenstockError."""
    scheme = url.partition(":")[0].lower()
    if scheme in ("http", "https"):
        # Imported here: a store needs none of it.
        from penstock.cli.live.over_http import ServerStatus

        return await ServerStatus.open(url)
    found = read_url(url)
    service = await load_backend(found).open_async_service(found, None)
    return ServiceStatus(AwaitedService(service), without_password(url))


class ServiceStatus:
    """The status of a service that this process has opened."""

    def __init__(self, service: LoopService, shown: str) -> None:
        self.shown = shown
        self._service = service
        self._status = Status(service, in_process=False, watched_s=1.0)
        self._reads = Reads(service, self._status, mask=False)
        self._status.start()

    async def read(self, name: str, /, **given: str) -> Any:
        try:
            if name == "life":
                return await result_of(self._reads.life(given["id"]))
            return await result_of(self._service.run(self._reads.by_name[name](given)))
        except Refused as refused:
            raise RequestError(str(refused)) from None

    async def changes(self, queue: str = "") -> AsyncIterator[dict[str, Any]]:
        status = self._status
        was_read = asyncio.Event()
        leave = status.watch(was_read.set)
        try:
            while True:
                await was_read.wait()
                was_read.clear()
                yield changes(status, {each.info.queue: each for each in status.changed()}, queue)
        finally:
            leave()

    async def close(self) -> None:
        await self._status.stop()
        await self._service.close()
