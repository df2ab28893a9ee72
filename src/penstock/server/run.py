"""The life of an SQS server: open the store, create the declared queues, listen, and stop.

The store is any URL that `penstock.connect` takes. `memory:` and `file:PATH` are opened in this
process; `file:PATH?daemon=1`, and every URL of another scheme, is reached through its backend.
"""

import asyncio
import errno
import signal
import ssl
from collections.abc import Callable
from typing import Any, Final

from penstock.backends.engine.loop import LoopEngine
from penstock.backends.engine.open import open_engine
from penstock.backends.loop import AwaitedService, LoopService, Pending, Steps, result_of
from penstock.client import to_settings
from penstock.clock import Clock
from penstock.errors import AddressInUse, InvalidField, PenstockError, QueueExists, RequestError
from penstock.server.faults import Faults
from penstock.server.http import HttpConnection, HttpServer, Request, response
from penstock.server.metrics import CONTENT_TYPE as METRICS_TYPE
from penstock.server.metrics import QUEUES_MAX, Metrics
from penstock.server.process import allow_many_files, look_seldom_for_cycles
from penstock.server.sqs.access import Access
from penstock.server.sqs.endpoint import SqsEndpoint
from penstock.server.sqs.home import keep_home
from penstock.server.sqs.lookup import QueueLookup, Windows
from penstock.service import ConfigureQueue, CreateQueue
from penstock.settings import ServerSettings
from penstock.url import BackendUrl, load_backend, read_url
from penstock.wire.sqs.address import Owner, QueueDirectory
from penstock.wire.sqs.attributes import IN_FLIGHT_MAX

DRAIN_S: Final = 10.0
BACKLOG: Final = 4_096
_PAGES: Final = frozenset({"/health", "/metrics"})
_HEALTHY: Final = b'{"status":"ok"}'
_STOPPED: Final = b'{"status":"stopped"}'
# Of a service elsewhere each queue's figures are a request of their own.
_QUEUES_SHOWN_ELSEWHERE_MAX: Final = 1_000


class Running:
    """A server that has started: where it listens, and how to stop it."""

    def __init__(
        self,
        settings: ServerSettings,
        service: LoopService,
        endpoint: SqsEndpoint,
        http: HttpServer,
        listener: asyncio.Server,
    ) -> None:
        self.settings = settings
        self.service = service
        self.port: int = listener.sockets[0].getsockname()[1]
        self._endpoint = endpoint
        self._http = http
        self._listener = listener
        # Done, with the reason, if the store fails while the server runs.
        self.failed: asyncio.Future[PenstockError] = asyncio.get_running_loop().create_future()
        service.on_failure(self._fail)

    def _fail(self, error: PenstockError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    @property
    def url(self) -> str:
        """The address by which clients on this machine reach the server."""
        scheme = "https" if self.settings.tls_cert else "http"
        host = self.settings.host
        if host in ("0.0.0.0", "::"):
            host = "localhost"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def stop(self) -> None:
        """Answers what was accepted, ends the waits, and closes the store."""
        self._listener.close()
        self._endpoint.end_waits()
        await self._http.drain(DRAIN_S)
        await self._endpoint.close()
        await self.service.close()


async def start(settings: ServerSettings, clock: Clock | None = None) -> Running:
    """Opens the store and listens. Raises PenstockError."""
    tls = _tls(settings)
    home = Owner(settings.account, settings.region)
    url = read_url(settings.where)
    service = await _open(url, clock)
    try:
        if isinstance(service, LoopEngine):
            keep_home(settings.where, home)
        await result_of(service.run(_declare(service, settings)))
        directory = QueueDirectory(home)
        windows = Windows(settings.deleted_window_ms, settings.purged_window_ms)
        access = Access(directory, "https" if tls else "http", settings.keys, settings.allow_hosts)
        endpoint = SqsEndpoint(QueueLookup(service, directory, windows), access)
        faults = Faults()
        asyncio.get_running_loop().set_exception_handler(faults.from_loop)
        http = HttpServer(_router(service, endpoint, access, faults), faults)
        listener = await _listen(settings, http, tls)
    except BaseException:
        await service.close()
        raise
    endpoint.resume()
    return Running(settings, service, endpoint, http, listener)


async def _open(url: BackendUrl, clock: Clock | None) -> LoopService:
    """The store: an engine in this process, or a service elsewhere. Raises PenstockError."""
    if url.scheme == "memory" or (url.scheme == "file" and not url.is_on("daemon")):
        return LoopEngine(open_engine(url.text, clock))
    options = {name: value for name, value in url.options.items() if name != "daemon"}
    elsewhere = url._replace(options=options)
    service = await load_backend(url).open_async_service(elsewhere, None)
    return AwaitedService(service, clock)


async def _listen(
    settings: ServerSettings, http: HttpServer, tls: ssl.SSLContext | None
) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(
            http,
            settings.host,
            settings.port,
            ssl=tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=10 if tls else None,
        )
    except OSError as error:
        place = f"{settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"port: another program listens on {place}; stop it, or choose another --port"
            ) from None
        reason = error.strerror or error
        raise InvalidField(f"host: cannot listen on {place}: {reason}") from None


