"""Settings of every serving process: standard files, limit of open files, garbage collector."""

import gc
import os
import resource
from contextlib import suppress
from typing import Final

FILES_MAX: Final = 65_536


def open_standard_files() -> None:
    """Opens /dev/null for each of the standard files that the process was started without.

    Otherwise a socket gets the number of one of them, and when it is closed, an assertion in uvloop
    ends the process.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def allow_many_files() -> None:
    """Raises the limit of open files, and so of connections, to the hard limit or 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def collect_garbage_rarely() -> None:
    """Freezes the existing objects and lowers the frequency of garbage collection.

    Almost all objects are freed by their reference count. Searching tens of thousands of waits, or
    millions of dedup ids, for cycles would cost more than the requests themselves.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
