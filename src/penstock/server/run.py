"""Runs an SQS server: opens the store, creates the declared queues, listens, and stops.

The store is any URL that `penstock.connect` takes. `memory:` and `file:PATH` are opened in this
process, which then answers on the data directory's socket, too, unless the URL says `embedded=1`.
`cluster:nats://…` makes this process a node of the cluster. `file:PATH?daemon=1`, and every URL of
another scheme, is reached through its backend.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock import __version__
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.engine.open import open_engine
from penstock.backends.loop import AwaitedService, LoopService, Steps, result_of
from penstock.backends.remote.daemon import SERVE
from penstock.clock import Clock
from penstock.errors import InvalidField, PenstockError, QueueExists, RequestError
from penstock.public import to_settings
from penstock.server.carrot.broker import CarrotBroker, read_carrot
from penstock.server.console.pages import PREFIX, Console
from penstock.server.console.status import Status
from penstock.server.console.visitor import Visitors
from penstock.server.faults import Faults
from penstock.server.frames.counts import CommandCounts
from penstock.server.holder import StoreHolder
from penstock.server.http import HttpConnection, HttpServer, Request, response
from penstock.server.journal_figures import journal_figures
from penstock.server.lines import STARTED, STOPPED, STOPPING, ServerLines
from penstock.server.metrics import QUEUES_MAX, FigureSource, Metrics
from penstock.server.pages import Pages, bind_http
from penstock.server.process import allow_many_files, collect_garbage_rarely, open_standard_files
from penstock.server.reader_watch import ReaderWatch
from penstock.server.ready import ReadyPrograms, environment, programs_in
from penstock.server.reload import Reloader, StartingTerminal
from penstock.server.sqs.access import Access
from penstock.server.sqs.endpoint import SqsEndpoint, open_endpoint
from penstock.server.sqs.home import check_notes, store_home
from penstock.server.sqs.lookup import QueueLookup, Windows
from penstock.server.store_socket import StoreSocket
from penstock.server.tls import ServerTls
from penstock.service import ConfigureQueue, CreateQueue, DescribeQueue, QueueInfo
from penstock.settings import ServerSettings
from penstock.url import SCHEMES, BackendUrl, load_backend, read_url
from penstock.wire.sqs.address import Owner, QueueDirectory, is_region
from penstock.wire.sqs.attributes import IN_FLIGHT_MAX

if TYPE_CHECKING:
    from penstock.server.testing.accounts import TestedAccounts

Answer = Callable[[Request, HttpConnection], bytes | None]
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
        console: Console,
        broker: CarrotBroker | None,
        reloader: Reloader,
        watch: ReaderWatch | None,
        tested: "TestedAccounts | None" = None,
    ) -> None:
        self._tested = tested
        self.settings = settings
        self.lines = http.lines
        self.reload = reloader.reload
        self._watch = watch
        self.broker = broker
        self._console = console
        self.store = store
        self.service = store.service
        self.status = console.status
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
        if self._watch is not None:
            self._watch.stop()
        self._endpoint.end_waits()
        if self._tested is not None:
            self._tested.end_waits()
        await self._console.close()
        ending: list[Awaitable[None]] = [self._http.drain(DRAIN_S), self.store.close_socket()]
        if self.broker is not None:
            ending.append(self.broker.stop("penstock serve was stopped"))
        await asyncio.gather(*ending)
        if self._tested is not None:
            await self._tested.close()
        await self._endpoint.close()
        await self.store.close()


async def start(
    settings: ServerSettings,
    clock: Clock | None = None,
    read: Callable[[], ServerSettings] | None = None,
) -> Running:
    """Opens the store and listens; `read` reads the settings anew. Raises PenstockError."""
    tls = _tls(settings)
    home = _home(settings)
    faults = Faults()
    counts = CommandCounts()
    asyncio.get_running_loop().set_exception_handler(faults.from_loop)
    async with AsyncExitStack() as undo:
        # Before the store: if the address is in use, a daemon that holds the store must go on.
        lines = ServerLines()
        http = HttpServer(_refuse, faults, lines)
        listener = await bind_http(http, settings.host, settings.port, tls)
        undo.callback(listener.close)
        carrot = read_carrot(settings, tls)
        scheme = "https" if tls else "http"
        tested = _accounts(settings, scheme, lines) if settings.is_for_tests else None
        if tested is None:
            store = await _open(settings, clock)
            lookup = _lookup(store.service, settings, home)
        else:
            undo.push_async_callback(tested.close)
            store = OpenedStore(read_url(settings.where), tested.home.service)
            lookup = tested.home.lookup
        undo.push_async_callback(store.close)
        service = store.service
        await result_of(service.run(check_notes(lookup, home)))
        store_home(settings.where, home, is_held=isinstance(service, LoopEngine))
        await result_of(service.run(_declare(service, settings)))
        if tested is None:
            access, endpoint = open_endpoint(lookup, settings, scheme, lines)
        else:
            access, endpoint = tested.home.access, tested.home.endpoint
        broker = None if carrot is None else CarrotBroker(service, carrot, faults)
        more: list[FigureSource] = [] if broker is None else [broker.server]
        watch = None
        if isinstance(service, LoopEngine):
            directory_path = read_url(settings.where).rest
            engine = service.engine
            more += journal_figures(engine.journal, directory_path, lambda: engine.upkeep_failed)
            watch = ReaderWatch.of(engine.journal, directory_path, lines)
        visitors = Visitors(access, settings.keys, scheme, on_loopback=settings.on_loopback)
        console = _console(store, visitors, settings)
        undo.push_async_callback(console.close)
        answer = endpoint.answer if tested is None else tested.answer
        http.answer = answer
        http.route = _router(service, endpoint, answer, console, access, faults, counts, more)
        if tested is not None:
            http.route = _with_control(http.route, tested)
        if broker is not None:
            await broker.listen()
            undo.push_async_callback(broker.stop, "penstock serve could not start")
        await listener.start_serving()
        signed = access if tested is None else tested
        users = [signed.use_keys, visitors.use_keys]
        reloader = Reloader(settings, read or (lambda: settings), tls, users, lines)
        running = Running(
            settings, store, endpoint, http, listener, console, broker, reloader, watch, tested
        )
        # Last: when a client can connect here, everything else is ready.
        await store.listen(running.url, faults, counts)
        endpoint.resume()
        if watch is not None:
            watch.start()
        undo.pop_all()
    return running


def _home(settings: ServerSettings) -> Owner:
    """Whose queues have bare names. Raises InvalidField."""
    if not is_region(settings.region):
        raise InvalidField(
            f"region: {settings.region!r} is not a region's name; use 1 to 40 of a-z 0-9 -, as in "
            "us-east-1"
        )
    return Owner(settings.account, settings.region)


def _lookup(service: LoopService, settings: ServerSettings, home: Owner) -> QueueLookup:
    windows = Windows(settings.deleted_window_ms, settings.purged_window_ms)
    # The queues behind sqs:// have an account and region of their own.
    has_notes = read_url(settings.where).scheme != "sqs"
    directory = QueueDirectory(home)
    return QueueLookup(service, directory, windows, has_notes, settings.strict_receipts)


def _accounts(settings: ServerSettings, scheme: str, lines: ServerLines) -> "TestedAccounts":
    # Imported here: other servers need nothing of it.
    from penstock.server.testing.accounts import TestedAccounts

    return TestedAccounts(settings, scheme, lines)


def _with_control(answer: Answer, tested: "TestedAccounts") -> Answer:
    """Routes the control interface to its pages, and all else as before."""
    from penstock.server.testing.control import PREFIX as CONTROL
    from penstock.server.testing.control import ControlPages

    control = ControlPages(tested)

    def route(request: Request, connection: HttpConnection) -> bytes | None:
        if request.path.startswith(CONTROL):
            return control.answer(request, connection)
        return answer(request, connection)

    return route


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
                if "annotations" in changes:
                    # Of the others some are notes of this server, such as a queue's policy.
                    info: QueueInfo = yield DescribeQueue(name)
                    changes["annotations"] = info.settings.annotations | changes["annotations"]
                yield ConfigureQueue(name, changes)
        except RequestError as error:
            raise InvalidField(f"queues.{name}: {error}") from None


def _tls(settings: ServerSettings) -> ServerTls | None:
    if settings.tls_cert is None:
        return None
    return ServerTls(settings.tls_cert, settings.tls_key or settings.tls_cert)


def _router(
    service: LoopService,
    endpoint: SqsEndpoint,
    answer: Answer,
    console: Console,
    access: Access,
    faults: Faults,
    counts: CommandCounts,
    more: Sequence[FigureSource],
) -> Answer:
    """Routes the pages for people and monitors to theirs, and everything else to the endpoint."""
    in_process = isinstance(service, LoopEngine)
    queues_max = QUEUES_MAX if in_process else _REMOTE_QUEUES_MAX
    metrics = Metrics(endpoint.answered, queues_max, faults, counts, more, endpoint.times)
    pages = Pages(service, metrics, endpoint.health, answers_sqs=True)

    def route(request: Request, connection: HttpConnection) -> bytes | None:
        # Little is asked before this, because almost every request is for the endpoint.
        path = request.path
        if request.method == "POST" and (path == "/" or not path.startswith(PREFIX)):
            return answer(request, connection)
        if console.takes(request):
            return console.answer(request, connection)
        if not pages.is_page(request):
            return answer(request, connection)
        if not access.may_see_pages(request, connection.peer):
            return pages.refusal(403)
        return pages.answer(request, connection)

    return route


def _console(store: OpenedStore, visitors: Visitors, settings: ServerSettings) -> Console:
    """The console, with the status of the store's queues, which begins to be read."""
    in_process = isinstance(store.service, LoopEngine)
    queues_max = QUEUES_MAX if in_process else _REMOTE_QUEUES_MAX
    status = Status(store.service, in_process=in_process, queues_max=queues_max)
    about = {
        "store": store.url,
        "durability": settings.durability if settings.store is None else None,
        "region": settings.region,
        "account": settings.account,
        "mask": settings.mask_messages,
        "kill_button": settings.kill_button,
    }
    status.start()
    return Console(store.service, status, visitors, about, _cluster_status(settings))