def _declare(service: LoopService, settings: ServerSettings) -> Steps[None]:
    """Creates the queues that the settings declare, or gives them the declared settings."""
    limits = {} if "in-flight limit" in service.LACKS else {"in_flight_max": IN_FLIGHT_MAX}
    for name, words in settings.queues.items():
        try:
            changes = {**limits, **to_settings(words)}
            if name.endswith(".fifo"):
                changes.setdefault("fifo", True)
            try:
                yield CreateQueue(name, changes)
            except QueueExists:
                yield ConfigureQueue(name, changes)
        except RequestError as error:
            raise InvalidField(f"queues.{name}: {error}") from None


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidField(
            f"tls_cert: cannot use {settings.tls_cert!r} with {settings.tls_key!r}: {error}"
        ) from None
    return context


def _router(
    service: LoopService, endpoint: SqsEndpoint, access: Access, faults: Faults
) -> Callable[[Request, HttpConnection], bytes | None]:
    """Two pages for whoever operates the server; everything else is for the endpoint."""
    loop = asyncio.get_running_loop()
    answer = endpoint.answer
    in_process = isinstance(service, LoopEngine)
    queues_max = QUEUES_MAX if in_process else _QUEUES_SHOWN_ELSEWHERE_MAX
    metrics = Metrics(endpoint.answered, queues_max, faults)

    def health() -> Steps[bytes]:
        is_healthy = yield from endpoint.health()
        status, body = (200, _HEALTHY) if is_healthy else (503, _STOPPED)
        return response(status, b"Content-Type: application/json\r\n", body, loop.time())

    def figures() -> Steps[bytes]:
        page = yield from metrics.page()
        return response(200, f"Content-Type: {METRICS_TYPE}\r\n".encode(), page, loop.time())

    def show(page: Steps[bytes], connection: HttpConnection) -> bytes | None:
        def done(shown: bytes | None, error: Exception | None) -> None:
            connection.finish(shown or response(503, b"", b"", loop.time()))

        try:
            shown = service.run(page)
        except PenstockError:
            return response(503, b"", b"", loop.time())
        if isinstance(shown, Pending):
            shown.then(done)
            return None
        return shown

    def route(request: Request, connection: HttpConnection) -> bytes | None:
        if request.path not in _PAGES or request.query or request.method != "GET":
            return answer(request, connection)
        if not access.is_from_here(request, connection.peer):
            return response(403, b"", b"", loop.time())
        return show(health() if request.path == "/health" else figures(), connection)

    return route


async def run(settings: ServerSettings, started: Callable[[Running], None]) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises PenstockError: at the start, or when the store fails later.
    """
    loop = asyncio.get_running_loop()
    stop_requested: asyncio.Future[None] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _resolve, stop_requested)
    allow_many_files()
    running = await start(settings)
    look_seldom_for_cycles()
    started(running)
    either: list[asyncio.Future[Any]] = [stop_requested, running.failed]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    await running.stop()
    if running.failed.done():
        raise running.failed.result()


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def run_until_stopped(settings: ServerSettings, started: Callable[[Running], None]) -> None:
    """The same, for a caller who has no event loop."""
    import uvloop

    uvloop.run(run(settings, started))
