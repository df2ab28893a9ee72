"""The server of a test run: one process, which all processes of the run share.

The first process that needs it starts it; the others find its address in a file beside. It ends
with the process whose number it was given, that of the whole run, however that ends.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from penstock.output import print_json
from penstock.settings import ServerSettings

# How soon the server notices that the run has ended.
_LOOK_S: Final = 0.5
_ANSWER_S_MAX: Final = 10.0


def shared_url(directory: Path, run_pid: int, start: Callable[[int], str]) -> str:
    """The address of the server whose file is in this directory; it is started if there is none."""
    with (directory / "penstock-server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = directory / "penstock-server"
        # It may have been killed: whoever needs it next starts another one.
        if kept.exists() and _listens(url := kept.read_text()):
            return url
        url = start(run_pid)
        kept.write_text(url)
        return url


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), _ANSWER_S_MAX).close()
    except OSError:
        return False
    return True


def start_server(run_pid: int) -> str:
    """Starts a server that ends with that process; returns its address."""
    command = [sys.executable, "-m", "penstock.testing.serving", str(run_pid)]
    clean = {name: value for name, value in os.environ.items() if name[:9] != "PENSTOCK_"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # Whoever reads the output of the run must not have to wait for the server to end.
        stderr=subprocess.DEVNULL,
        env=clean,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as output:
        line = output.readline()
    # Nobody waits for it: it outlives the process of a parallel run that needed it first.
    process.returncode = 0
    if not line:
        raise RuntimeError(f"the server for tests did not start: run {' '.join(command)}")
    url: str = json.loads(line)
    return url


def main() -> None:
    """Serves until the process of the run has ended."""
    from penstock.server.run import Running, run_until_stopped

    run_pid = int(sys.argv[1])

    def started(running: Running) -> None:
        import asyncio

        print_json(json.dumps(running.url))
        sys.stdout.flush()
        loop = asyncio.get_running_loop()

        def look() -> None:
            try:
                os.kill(run_pid, 0)
            except ProcessLookupError:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                loop.call_later(_LOOK_S, look)

        look()

    run_until_stopped(ServerSettings(store="memory:", port=0, clock="manual"), started)


if __name__ == "__main__":
    main()
