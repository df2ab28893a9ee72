"""The directory of a node's local copies of its shards.

It is a cache, which the node removes when it stops. A node that is killed leaves it, so each node
that starts removes those that other nodes have left. The lock of a directory shows whether its node
still runs: it ends with the process.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.files import open_directory

# Directories of other names, by versions until 2026, were not locked.
_PREFIX: Final = "penstock-copies-"


class NodeDirectory:
    """A directory that exists until `remove` is called, or the process ends."""

    def __init__(self, path: Path | None = None) -> None:
        """Without `path`, a new one among the temporary files of this machine."""
        if path is not None:
            self.path = path
            self._lock = -1
            return
        remove_left(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            lock = _lock(self.path)
            if lock is not None:
                self._lock = lock
                return
            # Another node took it for one that was left, before it was locked.

    def remove(self) -> None:
        """Removes it with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_left(parent: Path) -> None:
    """Removes the directories of this user's nodes that have ended without doing so."""
    for path in parent.glob(f"{_PREFIX}*"):
        lock = None
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                lock = _lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Locks a directory; None if it is locked, or was removed meanwhile."""
    try:
        lock = open_directory(path, follow=False)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.lstat(path)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
