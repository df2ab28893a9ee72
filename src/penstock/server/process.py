"""What every serving process sets for itself: its limit of open files, its garbage collector."""

import gc
import resource
from contextlib import suppress
from typing import Final

FILES_MAX: Final = 65_536


def allow_many_files() -> None:
    """Raises the limit of open files, and so of connections, to the hard limit or 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def look_seldom_for_cycles() -> None:
    """Lets what is there now stay, and the collector look seldom at what comes.

    That is mostly freed by its own count: to look for cycles among tens of thousands of waits, or
    millions of remembered ids, would cost more than all else they do.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
