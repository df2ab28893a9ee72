"""The pages for monitoring a server: /health and /metrics, and LocalStack's health page.

`penstock serve` answers them beside the SQS API; a daemon with `--http` answers only these.
"""

import asyncio
import errno
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from penstock import __version__
from penstock.backends.loop import LoopService, Pending, Steps
from penstock.errors import AddressInUse, InvalidField, PenstockError
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.server.http import HttpConnection, HttpServer, Request, response
from penstock.server.metrics import CONTENT_TYPE as METRICS_TYPE
from penstock.server.metrics import FigureSource, Metrics
from penstock.server.sqs.access import Access
from penstock.server.tls import ServerTls, over_tls
from penstock.service import ListQueues
from penstock.wire.sqs.address import Owner, QueueDirectory

BACKLOG: Final = 4_096
METRICS_PATH: Final = "/metrics"
PAGE_PATHS: Final = frozenset({"/health", METRICS_PATH})
# Only of a server that answers the SQS API.
LOCALSTACK_HEALTH: Final = "/_localstack/health"
_QUEUES_WORD: Final = "queues="
# A prefix of queues' names needs no percent signs.
_QUEUES: Final = re.compile(rf"{_QUEUES_WORD}[A-Za-z0-9_.@-]{{0,160}}")
_HEALTHY: Final = b'{"status":"ok"}'
_STOPPED: Final = b'{"status":"stopped"}'
_SERVICES: Final = '{"services":{"sqs":"%s"},"edition":"penstock","version":"%s"}'


def service_health() -> Steps[bool]:
    """Whether the service answers."""
    try:
        yield ListQueues(limit=1)
    except PenstockError:
        return False
    return True


class Pages:
    """The two pages, about one service."""

    def __init__(
        self,
        service: LoopService,
        metrics: Metrics,
        health: Callable[[], Steps[bool]] = service_health,
        *,
        answers_sqs: bool = False,
    ) -> None:
        self._paths = PAGE_PATHS | ({LOCALSTACK_HEALTH} if answers_sqs else set())
        self._service = service
        self._metrics = metrics
        self._health = health
        self._loop = asyncio.get_running_loop()
        # Connections that get the figures being made, by the prefix of the queues that they show:
        # requests that come meanwhile share them.
        self._readers: dict[str, list[HttpConnection]] = {}

    def is_page(self, request: Request) -> bool:
        """Whether the request is for one of the pages."""
        if request.method != "GET" or request.path not in self._paths:
            return False
        return not request.query or (
            request.path == METRICS_PATH and _QUEUES.fullmatch(request.query) is not None
        )

    def answer(self, request: Request, connection: HttpConnection) -> bytes | None:
        """The response, or None if it is sent on the connection later."""
        if request.path != METRICS_PATH:
            return self._answer(self._show_health(request.path), [connection])
        prefix = request.query.removeprefix(_QUEUES_WORD)
        sharing = self._readers.get(prefix)
        if sharing is not None:
            sharing.append(connection)
            return None
        readers = [connection]
        shown = self._answer(self._show_metrics(prefix), readers, prefix)
        if shown is None:
            self._readers[prefix] = readers
        return shown

    def _answer(
        self, page: Steps[bytes], readers: list[HttpConnection], prefix: str = ""
    ) -> bytes | None:
        """The page, or None if it is to be sent to the readers later."""

        def done(shown: bytes | None, error: Exception | None) -> None:
            if readers is self._readers.get(prefix):
                del self._readers[prefix]
            self._send(shown or self.refusal(503), readers)

        try:
            shown = self._service.run(page)
        except PenstockError:
            return self.refusal(503)
        if isinstance(shown, Pending):
            shown.then(done)
            return None
        return shown

    def _send(self, shown: bytes, readers: list[HttpConnection]) -> None:
        """Sends a page, to one reader in each turn of the event loop: it may be megabytes."""
        readers.pop().finish(shown)
        if readers:
            self._loop.call_soon(self._send, shown, readers)

    def refusal(self, status: int) -> bytes:
        """A response without a body."""
        return response(status, b"", b"", self._loop.time())

    def _show_health(self, path: str) -> Steps[bytes]:
        is_healthy = yield from self._health()
        status, body = (200, _HEALTHY) if is_healthy else (503, _STOPPED)
        if path == LOCALSTACK_HEALTH:
            body = (_SERVICES % ("running" if is_healthy else "error", __version__)).encode()
        return response(status, b"Content-Type: application/json\r\n", body, self._loop.time())

    def _show_metrics(self, prefix: str) -> Steps[bytes]:
        page = yield from self._metrics.page(prefix)
        headers = f"Content-Type: {METRICS_TYPE}\r\n".encode()
        return response(200, headers, page, self._loop.time())


async def bind_http(
    http: HttpServer, host: str, port: int, tls: ServerTls | None = None
) -> asyncio.Server:
    """Binds an address; `start_serving` accepts clients. Raises AddressInUse or InvalidField."""
    try:
        return await asyncio.get_running_loop().create_server(
            over_tls(http, tls),
            host,
            port,
            backlog=BACKLOG,
            start_serving=False,
        )
    except OSError as error:
        place = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"port: another program listens on {place}; stop it, or choose another port"
            ) from None
        reason = error.strerror or error
        raise InvalidField(f"host: cannot listen on {place}: {reason}") from None
    except UnicodeError:
        raise InvalidField(f"host: {host[:100]!r} is not a host's name") from None


async def listen_pages(
    service: LoopService,
    host: str,
    port: int,
    faults: Faults,
    counts: CommandCounts,
    more: Sequence[FigureSource] = (),
) -> tuple[HttpServer, asyncio.Server]:
    """Serves only these pages by HTTP. Raises as `bind_http` does.

    A request that a web page may have sent is refused, as in `penstock serve`.
    """
    pages = Pages(service, Metrics(Counter(), faults=faults, commands=counts, more=more))
    access = Access(QueueDirectory(Owner("000000000000", "us-east-1")), "http", {}, [])

    def route(request: Request, connection: HttpConnection) -> bytes | None:
        if not pages.is_page(request):
            return pages.refusal(404)
        if not access.may_see_pages(request, connection.peer):
            return pages.refusal(403)
        return pages.answer(request, connection)

    http = HttpServer(route, faults)
    listener = await bind_http(http, host, port)
    await listener.start_serving()
    return http, listener