def _cluster_status(settings: ServerSettings) -> Callable[[], Coroutine[Any, Any, Any]] | None:
    """A function that reads the status of the cluster of which this server is a node."""
    url = read_url(settings.where)
    if url.scheme != "cluster":
        return None

    async def read() -> Any:
        # Imported here: other stores need nothing of it.
        from penstock.cluster.address import read_address
        from penstock.cluster.operations import operate

        return await operate(read_address(url), lambda operator: operator.status())

    return read


async def run(
    settings: ServerSettings,
    started: Callable[[Running], None],
    read: Callable[[], ServerSettings] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; at SIGHUP keys and certificates are read again.

    Raises PenstockError: at the start, or when the store fails later.
    """
    loop = asyncio.get_running_loop()
    stop_requested: asyncio.Future[None] = loop.create_future()
    allow_many_files()
    programs = [] if settings.ready_dir is None else programs_in(settings.ready_dir)
    # The signal handlers come after this: until then a signal ends the process at once, even while
    # it waits for another process to end.
    running = await start(settings, read=read)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _resolve, stop_requested)
    terminal = StartingTerminal()

    def hang_up() -> None:
        if terminal.is_gone():
            _resolve(stop_requested)
        else:
            running.reload()

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    collect_garbage_rarely()
    lines = running.lines
    lines.tell(
        STARTED,
        version=__version__,
        url=running.url,
        store=running.store.url,
        keys=len(settings.keys),
        pid=os.getpid(),
    )
    started(running)
    ready = ReadyPrograms(programs, environment(settings, running.url, os.environ), lines)
    if settings.ready_dir is not None:
        ready.start()
    if settings.ready_strict:
        ready.ended.add_done_callback(partial(_end_if_failed, running))
    either: list[asyncio.Future[Any]] = [stop_requested, running.failed]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    ready.stop()
    failure = running.failed.result() if running.failed.done() else None
    lines.tell(STOPPING, reason="signal" if failure is None else type(failure).__name__)
    await running.stop()
    lines.tell(STOPPED, pid=os.getpid())
    if running.failed.done():
        raise running.failed.result()


def _end_if_failed(running: Running, ended: "asyncio.Future[list[str]]") -> None:
    """Ends the server as its store's failure does, if a program of `--ready-dir` failed."""
    if not ended.cancelled() and ended.result() and not running.failed.done():
        names = ", ".join(ended.result())
        running.failed.set_result(InvalidField(f"ready_dir: failed: {names}"))


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def run_until_stopped(
    settings: ServerSettings,
    started: Callable[[Running], None],
    read: Callable[[], ServerSettings] | None = None,
) -> None:
    """The same, for a caller who has no event loop."""
    import uvloop

    open_standard_files()
    uvloop.run(run(settings, started, read))
