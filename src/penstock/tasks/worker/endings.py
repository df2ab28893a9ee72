"""How a process has ended, for people."""

import signal
from contextlib import suppress


def ending_of(code: int) -> str:
    """The return code of a process in words: `status 3`, `SIGKILL`, `signal 35`."""
    if code >= 0:
        return f"status {code}"
    # Signals for real time have no names.
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
