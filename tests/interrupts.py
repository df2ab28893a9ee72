"""Ctrl-C at every point of a call at which Python can deliver it."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator

PATIENCE_S = 20


def interrupted(call: Callable[[], object], point: int) -> bool:
    """Makes the call with an interrupt at this point of it; false if it has not so many.

    An interrupt comes when a function begins, or when one written in C has returned.
    """
    seen = 0

    def watch(frame, event, arg):
        nonlocal seen
        if event in ("call", "c_return"):
            seen += 1
            if seen == point:
                sys.setprofile(None)
                raise KeyboardInterrupt

    # What is collected meanwhile is no part of the call.
    gc.disable()
    try:
        sys.setprofile(watch)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return False


def points(call: Callable[[], object]) -> Iterator[int]:
    """Makes the call again and again, interrupted at each of its points in turn."""
    point = 1
    while interrupted(call, point):
        yield point
        point += 1


def ends_in_time(what: Callable[[], object]) -> bool:
    """Whether the call ends, by a result or an error, in a thread of its own."""
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()
