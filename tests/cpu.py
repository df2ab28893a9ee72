"""How much of a processor's time something takes, whatever else the machine does."""

import time
from collections.abc import Callable
from contextlib import suppress

ROUNDS = 5


def least_cpu_s(call: Callable[[], object], *errors: type[Exception]) -> float:
    """The least time a call took in a few rounds; it may raise one of these errors."""
    least_s = float("inf")
    for _ in range(ROUNDS):
        began_s = time.process_time()
        with suppress(*errors):
            call()
        least_s = min(least_s, time.process_time() - began_s)
    return least_s
