"""Opens `penstock://HOST:PORT`, and `file:PATH` through its daemon."""

import os
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from penstock.backends.remote.blocking import Remote
from penstock.backends.remote.endpoints import ServerEndpoint, TcpEndpoint
from penstock.backends.remote.retry import TIMEOUT_S
from penstock.backends.remote.starting import IDLE_S, DaemonEndpoint
from penstock.clock import Clock
from penstock.errors import InvalidField
from penstock.files import check_named, read_secret
from penstock.service import AsyncQueueService, QueueService, check_number
from penstock.url import BackendUrl

if TYPE_CHECKING:
    import ssl

PORT: Final = 7420
_TIMEOUT_S_MAX: Final = 24 * 60 * 60
_STORE_OPTIONS: Final[tuple[str, ...]] = ("durability", "interval_ms", "archive")


def open_service(url: BackendUrl, clock: Clock | None) -> QueueService:
    """A blocking connection. Raises InvalidField, BackendLost, or a daemon's error at its start."""
    endpoint = read_endpoint(url, clock)
    timeout_s = _timeout_s(url)
    if endpoint.tls is None:
        return Remote(endpoint, timeout_s=timeout_s)
    from penstock.backends.portal import Portal
    from penstock.backends.remote.asynchronous import AsyncRemote

    # Two threads must not use one TLS connection at once, as they would in a Channel.
    return Portal(lambda: AsyncRemote.open(endpoint, timeout_s=timeout_s))


async def open_async_service(url: BackendUrl, clock: Clock | None) -> AsyncQueueService:
    """A connection for asyncio. Raises what `open_service` raises."""
    from penstock.backends.remote.asynchronous import AsyncRemote

    return await AsyncRemote.open(read_endpoint(url, clock), timeout_s=_timeout_s(url))


def read_endpoint(url: BackendUrl, clock: Clock | None = None) -> ServerEndpoint:
    """The address in the URL. Raises InvalidField."""
    if clock is not None:
        raise InvalidField(
            f"clock: {url.scheme}: keeps its own time in another process; "
            "use memory: or file:PATH?embedded=1"
        )
    return _daemon(url) if url.scheme == "file" else _server(url)


def _timeout_s(url: BackendUrl) -> float:
    timeout_s = url.whole_number("timeout", round(TIMEOUT_S)) or 1
    return float(check_number("timeout", timeout_s, 1, _TIMEOUT_S_MAX))


def _daemon(url: BackendUrl) -> DaemonEndpoint:
    url.check_options(
        {"daemon", "embedded", "file_size", "idle", "other_owner", "timeout", *_STORE_OPTIONS}
    )
    options = {name: url.options[name] for name in _STORE_OPTIONS if name in url.options}
    if "durability" in options:
        from penstock.journal.file_journal import check_durability

        check_durability(options["durability"])
    if "interval_ms" in options:
        from penstock.journal.file_journal import check_interval

        options["interval_ms"] = str(check_interval(url.whole_number("interval_ms", 0)))
    if "archive" in options:
        options["archive"] = os.path.abspath(options["archive"])
    flags = {"idle": str(url.whole_number("idle", IDLE_S))}
    if "file_size" in url.options:
        from penstock.journal.header_page import check_file_size

        flags["file_size"] = str(check_file_size(url.whole_number("file_size", 0)))
    if url.is_on("other_owner"):
        flags["insecure_other_owner"] = ""
    return DaemonEndpoint(url.path, options=options, flags=flags)


def _server(url: BackendUrl) -> TcpEndpoint:
    url.check_options({"timeout", "tls", "ca_file", "token_file"})
    try:
        parts = urlsplit(url.text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        # The error of urlsplit may quote a part of the password.
        reason = "" if "@" in url.text else f": {error}"
        raise InvalidField(f"url: {url.shown!r} cannot be read{reason}") from None
    if not host or parts.path not in ("", "/") or parts.username or parts.fragment:
        raise InvalidField(f"url: {url.shown!r} is not of the form penstock://HOST:PORT")
    tls = None
    if url.whole_number("tls", 0) or "ca_file" in url.options:
        tls = _client_tls(url.options.get("ca_file"))
    token = None
    if "token_file" in url.options:
        token = _read_token(url.options["token_file"])
    return TcpEndpoint(host, PORT if port is None else port, token=token, tls=tls)


def _read_token(path: str) -> str:
    try:
        return read_secret(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidField(f"url: token_file: cannot read {path!r}: {reason}") from None


def _client_tls(ca_file: str | None) -> "ssl.SSLContext":
    import ssl

    try:
        if ca_file is not None:
            check_named(ca_file)
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidField(f"url: ca_file: cannot use {ca_file!r}: {reason}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
