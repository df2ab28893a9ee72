"""What a process holds that the child of a fork must not go on using as if it were its own."""

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that a fork doubles, though the connection or the files behind it are one."""

    def start_over(self) -> None:
        """In the child: lets go of what is the parent's. Nobody else runs; locks may be taken."""
        ...


_known: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def start_over_when_forked(holder: Forkable) -> None:
    """Has the holder start over in every child that this process forks while the holder lives."""
    _known.add(holder)


def _after_fork() -> None:
    for holder in list(_known):
        holder.start_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
