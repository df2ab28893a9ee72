"""Resources that the child of a fork must replace: connections, files and locks of its parent."""

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """An object whose connection or files parent and child would share after a fork."""

    def start_over(self) -> None:
        """Called in the child: drops what belongs to the parent.

        No other thread runs in the child, and a lock may be held by one that no longer exists.
        """
        ...


_known: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def start_over_when_forked(holder: Forkable) -> None:
    """Calls `holder.start_over` in every child that this process forks while the holder exists."""
    _known.add(holder)


def _after_fork() -> None:
    for holder in list(_known):
        holder.start_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
