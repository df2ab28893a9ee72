"""The status of queues from the console of a running `penstock serve`.

If the server checks keys, one of them is taken from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,
as by every SQS client; it leaves this process for that server only. TLS is verified with the
system's certificates, or those of SSL_CERT_FILE.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Self
from urllib.parse import urlencode, urlsplit

import msgspec

from penstock.errors import BackendLost, InvalidField, ProtocolError, RequestError, UnavailableError
from penstock.server.console.visitor import CSRF_HEADER
from penstock.url import why_not_connected

_PORTS: Final = {"http": 80, "https": 443}
_LINE_BYTES_MAX: Final = 64 * 1024 * 1024
_TIMEOUT_S: Final = 30.0
# The server sends something at least every few seconds.
_SILENCE_S: Final = 30.0


class ServerStatus:
    """The console of one server, asked as its own pages ask it."""

    def __init__(self, scheme: str, host: str, port: int) -> None:
        self._host = host
        self._port = port
        shown_host = f"[{host}]" if ":" in host else host
        self._address = shown_host if port == _PORTS[scheme] else f"{shown_host}:{port}"
        self._tls = ssl.create_default_context() if scheme == "https" else None
        self._cookie = ""
        self.shown = f"{scheme}://{self._address}"

    @classmethod
    async def open(cls, url: str) -> Self:
        """Signs in if that is needed. Raises InvalidField, BackendLost, RequestError."""
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS[parts.scheme]
        except ValueError:
            raise InvalidField("url: cannot be read; use http://HOST:PORT") from None
        if not parts.hostname or parts.username or parts.path not in ("", "/", "/console"):
            raise InvalidField("url: a server's URL is http://HOST:PORT or https://HOST:PORT")
        source = cls(parts.scheme, parts.hostname, port)
        if not (await source.read("session"))["may_look"]:
            await source._sign_in()
        return source

    async def _sign_in(self) -> None:
        key, secret = (
            os.environ.get(name, "") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        )
        if not (key and secret):
            raise RequestError(
                f"{self.shown}: checks keys; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to "
                "one of them"
            )
        await self._ask("POST", "sign-in", {"key": key, "secret": secret})

    async def read(self, name: str, /, **given: str) -> Any:
        return await self._ask("GET", f"{name}?{urlencode(given)}")

    async def _ask(self, method: str, path: str, given: dict[str, str] | None = None) -> Any:
        body = b"" if given is None else msgspec.json.encode(given)
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._asked(method, path, body) as reply:
                status, headers, reader = reply
                content = await reader.readexactly(int(headers.get("content-length", "0")))
        except TimeoutError:
            raise BackendLost(f"{self.shown}: no answer within {_TIMEOUT_S:.0f} s") from None
        if "set-cookie" in headers:
            self._cookie = headers["set-cookie"].partition(";")[0]
        value = self._decoded(content)
        if status != 200:
            error = value.get("error") if isinstance(value, dict) else None
            kind = UnavailableError if status >= 500 else RequestError
            raise kind(f"{self.shown}: {error or f'answered {status}'}")
        return value

    def _decoded(self, content: bytes) -> Any:
        try:
            return msgspec.json.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise ProtocolError(f"{self.shown}: has no console; is it a penstock serve?") from None

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncIterator[tuple[int, dict[str, str], asyncio.StreamReader]]:
        """Sends a request; status, headers and the reader of the body."""
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=_LINE_BYTES_MAX
            )
        except OSError as error:
            reason = why_not_connected(error)
            raise BackendLost(f"{self.shown}: cannot be reached: {reason}") from None
        try:
            lines = [
                f"{method} /console/api/{path} HTTP/1.1",
                f"Host: {self._address}",
                "Connection: close",
                f"{CSRF_HEADER}: 1",
                # What no web page can send: the server's name may be one that pages may have, too.
                "Sec-Fetch-Site: none",
                f"Content-Length: {len(body)}",
                "Content-Type: application/json",
                *([f"Cookie: {self._cookie}"] if self._cookie else []),
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            fields = (line.partition(":") for line in head[1:] if line)
            headers = {name.lower(): value.strip() for name, _, value in fields}
            yield int(head[0].split()[1]), headers, reader
        except (OSError, asyncio.IncompleteReadError):
            raise BackendLost(f"{self.shown}: the connection was lost") from None
        except (ValueError, IndexError, asyncio.LimitOverrunError):
            raise ProtocolError(f"{self.shown}: does not speak HTTP") from None
        finally:
            writer.close()

    async def changes(self, queue: str = "") -> AsyncIterator[dict[str, Any]]:
        path = f"events?{urlencode({'queue': queue} if queue else {})}"
        async with self._asked("GET", path) as (status, _, reader):
            if status != 200:
                raise UnavailableError(f"{self.shown}: answered {status}")
            while True:
                try:
                    line = await asyncio.wait_for(reader.readline(), _SILENCE_S)
                except TimeoutError:
                    raise BackendLost(f"{self.shown}: nothing was heard of it") from None
                if not line:
                    raise BackendLost(f"{self.shown}: has closed the connection")
                if line == b"event: behind\n":
                    # Some changes were left out: everything has to be read again.
                    return
                if line.startswith(b"data: "):
                    yield self._decoded(line[6:])

    async def close(self) -> None:
        """Does nothing: each request has its own connection."""
