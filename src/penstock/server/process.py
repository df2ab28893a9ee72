"""What every process that serves does to itself once it is up."""

import gc


def look_seldom_for_cycles() -> None:
    """Lets what is there now stay, and the collector look seldom at what comes.

    That is mostly freed by its own count: to look for cycles among tens of thousands of waits, or
    millions of remembered ids, would cost more than all else they do.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
