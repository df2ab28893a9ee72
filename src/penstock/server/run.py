"""Runs an SQS server: opens the store, creates the declared queues, listens, and stops.

The store is any URL that `penstock.connect` takes. `memory:` and `file:PATH` are opened in this
process, which then answers on the data directory's socket, too, unless the URL says `embedded=1`.
`cluster:nats://…` makes this process a node of the cluster. `file:PATH?daemon=1`, and every URL of
another scheme, is reached through its backend.
"""

import asyncio
import os
import signal
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from penstock.backends.engine.loop import LoopEngine
from penstock.backends.engine.open import open_engine
from penstock.backends.loop import AwaitedService, LoopService, Steps, result_of
from penstock.backends.remote.daemon import SERVE
from penstock.client import to_settings
from penstock.clock import Clock
from penstock.errors import InvalidField, PenstockError, QueueExists, RequestError
from penstock.server.carrot.broker import CarrotBroker, read_carrot
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.server.holder import StoreHolder
from penstock.server.http import HttpConnection, HttpServer, Request, response
from penstock.server.metrics import QUEUES_MAX, FigureSource, Metrics
from penstock.server.pages import PAGE_PATHS, Pages, bind_http
from penstock.server.process import allow_many_files, collect_garbage_rarely, open_standard_files
from penstock.server.readers import reader_figures
from penstock.server.sqs.access import Access
from penstock.server.sqs.endpoint import SqsEndpoint
from penstock.server.sqs.home import check_notes, store_home
from penstock.server.sqs.lookup import QueueLookup, Windows
from penstock.server.store_socket import StoreSocket
from penstock.service import ConfigureQueue, CreateQueue
from penstock.settings import ServerSettings
from penstock.url import SCHEMES, BackendUrl, load_backend, read_url
from penstock.wire.sqs.address import Owner, QueueDirectory, is_region
from penstock.wire.sqs.attributes import IN_FLIGHT_MAX

DRAIN_S: Final = 10.0
# In a service of another process, each queue's figures cost a request.
_REMOTE_QUEUES_MAX: Final = 1_000


