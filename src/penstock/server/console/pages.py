"""The console on the port of `penstock serve`: its files, what its pages read, and their changes.

    /, /console                  the page, for a browser
    /console/static/NAME         its modules and styles
    /console/api/NAME            what it reads and changes, as JSON
    /console/api/events          changes of queues as they happen

The page is the same for everybody and holds nothing; who may read is decided by `visitor`, on every
request. Names, bodies and all other texts leave as JSON strings only, and the page's policy allows
no script but its own files.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

import msgspec

import penstock
from penstock import drawing
from penstock.backends.loop import LoopService, Pending, Steps
from penstock.errors import PenstockError, RequestError
from penstock.output import report
from penstock.server.console.actions import Action, Actions, Performed
from penstock.server.console.reads import Reads
from penstock.server.console.status import Status
from penstock.server.console.streams import Streams
from penstock.server.console.visitor import Refused, Visitor, Visitors
from penstock.server.http import HttpConnection, Request, response

if TYPE_CHECKING:
    from penstock.server.console.tasks import TaskViews

PREFIX: Final = "/console/"
_API: Final = "/console/api/"
_STATIC: Final = "/console/static/"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_SAFE: Final = (
    b"Content-Security-Policy: default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    b"form-action 'none'; object-src 'none'\r\n"
    b"X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n"
    b"Referrer-Policy: no-referrer\r\nCross-Origin-Opener-Policy: same-origin\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\n"
)
_NO_STORE: Final = b"Cache-Control: no-store\r\n"
_JSON: Final = b"Content-Type: application/json\r\n"
_encode: Final = msgspec.json.Encoder().encode


def _files() -> dict[str, bytes]:
    """The responses for the static files, without their first lines, by path."""
    found = {}
    own = Path(__file__).with_name("static")
    for path in [*own.iterdir(), *drawing.FILES.values()]:
        kind = _TYPES.get(path.suffix)
        if kind is not None:
            found[_STATIC + path.name] = path
    found["/"] = found["/console"] = found[PREFIX] = own / "index.html"
    return {
        name: f"Content-Type: {_TYPES[path.suffix]}\r\nCache-Control: no-cache\r\n".encode()
        + _SAFE
        + b"\r\n"
        + path.read_bytes()
        for name, path in found.items()
    }


class Console:
    """Answers the console's requests, about one service."""

    def __init__(
        self,
        service: LoopService,
        status: Status,
        visitors: Visitors,
        about: dict[str, Any],
        cluster: Callable[[], Coroutine[Any, Any, Any]] | None = None,
    ) -> None:
        """`about` is what the page shows of the server, such as its store.

        `cluster` reads the status of the cluster that the server is a node of.
        """
        self._service = service
        self.status = status
        self._visitors = visitors
        self._cluster = cluster
        # The status of the cluster that is being read: pages that ask meanwhile share it.
        self._cluster_status: asyncio.Task[Any] | None = None
        self._about = {**about, "version": penstock.__version__}
        self._loop = asyncio.get_running_loop()
        self._files = _files()
        self.streams = Streams(status)
        self._actions = Actions(service).by_name
        self._actions |= {
            "retry-tasks": lambda given, who: self._tasks.retry(given, who),
            "cancel-task": lambda given, who: self._tasks.cancel(given, who),
        }
        if about["kill_button"]:
            self._actions["kill-server"] = self._kill
        self._reads = Reads(service, status, mask=about["mask"])

    @cached_property
    def _tasks(self) -> "TaskViews":
        # Imported here: a server starts without the modules for tasks.
        from penstock.server.console.tasks import TaskViews

        return TaskViews(self._service, self.status, mask=self._about["mask"])

    def takes(self, request: Request) -> bool:
        """Whether the request is for the console: a browser's, or one to its own paths."""
        path = request.path
        if path.startswith(PREFIX) or path == "/console":
            return True
        if path != "/" or request.method != "GET" or request.query:
            return False
        headers = request.headers
        return "authorization" not in headers and "text/html" in headers.get("accept", "")

    def answer(self, request: Request, connection: HttpConnection) -> bytes | None:
        """The response, or None if it is sent on the connection later."""
        try:
            if request.path.startswith(_API):
                return self._answer_api(request, connection)
            if request.method != "GET":
                raise Refused(405, "The console's pages can only be read.")
            file = self._files.get(request.path)
            if file is None:
                raise Refused(404, "The console has no such page.")
            if request.path.startswith(_STATIC):
                self._visitors.check_same_origin(request)
            else:
                self._visitors.check_page(request)
        except Refused as refused:
            return self._refusal(refused)
        head, _, body = file.partition(b"\r\n\r\n")
        return response(200, head + b"\r\n", body, self._loop.time())

    def _answer_api(self, request: Request, connection: HttpConnection) -> bytes | None:
        name = request.path[len(_API) :]
        if request.method == "POST":
            self._visitors.check_change(request)
        elif request.method == "GET":
            self._visitors.check_same_origin(request)
        else:
            raise Refused(405, "Use GET or POST.")
        visitor = self._visitors.visitor(request, connection.peer)
        if request.method == "POST":
            return self._change(name, request, visitor, connection)
        if not visitor.may_look and name != "session":
            raise Refused(403, "Sign in with one of the server's keys.")
        given = dict(parse_qsl(request.query, keep_blank_values=True, max_num_fields=20))
        if name == "events":
            if not self.streams.open(connection, given.get("queue", "")):
                raise Refused(503, "Too many pages of the console are open.")
            return None
        if name == "cluster":
            return self._show_cluster(connection)
        if name == "life":
            return self._life(given.get("id", ""), connection)
        if name == "session":
            return self._json(self._session(visitor))
        if name == "tasks":
            return self._finish(self._tasks.overview(), connection)
        read = self._reads.by_name.get(name)
        if read is None:
            raise Refused(404, "The console has nothing of this name.")
        return self._finish(read(given), connection)

    def _change(
        self, name: str, request: Request, visitor: Visitor, connection: HttpConnection
    ) -> bytes | None:
        try:
            given = msgspec.json.decode(request.body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(400, f"body: {error}") from None
        if name == "sign-in":
            try:
                cookie = self._visitors.sign_in(given.get("key"), given.get("secret"))
            except Refused as refused:
                self._tell(f"somebody at {connection.peer}", f"could not sign in: {refused}")
                raise
            self._tell(f"{given['key']} at {connection.peer}", "signed in")
            return self._json({"signed_in": True}, cookie.encode())
        if name == "sign-out":
            return self._json({"signed_in": False}, self._visitors.sign_out(request).encode())
        action = self._actions.get(name)
        if action is None:
            raise Refused(404, "The console has no such action.")
        if not visitor.may_change:
            raise Refused(
                403, "Nothing can be changed here: sign in with one of the server's keys."
            )
        return self._finish(self._do(action, given, visitor), connection)

    def _do(self, action: Action, given: dict[str, Any], visitor: Visitor) -> Steps[dict[str, Any]]:
        try:
            done = yield from action(given, visitor.name)
        finally:
            self.status.expire()
        if done.told:
            self._tell(visitor.name, done.told)
        return done.result

    def _kill(self, given: dict[str, Any], who: str) -> Steps[Performed]:
        """Ends this process as `kill -9` does, for `penstock demo`: there is no answer."""
        self._tell(who, "kills this server")
        os.kill(os.getpid(), signal.SIGKILL)
        yield from ()
        return Performed({}, "")

    def _life(self, message_id: str, connection: HttpConnection) -> bytes | None:
        try:
            pending = self._reads.life(message_id)
        except PenstockError as error:
            return self._failed(error)
        self._finish_later(pending, connection)
        return None

    def _show_cluster(self, connection: HttpConnection) -> bytes | None:
        """The status of the cluster: its nodes are asked for theirs."""
        if self._cluster is None:
            raise Refused(404, "This server is not a node of a cluster.")

        def done(task: "asyncio.Task[Any]") -> None:
            self._cluster_status = None
            error = None if task.cancelled() else task.exception()
            if isinstance(error, PenstockError):
                connection.finish(self._failed(error))
            elif error is not None or task.cancelled():
                connection.finish(self._refusal(Refused(503, "The cluster did not answer.")))
            else:
                connection.finish(self._json(task.result()))

        if self._cluster_status is None:
            self._cluster_status = self._loop.create_task(self._cluster(), name="cluster status")
        self._cluster_status.add_done_callback(done)
        return None

    def _finish(self, made: Steps[dict[str, Any]], connection: HttpConnection) -> bytes | None:
        """Runs the steps of an answer; the response, or None if it is sent later."""
        try:
            result = self._service.run(made)
        except PenstockError as error:
            return self._failed(error)
        except Refused as refused:
            return self._refusal(refused)
        if not isinstance(result, Pending):
            return self._json(result)
        self._finish_later(result, connection)
        return None

    def _finish_later(self, result: Pending, connection: HttpConnection) -> None:
        def done(shown: Any, error: Exception | None) -> None:
            if isinstance(error, PenstockError):
                connection.finish(self._failed(error))
            elif isinstance(error, Refused):
                connection.finish(self._refusal(error))
            elif error is not None:
                self._loop.call_exception_handler(
                    {"message": "the console failed", "exception": error}
                )
                connection.finish(self._refusal(Refused(500, "The request could not be served.")))
            else:
                connection.finish(self._json(shown))

        result.then(done)

    def _json(self, shown: Any, headers: bytes = b"") -> bytes:
        return response(200, _JSON + _NO_STORE + _SAFE + headers, _encode(shown), self._loop.time())

    def _failed(self, error: PenstockError) -> bytes:
        return self._refusal(Refused(400 if isinstance(error, RequestError) else 503, str(error)))

    def _refusal(self, refused: Refused) -> bytes:
        body = _encode({"error": str(refused)})
        return response(refused.status, _JSON + _NO_STORE + _SAFE, body, self._loop.time())

    def _tell(self, who: str, what: str) -> None:
        """Writes a line that says who changed what; nothing in it can begin a line of its own."""
        report(f"{who} {what}", "penstock: console")

    def _session(self, visitor: Visitor) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "may_look": visitor.may_look,
            "may_change": visitor.may_change,
            "has_keys": self._visitors.has_keys,
            "key": visitor.key,
        }
        about = self._about | {
            "has_cluster": self._cluster is not None,
            "lacks": dict(self._service.LACKS),
        }
        return shown | about if visitor.may_look else shown

    async def close(self) -> None:
        """Ends the streams, and stops reading the queues."""
        self.streams.close()
        await self.status.stop()
