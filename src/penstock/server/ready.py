"""`--ready-dir`: programs that run once the server answers, as those of a `ready.d` of LocalStack.

Executable files run as they are, other `.sh` files by `sh` and `.py` files by this Python, one
after the other in the order of their names. They find the server and an access key in the
environment, from which every other variable of AWS is removed, so that none of them reaches a real
account. What they print is on stderr, each line behind the name of its program.
"""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Final

from penstock.errors import InvalidField
from penstock.output import report
from penstock.server.lines import READY, READY_FAILED, ServerLines
from penstock.settings import ServerSettings

_RUNNERS: Final = {".sh": ["/bin/sh"], ".py": [sys.executable]}
_LINE_BYTES_MAX: Final = 64 * 1024


def programs_in(directory: str) -> list[Path]:
    """The programs of a directory, in the order of their names. Raises InvalidField."""
    try:
        files = sorted(each for each in Path(directory).iterdir() if each.is_file())
    except OSError as error:
        raise InvalidField(f"ready_dir: cannot read {directory!r}: {error.strerror}") from None
    return [each for each in files if each.suffix in _RUNNERS or os.access(each, os.X_OK)]


def environment(settings: ServerSettings, url: str, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program: those that are given, and how to reach the server."""
    kept = {
        name: value
        for name, value in given.items()
        if name == "AWS_CA_BUNDLE" or not name.startswith(("AWS_", "PENSTOCK_"))
    }
    key, secret = next(iter(settings.keys.items()), ("test", "test"))
    return kept | {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": settings.region,
        "AWS_DEFAULT_REGION": settings.region,
    }


class ReadyPrograms:
    """Runs programs in a thread: a program that fills stderr must not stop the server."""

    def __init__(
        self, programs: Sequence[Path], variables: Mapping[str, str], lines: ServerLines
    ) -> None:
        self._programs = programs
        self._variables = variables
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped = False
        # The names of those that failed, when all have ended.
        self.ended: asyncio.Future[list[str]] = self._loop.create_future()

    def start(self) -> None:
        """Begins to run them."""
        # A daemon thread: one that waits for a reader of stderr does not keep the server.
        threading.Thread(target=self._run, daemon=True, name="penstock-ready").start()

    def stop(self) -> None:
        """Ends the program that runs, with those that it started; no other begins."""
        with self._lock:
            self._stopped = True
            if self._running is not None and self._running.poll() is None:
                with suppress(OSError):
                    os.killpg(self._running.pid, SIGKILL)

    def _run(self) -> None:
        failed: list[str] = []
        for program in self._programs:
            status = self._status_of(program)
            if self._stopped:
                return
            if status != 0:
                failed.append(program.name)
                self._call(self._lines.tell, READY_FAILED, program=program.name, status=status)
        self._call(self._lines.tell, READY, programs=len(self._programs), failed=len(failed))
        self._call(self.ended.set_result, failed)

    def _call(self, function: Callable[..., object], *given: object, **named: object) -> None:
        # The server may have stopped meanwhile, and the loop been closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: function(*given, **named))

    def _status_of(self, program: Path) -> int | str:
        """The exit status of a program that has run, or why it could not be started."""
        runner = [] if os.access(program, os.X_OK) else _RUNNERS[program.suffix]
        with self._lock:
            if self._stopped:
                return 0
            try:
                self._running = process = subprocess.Popen(
                    [*runner, str(program.absolute())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=dict(self._variables),
                    start_new_session=True,
                )
            except OSError as error:
                return error.strerror or "not started"
        assert process.stdout is not None
        with process.stdout as output:
            while line := output.readline(_LINE_BYTES_MAX):
                with suppress(OSError):
                    report(line.decode(errors="replace").rstrip(), program.name)
        return process.wait()
