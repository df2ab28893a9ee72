"""Keeps a Spark session for the commands of one lake, so that they need not start a JVM each.

The session is a Spark Connect server on loopback, in a process of its own. A command finds it by
files in the user's cache directory, named after the lake and this boot of the machine:

    warm-HASH.json    its address, its token and its process; only the user can read it
    warm-HASH.lock    locked by the process for as long as it runs, so also after a kill -9 the lock
                      says whether it does
    warm-HASH.use     locked, shared, by each command that uses the session; a session that has been
                      idle ends only if it gets this lock for itself

Whoever lacks the token is refused. A command sends it only to a port on which a process of the same
user listens: after a kill -9, another user could have taken the port.
"""

import fcntl
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import InvalidField, UnavailableError
from penstock.files import open_in, read_in, remove_in, write_in
from penstock.spark.java import cache_directory
from penstock.spark.lake import Lake, LakeUnusable
from penstock.spark.session import make_session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_VARIABLE: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
_SERVER: Final = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}
_LISTENS: Final = "0A"
_POLL_S: Final = 0.5
_STOP_S: Final = 30.0
# The locks of the sessions that this process uses; they end with the process.
_uses: Final[list[int]] = []


class WarmUnusable(UnavailableError):
    """No session can be kept for this lake."""


@dataclass(frozen=True)
class WarmSession:
    """A session that is kept."""

    lake: str
    port: int
    token: str
    pid: int
    began_ms: int
    idle_s: float


@dataclass(frozen=True)
class _Files:
    """The files of one lake's session."""

    directory: Path
    name: str

    @classmethod
    def of(cls, lake: Lake) -> "_Files | None":
        cache = cache_directory()
        if cache is None:
            return None
        try:
            boot = _BOOT.read_text()
        except OSError:
            boot = ""
        digest = blake2b(f"{lake.id} {lake.path.resolve()} {boot}".encode(), digest_size=8)
        return cls(cache, f"warm-{digest.hexdigest()}")

    @property
    def note(self) -> Path:
        return self.directory / f"{self.name}.json"

    def lock(self, suffix: str, how: int) -> int | None:
        """A file's lock, as a descriptor; None if others hold it."""
        lock = open_in(self.directory, f"{self.name}.{suffix}", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def read(self) -> WarmSession | None:
        """The session, if its process runs."""
        unheld = self.lock("lock", fcntl.LOCK_SH)
        if unheld is not None:
            os.close(unheld)
            return None
        try:
            return WarmSession(**json.loads(read_in(self.directory, self.note.name)))
        except (OSError, ValueError, TypeError):
            # It is starting, or ending.
            return None

    def write(self, session: WarmSession) -> None:
        """Has commands find the session."""
        data = json.dumps(asdict(session)).encode()
        write_in(self.directory, self.note.name, data, durable=False)

    def remove(self) -> None:
        """Has commands find none; one that has found it opens a session of its own."""
        remove_in(self.directory, self.note.name)


def find_warm(lake: Lake) -> WarmSession | None:
    """The session that is kept for this lake, if there is one."""
    files = _Files.of(lake)
    return None if files is None else files.read()


def use_warm(lake: Lake) -> "SparkSession | None":
    """A session of the server that is kept for this lake; None if there is none that answers.

    It does not end while this process runs.
    """
    files = _Files.of(lake)
    found = None if files is None else files.read()
    if files is None or found is None or _listener(found.port) != os.geteuid():
        return None
    use = files.lock("use", fcntl.LOCK_SH)
    if use is None:
        return None
    try:
        session = make_session(remote=f"sc://localhost:{found.port}/;token={found.token}")
    except UnavailableError:
        os.close(use)
        return None
    _uses.append(use)
    return session


def stop_warm(lake: Lake) -> bool:
    """Ends the session that is kept for this lake, and waits until it has; False if none is."""
    files = _Files.of(lake)
    found = None if files is None else files.read()
    if files is None or found is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(found.pid, signal.SIGTERM)
    ended_s = time.monotonic() + _STOP_S
    ended = threading.Event()
    while files.read() is not None:
        if time.monotonic() > ended_s:
            raise WarmUnusable(f"{lake.path}: process {found.pid} does not end; kill it")
        ended.wait(0.1)
    return True


def keep_warm(
    lake: Lake,
    idle_s: float,
    conf: "Mapping[str, str]",
    ready: "Callable[[WarmSession, SparkSession, threading.Event], None]",
) -> str:
    """Keeps a session until it has been idle for so long, or a signal asks for its end; why it did.

    `ready` is called when commands can use it, with an event that is set by such a signal.
    Raises WarmUnusable if one is kept already, or if there is no safe directory to say so.
    """
    files = _Files.of(lake)
    if files is None:
        raise WarmUnusable(
            "warm: there is no cache directory that only you can write; set XDG_CACHE_HOME to one"
        )
    held = files.lock("lock", fcntl.LOCK_EX)
    if held is None:
        raise WarmUnusable(f"{lake.path}: a session is kept for it already; --stop ends it")
    if set(conf) & set(_SERVER):
        raise InvalidField(f"conf: {min(set(conf) & set(_SERVER))!r} cannot be set for warm")
    token = secrets.token_hex(32)
    files.remove()
    try:
        with _end_requested() as requested:
            # Not a setting: those are arguments of the JVM, which every user of the machine sees.
            os.environ[_TOKEN_VARIABLE] = token
            spark = make_session(conf={**conf, **_SERVER}, archives=True)
            jvm: Any = spark._jvm
            service = jvm.org.apache.spark.sql.connect.service
            port = getattr(getattr(service, "SparkConnectService$"), "MODULE$").localPort()
            began_ms = time.time_ns() // 1_000_000
            kept = WarmSession(str(lake.path), port, token, os.getpid(), began_ms, idle_s)
            files.write(kept)
            ready(kept, spark, requested)
            return _wait(files, lake, kept, spark, service, requested)
    finally:
        files.remove()
        os.close(held)


def _wait(
    files: _Files,
    lake: Lake,
    kept: WarmSession,
    spark: "SparkSession",
    service: Any,
    requested: threading.Event,
) -> str:
    gateway: Any = spark.sparkContext._gateway
    last_s = time.monotonic()
    while not requested.wait(_POLL_S):
        if gateway.proc.poll() is not None:
            return "its JVM ended"
        try:
            lake.check_exists()
        except LakeUnusable:
            return "the lake was removed"
        # In Scala's words: Right has what runs, Left when the last of it ended.
        if service.SparkConnectService.listActiveExecutions().isRight():
            last_s = time.monotonic()
        in_use = files.lock("use", fcntl.LOCK_EX)
        if in_use is None:
            last_s = time.monotonic()
        elif time.monotonic() - last_s >= kept.idle_s:
            files.remove()
            return f"it was idle for {kept.idle_s:g} s"
        else:
            os.close(in_use)
    return "it was asked to"


@contextmanager
def _end_requested() -> Iterator[threading.Event]:
    requested = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: requested.set())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        yield requested
    finally:
        for number, what in before.items():
            signal.signal(number, what)


def _listener(port: int) -> int | None:
    """The user whose process listens on a port of this machine; None if none does."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, user, *_ = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    return int(user)
    return None
