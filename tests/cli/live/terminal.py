"""A program in a real terminal of tmux: what is typed into it, and what its screen shows."""

import os
import re
import shlex
import subprocess
import threading
import time
from pathlib import Path

TIMEOUT_S = 60


class TmuxTerminal:
    """One terminal of so many columns and lines; a context, at whose end its program is ended."""

    def __init__(self, path: Path, words: list[str], columns: int = 80, lines: int = 24) -> None:
        self._tmux = ["tmux", "-u", "-f", os.devnull, "-S", str(path / "tmux")]
        command = shlex.join(words)
        # What the program leaves stays on the screen, with its exit status.
        shell = f"{command}; status=$?; echo; echo ended with $status; read -r _"
        self._do("new-session", "-d", "-x", str(columns), "-y", str(lines), shell)

    def _do(self, *words: str) -> str:
        done = subprocess.run(
            [*self._tmux, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        """Types keys, by the names that tmux has for them, or text."""
        self._do("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        """Changes the size of the terminal."""
        self._do("resize-window", "-x", str(columns), "-y", str(lines))

    def screen(self) -> str:
        """What is on the screen, as text."""
        return self._do("capture-pane", "-p")

    def wait_for(self, pattern: str) -> str:
        """The screen, once it has this pattern on it."""
        until_s = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, screen := self.screen(), re.MULTILINE):
            assert time.monotonic() < until_s, f"{pattern!r} is not on the screen:\n{screen}"
            threading.Event().wait(0.1)
        return screen

    def __enter__(self) -> "TmuxTerminal":
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, timeout=60, check=False)
