"""`mirror:?primary=file:PATH&mirror=URL`: a store, and a thread that mirrors it to another service.

Commands are executed on the primary; the mirror follows its journal. `name=NAME` is the mirror's
name, needed if a store has several; `moved=1` says that the mirror's service has a new address. In
the URL of the mirror, a `&` is written as `%26`.
"""

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple, TypeVar

from penstock.backends.mirror.follow import MirrorFollower, MirrorProgress
from penstock.backends.mirror.state import check_primary, target_of
from penstock.clock import Clock
from penstock.errors import InvalidField, PenstockError, UnavailableError
from penstock.journal.reader_positions import check_reader_name
from penstock.output import logger
from penstock.service import AsyncQueueService, Command, QueueService
from penstock.url import BackendUrl, load_backend, read_url

R = TypeVar("R")
NAME: Final = "mirror"
_REOPEN_S: Final = 1.0
_logger: Final = logger("penstock.mirror")


class MirrorStopped(Exception):
    """Raised in the mirror's thread to end it."""


class MirrorThread:
    """A thread that mirrors a store until it is stopped.

    While the mirror's service cannot be reached, it tries again. Any other error ends it, and is
    then in `failure`.
    """

    def __init__(
        self,
        path: str,
        mirror: BackendUrl,
        name: str = NAME,
        *,
        has_moved: bool = False,
        is_logged: bool = False,
    ) -> None:
        """With `is_logged`, an error that ends it is logged: no caller waits for it."""
        self.failure: PenstockError | None = None
        self._path = path
        self._mirror = mirror
        self._name = name
        self._has_moved = has_moved
        self._is_logged = is_logged
        self._stopping = threading.Event()
        self._follower: MirrorFollower | None = None
        self._waiting_for: PenstockError | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-mirror", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        follower: MirrorFollower | None = None
        try:
            follower = MirrorFollower(
                self._path,
                self._open(),
                self._name,
                self.pause,
                target=target_of(self._mirror),
                has_moved=self._has_moved,
            )
            follower.start()
            self._follower = follower
            follower.run()
        except MirrorStopped:
            pass
        except PenstockError as error:
            self.failure = error
            if self._is_logged:
                _logger.error("the mirror %s of %s has ended: %s", self._name, self._path, error)
        finally:
            if follower is not None:
                follower.close()

    def _open(self) -> QueueService:
        while True:
            try:
                service: QueueService = load_backend(self._mirror).open_service(self._mirror, None)
            except UnavailableError as error:
                if self._waiting_for is None and self._is_logged:
                    _logger.warning(
                        "the mirror %s of %s cannot reach its service, and goes on when it can: %s",
                        self._name,
                        self._path,
                        error,
                    )
                self._waiting_for = error
                self.pause(_REOPEN_S)
            else:
                self._waiting_for = None
                return service

    def pause(self, seconds: float) -> None:
        """Waits. Raises MirrorStopped if `stop` was called."""
        if self._stopping.wait(seconds):
            raise MirrorStopped

    @property
    def progress(self) -> MirrorProgress | None:
        """The mirror's progress; None during the first copy, or while it cannot connect."""
        follower = self._follower
        if follower is None:
            return None
        progress = follower.progress
        return progress if self.failure is None else progress._replace(error=str(self.failure))

    @property
    def error(self) -> PenstockError | None:
        """The error because of which the mirror waits or has ended; None if it runs."""
        return self.failure or self._waiting_for

    def stop(self) -> None:
        """Ends the mirror after its current step."""
        self._stopping.set()
        self._thread.join()


class MirrorService:
    """The `QueueService` of the primary, and the thread that mirrors it."""

    LACKS: ClassVar[Mapping[str, str]] = {}

    def __init__(self, primary: QueueService, mirror: MirrorThread) -> None:
        vars(self)["LACKS"] = primary.LACKS
        self.redrive_max = primary.redrive_max
        self.mirror = mirror
        self._primary = primary

    def execute(self, command: Command[R]) -> R:
        """Executes the command on the primary."""
        return self._primary.execute(command)

    def close(self) -> None:
        """Stops the mirror, whose backlog stays in the journal, and closes the primary."""
        self.mirror.stop()
        self._primary.close()


class AsyncMirrorService:
    """The same for asyncio callers."""

    LACKS: ClassVar[Mapping[str, str]] = {}

    def __init__(self, primary: AsyncQueueService, mirror: MirrorThread) -> None:
        vars(self)["LACKS"] = primary.LACKS
        self.redrive_max = primary.redrive_max
        self.mirror = mirror
        self._primary = primary

    async def execute(self, command: Command[R]) -> R:
        """Executes the command on the primary."""
        return await self._primary.execute(command)

    async def close(self) -> None:
        """Stops the mirror, whose backlog stays in the journal, and closes the primary."""
        await asyncio.get_running_loop().run_in_executor(None, self.mirror.stop)
        await self._primary.close()


class MirrorOptions(NamedTuple):
    """The parts of a `mirror:` URL."""

    primary: BackendUrl
    mirror: BackendUrl
    name: str
    has_moved: bool

    def start(self) -> MirrorThread:
        """Starts to mirror the primary."""
        return MirrorThread(
            self.primary.path,
            self.mirror,
            self.name,
            has_moved=self.has_moved,
            is_logged=True,
        )


def read_mirror(url: BackendUrl) -> MirrorOptions:
    """Reads a `mirror:` URL. Raises InvalidField or MissingExtra."""
    url.check_options({"primary", "mirror", "name", "moved"})
    if url.rest or not {"primary", "mirror"} <= url.options.keys():
        raise InvalidField(
            f"url: {url.shown!r} is not of the form mirror:?primary=file:PATH&mirror=URL"
        )
    check_primary(url.options["primary"])
    primary, mirror = read_url(url.options["primary"]), read_url(url.options["mirror"])
    check_mirror(primary, mirror)
    name = url.options.get("name", NAME)
    check_reader_name(name)
    return MirrorOptions(primary, mirror, name, url.is_on("moved"))


def check_mirror(primary: BackendUrl, mirror: BackendUrl) -> None:
    """Checks that the primary and the mirror can be a pair. Raises InvalidField or MissingExtra."""
    if mirror.scheme == "mirror":
        raise InvalidField(
            f"mirror: {mirror.shown!r} is a mirror itself; name the service behind it"
        )
    if mirror.scheme == "memory":
        raise InvalidField(
            f"mirror: {mirror.shown!r} loses its messages with this process; name a service that "
            "keeps them"
        )
    if mirror.scheme == "file" and os.path.realpath(mirror.path) == os.path.realpath(primary.path):
        raise InvalidField(f"mirror: {mirror.shown!r} is the primary itself")
    load_backend(mirror)


def open_service(url: BackendUrl, clock: Clock | None) -> QueueService:
    """The primary with its mirror. Raises InvalidField, or why the primary cannot be opened."""
    options = read_mirror(url)
    primary = options.primary
    opened: QueueService = load_backend(primary).open_service(primary, clock)
    return MirrorService(opened, options.start())


async def open_async_service(url: BackendUrl, clock: Clock | None) -> AsyncQueueService:
    """The same for asyncio."""
    options = read_mirror(url)
    primary = options.primary
    opened: AsyncQueueService = await load_backend(primary).open_async_service(primary, clock)
    return AsyncMirrorService(opened, options.start())