class OpenedStore:
    """The store of a server: its service, the holder of its directory and its socket."""

    def __init__(
        self,
        url: BackendUrl,
        service: LoopService,
        holder: StoreHolder | None = None,
        announce: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`announce` tells a cluster at which address this process answers."""
        self.service = service
        self._announce = announce
        self._url = url
        self._holder = holder
        self._socket: StoreSocket | None = None

    @property
    def url(self) -> str:
        """The URL by which other processes on this machine reach the store, if they can.

        It is printed, and so has no password.
        """
        if self._url.scheme != "file":
            return self._url.shown
        return f"file:{os.path.abspath(self._url.path)}"

    @property
    def socket_path(self) -> str | None:
        """The socket of a data directory that this process holds."""
        return None if self._socket is None or self._holder is None else str(self._holder.socket)

    async def listen(self, endpoint: str, faults: Faults, counts: CommandCounts) -> None:
        """Answers on the socket of the data directory; its clients see the SQS address, too."""
        if self._announce is not None:
            await self._announce(endpoint)
        if self._holder is None:
            return
        options = {**self._store_options(), "endpoint": endpoint}
        self._socket = StoreSocket(self._holder, self.service, options, faults, counts=counts)
        await self._socket.listen()

    def _store_options(self) -> dict[str, str]:
        archive = self._url.options.get("archive")
        return {
            "durability": self._url.options.get("durability", "sync"),
            "interval_ms": self._url.options.get("interval_ms", "50"),
            "archive": "" if archive is None else os.path.abspath(archive),
        }

    async def close_socket(self) -> None:
        """Answers the requests on the socket, and closes its connections."""
        if self._socket is not None:
            await self._socket.close("penstock serve was stopped")

    async def close(self) -> None:
        """Closes the store; no server uses it any more."""
        await self.service.close()
        if self._holder is not None:
            self._holder.release()


class Running:
    """A server that has started: where it listens, and how to stop it."""

    def __init__(
        self,
        settings: ServerSettings,
        store: OpenedStore,
        endpoint: SqsEndpoint,
        http: HttpServer,
        listener: asyncio.Server,
        broker: CarrotBroker | None = None,
    ) -> None:
        self.settings = settings
        self.broker = broker
        self.store = store
        self.service = store.service
        self.port: int = listener.sockets[0].getsockname()[1]
        self._endpoint = endpoint
        self._http = http
        self._listener = listener
        # Done, with the reason, if the store fails while the server runs.
        self.failed: asyncio.Future[PenstockError] = asyncio.get_running_loop().create_future()
        self.service.on_failure(self._fail)

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

    @property
    def carrot_address(self) -> str | None:
        """The address of the Carrot broker, if there is one."""
        return None if self.broker is None else str(self.broker.address)

    async def stop(self) -> None:
        """Answers the requests that were accepted, ends the waits, and closes the store."""
        self._listener.close()
        self._endpoint.end_waits()
        ending: list[Awaitable[None]] = [self._http.drain(DRAIN_S), self.store.close_socket()]
        if self.broker is not None:
            ending.append(self.broker.stop("penstock serve was stopped"))
        await asyncio.gather(*ending)
        await self._endpoint.close()
        await self.store.close()


async def start(settings: ServerSettings, clock: Clock | None = None) -> Running:
    """Opens the store and listens. Raises PenstockError."""
    if not is_region(settings.region):
        raise InvalidField(
            f"region: {settings.region!r} is not a region's name; use 1 to 40 of a-z 0-9 -, as in "
            "us-east-1"
        )
    tls = _tls(settings)
    home = Owner(settings.account, settings.region)
    faults = Faults()
    counts = CommandCounts()
    asyncio.get_running_loop().set_exception_handler(faults.from_loop)
    async with AsyncExitStack() as undo:
        # Before the store: if the address is in use, a daemon that holds the store must go on.
        http = HttpServer(_refuse, faults)
        listener = await bind_http(http, settings.host, settings.port, tls)
        undo.callback(listener.close)
        carrot = read_carrot(settings, tls)
        store = await _open(settings, clock)
        undo.push_async_callback(store.close)
        service = store.service
        directory = QueueDirectory(home)
        windows = Windows(settings.deleted_window_ms, settings.purged_window_ms)
        # The queues behind sqs:// have an account and region of their own.
        has_notes = read_url(settings.where).scheme != "sqs"
        lookup = QueueLookup(service, directory, windows, has_notes)
        await result_of(service.run(check_notes(lookup, home)))
        store_home(settings.where, home, is_held=isinstance(service, LoopEngine))
        await result_of(service.run(_declare(service, settings)))
        access = Access(directory, "https" if tls else "http", settings.keys, settings.allow_hosts)
        endpoint = SqsEndpoint(lookup, access)
        broker = None if carrot is None else CarrotBroker(service, carrot, faults)
        more: list[FigureSource] = [] if broker is None else [broker.server]
        if isinstance(service, LoopEngine):
            more += reader_figures(service.engine, read_url(settings.where).rest)
        http.answer = _router(service, endpoint, access, faults, counts, more)
        if broker is not None:
            await broker.listen()
            undo.push_async_callback(broker.stop, "penstock serve could not start")
        await listener.start_serving()
        running = Running(settings, store, endpoint, http, listener, broker)
        # Last: when a client can connect here, everything else is ready.
        await store.listen(running.url, faults, counts)
        endpoint.resume()
        undo.pop_all()
    return running


def _refuse(request: Request, connection: HttpConnection) -> bytes | None:
    """The answer before the store is open."""
    return response(503, b"", b"", asyncio.get_running_loop().time())


async def _open(settings: ServerSettings, clock: Clock | None) -> OpenedStore:
    """The store: an engine in this process, or a remote service. Raises PenstockError."""
    url = read_url(settings.where)
    if settings.insecure_other_owner and url.scheme == "file":
        url = url._replace(options={**url.options, "other_owner": "1"})
    if url.scheme == "file" and not url.is_on("daemon") and not url.is_on("embedded"):
        holder = StoreHolder(url.path, SERVE, other_owner=url.is_on("other_owner"))
        loss = {"accept_loss": "1"} if settings.accept_loss else {}
        own = url._replace(options={**url.options, **loss})
        return OpenedStore(url, LoopEngine(holder.take(lambda: open_engine(own, clock))), holder)
    if settings.accept_loss:
        raise InvalidField(
            f"accept_loss: {url.shown!r} is not a data directory that this server opens; accept "
            "the loss where it is opened: penstock check --accept-loss PATH"
        )
    if url.is_in_this_process:
        return OpenedStore(url, LoopEngine(open_engine(url, clock)))
    if url.scheme == "cluster":
        node = await load_backend(url).open_serving_node(url)
        return OpenedStore(url, AwaitedService(node, clock), announce=node.announce)
    shared = clock if SCHEMES[url.scheme].shares_clock else None
    service = await load_backend(url).open_async_service(url, shared)
    return OpenedStore(url, AwaitedService(service, clock))


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
    service: LoopService,
    endpoint: SqsEndpoint,
    access: Access,
    faults: Faults,
    counts: CommandCounts,
    more: Sequence[FigureSource],
) -> Callable[[Request, HttpConnection], bytes | None]:
    """Routes the two pages for operators to `Pages`, and everything else to the endpoint."""
    answer = endpoint.answer
    in_process = isinstance(service, LoopEngine)
    queues_max = QUEUES_MAX if in_process else _REMOTE_QUEUES_MAX
    metrics = Metrics(endpoint.answered, queues_max, faults, counts, more)
    pages = Pages(service, metrics, endpoint.health)

    def route(request: Request, connection: HttpConnection) -> bytes | None:
        # One lookup only, because almost every request is for the endpoint.
        if request.path not in PAGE_PATHS or not pages.is_page(request):
            return answer(request, connection)
        if not access.may_see_pages(request, connection.peer):
            return pages.refusal(403)
        return pages.answer(request, connection)

    return route


async def run(settings: ServerSettings, started: Callable[[Running], None]) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises PenstockError: at the start, or when the store fails later.
    """
    loop = asyncio.get_running_loop()
    stop_requested: asyncio.Future[None] = loop.create_future()
    allow_many_files()
    # The signal handlers come after this: until then a signal ends the process at once, even while
    # it waits for another process to end.
    running = await start(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _resolve, stop_requested)
    collect_garbage_rarely()
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

    open_standard_files()
    uvloop.run(run(settings, started))
