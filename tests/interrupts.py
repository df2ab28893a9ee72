"""Ctrl-C at every point of a call at which Python can deliver it."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator

TIMEOUT_S = 60


def interrupted(call: Callable[[], object], point: int) -> bool:
    """Raises KeyboardInterrupt at this point of the call; returns False if it has fewer points.

    A point is where a function begins, or where one written in C has returned. Python ignores what
    is raised while it closes a generator that is no longer used; the call then goes on.
    """
    seen = 0

    def watch(frame, event, arg):
        nonlocal seen
        if event in ("call", "c_return"):
            seen += 1
            if seen == point:
                sys.setprofile(None)
                raise KeyboardInterrupt

    # Finalisers that the collector would run are not part of the call.
    gc.disable()
    try:
        sys.setprofile(watch)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen >= point


def points(call: Callable[[], object]) -> Iterator[int]:
    """Repeats the call, interrupted at each of its points in turn; yields the point."""
    point = 1
    while interrupted(call, point):
        yield point
        point += 1


def ends_in_time(call: Callable[[], object]) -> bool:
    """Whether the call, in a thread of its own, returns or raises within the time limit."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return not thread.is_alive()
