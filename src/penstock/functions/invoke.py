"""Invokes a function: a Python handler in a process of its own, or whatever answers at a URL.

A process runs one invocation at a time, as in Lambda, and is kept for the next one. At the deadline
it is killed. When a Python file below the current directory has changed, new processes are begun.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from penstock.errors import InvalidField

_ANSWER_BYTES_MAX: Final = 6 * 1024 * 1024
_LOAD_S_MAX: Final = 60.0


class FunctionError(Exception):
    """The function raised, did not end in time, or answered with something that is no JSON."""


class LambdaFunction(Protocol):
    """Something that can be invoked, by several threads at a time."""

    timeout_s: float

    def invoke(self, event: Any) -> Any:
        """What the function returns, as JSON. Raises FunctionError."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


class HttpFunction:
    """A function behind a URL: the event is the body of a POST, the answer's body its result."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises InvalidField if the URL cannot be read."""
        try:
            has_host = bool(urlsplit(url).hostname)
        except ValueError:
            has_host = False
        if not has_host or not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidField(f"function: {url!r} is not a URL; use http://HOST:PORT/PATH")
        self.timeout_s = timeout_s
        self._url = url

    def invoke(self, event: Any) -> Any:
        body = json.dumps(event).encode()
        sent = Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with urlopen(sent, timeout=self.timeout_s) as answer:
                text = answer.read(_ANSWER_BYTES_MAX + 1)
        except HTTPError as error:
            with error:
                raise FunctionError(f"{self._url} answered {error.code}") from None
        except TimeoutError:
            raise FunctionError(f"timed out after {self.timeout_s:g} s") from None
        except (URLError, OSError, HTTPException) as error:
            # HTTPException: what answers there speaks no HTTP, or ended within its answer.
            raise FunctionError(f"{self._url}: {error or type(error).__name__}") from None
        if len(text) > _ANSWER_BYTES_MAX:
            raise FunctionError(f"{self._url} answered more than {_ANSWER_BYTES_MAX} bytes")
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise FunctionError(f"{self._url} answered with something that is no JSON") from None

    def close(self) -> None:
        pass


class PythonFunction:
    """A handler `module:name` of Python, in as many processes as it has invocations at a time."""

    def __init__(self, name: str, timeout_s: float, *, directory: str | Path = ".") -> None:
        """Raises InvalidField if it cannot be loaded."""
        self.timeout_s = timeout_s
        self._name = name
        self._directory = Path(directory).absolute()
        self._idle: list[FunctionProcess] = []
        self._lock = threading.Lock()
        self._source = self._sources()
        try:
            self._idle.append(self._begin())
        except FunctionError as error:
            raise InvalidField(f"function: {error}") from None

    def invoke(self, event: Any) -> Any:
        process = self._idle_or_new()
        try:
            result = process.invoke(event, self._name, self.timeout_s)
        except _HandlerRaised as raised:
            self._give_back(process)
            raise FunctionError(str(raised)) from None
        except BaseException:
            process.close()
            raise
        self._give_back(process)
        return result

    def _sources(self) -> float:
        """When a Python file below the directory was changed last."""
        times = [0.0]
        for path, directories, files in os.walk(self._directory):
            directories[:] = [each for each in directories if not each.startswith((".", "__"))]
            for name in files:
                if name.endswith(".py"):
                    try:
                        times.append(os.stat(os.path.join(path, name)).st_mtime)
                    except OSError:
                        # It was removed meanwhile.
                        continue
        return max(times)

    def _idle_or_new(self) -> "FunctionProcess":
        source = self._sources()
        with self._lock:
            if source != self._source:
                self._source = source
                changed, self._idle = self._idle, []
                for each in changed:
                    each.close()
            if self._idle:
                return self._idle.pop()
        return self._begin()

    def _give_back(self, process: "FunctionProcess") -> None:
        with self._lock:
            if process.source == self._source:
                self._idle.append(process)
                return
        process.close()

    def _begin(self) -> "FunctionProcess":
        return FunctionProcess(self._name, self._directory, self._source)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()


class _HandlerRaised(Exception):
    pass


class _Invocation(NamedTuple):
    id: str
    name: str
    arn: str
    timeout_s: float
    event: Any


class FunctionProcess:
    """One process that runs a handler, one invocation after another."""

    def __init__(self, name: str, directory: Path, source: float) -> None:
        """Raises FunctionError if the handler cannot be loaded."""
        self.source = source
        reads, self._writes = os.pipe()
        self._reads, writes = os.pipe()
        command = [sys.executable, "-m", "penstock.functions.runner", name, str(reads), str(writes)]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                pass_fds=(reads, writes),
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the mapping, which ends after the invocations that are under way.
                start_new_session=True,
            )
        finally:
            os.close(reads)
            os.close(writes)
        self._unread = b""
        try:
            found = self._answer(time.monotonic() + _LOAD_S_MAX, _LOAD_S_MAX)
            if "error" in found:
                raise FunctionError(found["error"])
        except BaseException:
            self.close()
            raise

    def invoke(self, event: Any, name: str, timeout_s: float) -> Any:
        """What the handler returns. Raises FunctionError; the process is then of no more use."""
        short = name.replace(":", ".").rpartition(".")[0] or name
        arn = f"arn:aws:lambda:us-east-1:000000000000:function:{short}"
        asked = _Invocation(str(uuid.uuid4()), short, arn, timeout_s, event)
        line = memoryview(json.dumps(asked._asdict()).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._writes, line) :]
        except BrokenPipeError:
            raise FunctionError(self._ended()) from None
        found = self._answer(time.monotonic() + timeout_s, timeout_s)
        if "error" in found:
            raise _HandlerRaised(found["error"])
        return found["result"]

    def _answer(self, deadline_s: float, timeout_s: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._reads], [], [], left_s)[0]:
                raise FunctionError(f"timed out after {timeout_s:g} s")
            piece = os.read(self._reads, 65_536)
            if not piece:
                raise FunctionError(self._ended())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _ended(self) -> str:
        return f"its process ended with status {self._process.wait()}"

    def close(self) -> None:
        """Ends the process, whatever it does."""
        for each in (self._reads, self._writes):
            os.close(each)
        self._process.kill()
        self._process.wait()
