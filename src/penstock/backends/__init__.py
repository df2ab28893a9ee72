"""Every way to reach a queue: the engine itself, and adapters to other services.

A URL's scheme names the backend; each backend's module is imported only when it is asked for, so
that a missing extra bothers nobody who does not use it.
"""

from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from penstock.clock import Clock
from penstock.errors import InvalidField
from penstock.service import AsyncQueueService, QueueService

if TYPE_CHECKING:
    from penstock.backends.engine.engine import Engine

SCHEMES: Final = {
    "memory": "memory:",
    "file": "file:PATH",
    "penstock": "penstock://HOST:PORT",
    "sqs": "sqs://REGION",
}


class Address(NamedTuple):
    """A URL taken apart; what stands after the scheme, and the options after the question mark."""

    url: str
    scheme: str
    rest: str
    options: dict[str, str]

    def whole_number(self, name: str, default: int) -> int:
        """An option that must be a whole number of zero or more. Raises InvalidField."""
        text = self.options.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 12):
            raise InvalidField(f"url: {name}={text!r} in {self.url!r} is not a whole number")
        return int(text)


def read_url(url: object) -> Address:
    """Takes a backend's URL apart. Raises InvalidField."""
    known = ", ".join(SCHEMES.values())
    if not isinstance(url, str):
        raise InvalidField(f"url: expected text such as {known}; got {type(url).__name__}")
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in SCHEMES:
        raise InvalidField(f"url: {url!r} names no backend there is; use {known}")
    try:
        query = urlsplit(url).query
    except ValueError as error:
        raise InvalidField(f"url: {url!r} cannot be read: {error}") from None
    return Address(url, scheme, rest.partition("?")[0], dict(parse_qsl(query)))


def _memory_engine(address: Address, clock: Clock | None) -> "Engine":
    from penstock.backends.engine.engine import Engine
    from penstock.journal import MemoryJournal

    check_options(address, {"history"})
    if address.rest:
        raise InvalidField(f"url: a memory engine has no address; use memory:, not {address.url!r}")
    return Engine(MemoryJournal(address.whole_number("history", 0)), clock)


def check_options(address: Address, known: set[str]) -> None:
    """Refuses options the backend does not have. Raises InvalidField."""
    for name in address.options:
        if name not in known:
            raise InvalidField(
                f"url: {address.scheme}: has no option {name!r}; it has {', '.join(sorted(known))}"
            )


def _file_engine(address: Address, clock: Clock | None) -> "Engine":
    from penstock.backends.engine.store import open_engine as open_store
    from penstock.journal.file import check_durability

    check_options(address, {"embedded", "durability", "interval_ms", "archive"})
    return open_store(
        file_path(address),
        durability=check_durability(address.options.get("durability", "sync")),
        interval_ms=address.whole_number("interval_ms", 50),
        clock=clock,
        archive=address.options.get("archive"),
    )


def file_path(address: Address) -> str:
    """The path in a `file:` URL, `file:PATH` or `file:///PATH`. Raises InvalidField."""
    path = address.rest
    if path.startswith("//"):
        host, slash, below = path[2:].partition("/")
        if host or not slash:
            raise InvalidField(f"url: {address.url!r} names a host; use file:PATH")
        path = "/" + below
    if not path or "\0" in path:
        raise InvalidField(f"url: {address.url!r} names no path; use file:PATH")
    return path


def open_engine(url: str, clock: Clock | None = None) -> "Engine":
    """The engine at a URL, `memory:` or `file:PATH`, in this process and for it alone.

    Raises InvalidField, or what opening the store raises.
    """
    address = read_url(url)
    if address.scheme == "file":
        return _file_engine(address, clock)
    if address.scheme == "memory":
        return _memory_engine(address, clock)
    raise InvalidField(f"url: {url!r} is served elsewhere; an engine needs memory: or file:PATH")


def _is_elsewhere(address: Address) -> bool:
    """Whether another process does the work: a server, or the daemon of a data directory."""
    if address.scheme == "file":
        return address.options.get("embedded", "0") == "0"
    return address.scheme == "penstock"


def open_service(url: str, clock: Clock | None = None) -> QueueService:
    """The blocking service at a URL. Raises InvalidField, or what the backend raises."""
    address = read_url(url)
    if address.scheme == "sqs":
        from penstock.backends.sqs.service import open_sqs

        return open_sqs(address, clock)
    if _is_elsewhere(address):
        from penstock.backends.remote.open import open_remote

        return open_remote(address, clock)
    from penstock.backends.engine.blocking import BlockingEngine

    return BlockingEngine(open_engine(url, clock))


async def open_async_service(url: str, clock: Clock | None = None) -> AsyncQueueService:
    """The asyncio service at a URL. Raises InvalidField, or what the backend raises."""
    address = read_url(url)
    if address.scheme == "sqs":
        from penstock.backends.sqs.service import open_async_sqs

        return await open_async_sqs(address, clock)
    if _is_elsewhere(address):
        from penstock.backends.remote.open import open_async_remote

        return await open_async_remote(address, clock)
    from penstock.backends.engine.loop import AsyncEngine

    return AsyncEngine(open_engine(url, clock))
