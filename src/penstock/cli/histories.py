"""The history of a message for people: waits while a store reads what was before its opening."""

import time
from typing import Final

from penstock.cli.progress import at_terminal, draw_line
from penstock.client import Queues
from penstock.errors import Overloaded
from penstock.service import HistoryEvent

_WAIT_S_MAX: Final = 600.0
_PAUSE_S: Final = 0.1


def read_history(queues: Queues, message_id: str) -> list[HistoryEvent]:
    """The events of a message; at a terminal, stderr shows how far a long reading is.

    Raises what `Queues.history` raises; Overloaded only after ten minutes.
    """
    give_up_s = time.monotonic() + _WAIT_S_MAX
    is_drawn = False
    while True:
        try:
            found = queues.history(message_id)
        except Overloaded as error:
            if time.monotonic() > give_up_s:
                raise
            if at_terminal():
                draw_line(str(error).partition(";")[0])
                is_drawn = True
            time.sleep(_PAUSE_S)
        else:
            if is_drawn:
                draw_line("")
            return found
