"""A server from start to end: the store opened, queues made, the door open, and shut again."""

import asyncio
import errno
import signal
import ssl
from collections.abc import Callable
from typing import Any, Final

from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import AsyncEngine
from penstock.backends.engine.open import open_engine
from penstock.client import to_settings
from penstock.clock import Clock
from penstock.errors import AddressInUse, InvalidField, QueueExists, RequestError
from penstock.server.faults import Faults
from penstock.server.http import HttpConnection, HttpServer, Request, response
from penstock.server.metrics import CONTENT_TYPE as METRICS_TYPE
from penstock.server.metrics import Metrics
from penstock.server.process import allow_many_files, look_seldom_for_cycles
from penstock.server.sqs.access import Access
from penstock.server.sqs.endpoint import SqsEndpoint
from penstock.server.sqs.home import keep_home
from penstock.server.sqs.store import Store, Windows
from penstock.service import ConfigureQueue, CreateQueue
from penstock.settings import ServerSettings
from penstock.wire.sqs.address import Owner, QueueDirectory
from penstock.wire.sqs.attributes import IN_FLIGHT_MAX

DRAIN_S: Final = 10.0
BACKLOG: Final = 4_096
_PAGES: Final = frozenset({"/health", "/metrics"})
_HEALTHY: Final = b'{"status":"ok"}'
_STOPPED: Final = b'{"status":"stopped"}'


class Running:
    """A server that has started: where it listens, and how to stop it."""

    def __init__(
        self,
        settings: ServerSettings,
        engine: Engine,
        service: AsyncEngine,
        endpoint: SqsEndpoint,
        http: HttpServer,
        listener: asyncio.Server,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.port: int = listener.sockets[0].getsockname()[1]
        self._service = service
        self._endpoint = endpoint
        self._http = http
        self._listener = listener
        # Done, with the reason, if the store fails while the server runs.
        self.failed = endpoint.failed

    @property
    def url(self) -> str:
        """The address by which clients on this machine reach the server."""
        scheme = "https" if self.settings.tls_cert else "http"
        host = self.settings.host
        if host in ("0.0.0.0", "::"):
            host = "localhost"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def stop(self) -> None:
        """Answers what was accepted, ends the waits, and lets go of the store."""
        self._listener.close()
        self._endpoint.end_waits()
        await self._http.drain(DRAIN_S)
        await self._endpoint.close()
        await self._service.close()


async def start(settings: ServerSettings, clock: Clock | None = None) -> Running:
    """Opens the store and the door. Raises PenstockError."""
    tls = _tls(settings)
    engine = open_engine(settings.where, clock)
    home = Owner(settings.account, settings.region)
    try:
        keep_home(settings.where, home)
        _declare(engine, settings)
        service = AsyncEngine(engine)
    except BaseException:
        engine.close()
        raise
    directory = QueueDirectory(home)
    windows = Windows(settings.deleted_window_ms, settings.purged_window_ms)
    store = Store(engine, directory, windows)
    access = Access(directory, "https" if tls else "http", settings.keys, settings.allow_hosts)
    endpoint = SqsEndpoint(store, access)
    faults = Faults()
    asyncio.get_running_loop().set_exception_handler(faults.from_loop)
    metrics = Metrics(engine, endpoint.answered, faults)
    http = HttpServer(_router(endpoint, metrics, access), faults)
    try:
        listener = await asyncio.get_running_loop().create_server(
            http,
            settings.host,
            settings.port,
            ssl=tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=10 if tls else None,
        )
    except OSError as error:
        await service.close()
        place = f"{settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"port: another program listens on {place}; stop it, or choose another --port"
            ) from None
        reason = error.strerror or error
        raise InvalidField(f"host: cannot listen on {place}: {reason}") from None
    return Running(settings, engine, service, endpoint, http, listener)


def _declare(engine: Engine, settings: ServerSettings) -> None:
    """Makes the queues that the settings declare, or brings them up to what is declared."""
    for name, words in settings.queues.items():
        try:
            changes = {"in_flight_max": IN_FLIGHT_MAX, **to_settings(words)}
            if name.endswith(".fifo"):
                changes.setdefault("fifo", True)
            try:
                engine.submit(CreateQueue(name, changes))
            except QueueExists:
                engine.submit(ConfigureQueue(name, changes))
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
    endpoint: SqsEndpoint, metrics: Metrics, access: Access
) -> Callable[[Request, HttpConnection], bytes | None]:
    """Two pages for whoever looks after the server; everything else is for the endpoint."""
    loop = asyncio.get_running_loop()
    answer = endpoint.answer

    def route(request: Request, connection: HttpConnection) -> bytes | None:
        if request.path not in _PAGES or request.query or request.method != "GET":
            return answer(request, connection)
        if not access.is_from_here(request, connection.peer):
            return response(403, b"", b"", loop.time())
        if request.path == "/health":
            status, body = (200, _HEALTHY) if endpoint.is_healthy() else (503, _STOPPED)
            return response(status, b"Content-Type: application/json\r\n", body, loop.time())
        headers = f"Content-Type: {METRICS_TYPE}\r\n".encode()
        return response(200, headers, metrics.text(), loop.time())

    return route


async def run(settings: ServerSettings, started: Callable[[Running], None]) -> None:
    """Serves until told to stop by SIGTERM or SIGINT.

    Raises PenstockError: at the start, or when the store fails later.
    """
    loop = asyncio.get_running_loop()
    told: asyncio.Future[None] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _tell, told)
    allow_many_files()
    running = await start(settings)
    look_seldom_for_cycles()
    started(running)
    either: list[asyncio.Future[Any]] = [told, running.failed]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    await running.stop()
    if running.failed.done():
        raise running.failed.result()


def _tell(told: "asyncio.Future[None]") -> None:
    if not told.done():
        told.set_result(None)


def run_until_stopped(settings: ServerSettings, started: Callable[[Running], None]) -> None:
    """The same, for a caller who has no event loop."""
    import uvloop

    uvloop.run(run(settings, started))
