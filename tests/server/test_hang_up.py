"""A server on a terminal stops when the terminal is closed, though SIGHUP makes others reload."""

import os
import pty
import time

from tests.server.conftest import until
from tests.server.sqs.conftest import PENSTOCK, TIMEOUT_S, clean_environment


def test_a_server_stops_when_its_terminal_is_closed(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        words = [str(PENSTOCK), "serve", "--port", "0", "--data", str(tmp_path / "data")]
        os.execve(words[0], words, clean_environment())
    shown = b""
    until_s = time.monotonic() + TIMEOUT_S
    while b"Ctrl-C" not in shown and time.monotonic() < until_s:
        shown += os.read(terminal, 65_536)
    os.close(terminal)
    ended: list[int] = []

    def has_ended():
        found, status = os.waitpid(pid, os.WNOHANG)
        ended.append(status)
        return found == pid

    until(has_ended)
    # It was closed as by a signal to stop, and not ended by SIGHUP.
    assert os.waitstatus_to_exitcode(ended[-1]) == 0
