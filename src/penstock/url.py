"""A backend's URL taken apart, and the registry of schemes.

Each scheme names the module that opens it and the extra that module needs. The module is imported
only when its scheme is used, so a missing extra concerns only those who use that backend. It has
two functions, each of a `BackendUrl` and a clock:

    open_service(url, clock) -> QueueService
    async open_async_service(url, clock) -> AsyncQueueService
"""

import os
import re
from importlib import import_module
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from penstock.errors import InvalidField, MissingExtra


class Scheme(NamedTuple):
    """How a URL of this scheme is written, which module opens it, and the extra it needs."""

    form: str
    module: str
    extra: str | None = None
    # Whether its queues, though in another process, use the clock of the process that opens it.
    shares_clock: bool = False


SCHEMES: Final[dict[str, Scheme]] = {
    "memory": Scheme("memory:", "penstock.backends.engine.open"),
    "file": Scheme("file:PATH", "penstock.backends.engine.open"),
    "penstock": Scheme("penstock://HOST:PORT", "penstock.backends.remote.open"),
    "cluster": Scheme("cluster:nats://HOST:PORT", "penstock.cluster.open", "cluster"),
    "sqs": Scheme("sqs://REGION", "penstock.backends.sqs.service", "sqs"),
    "amqp": Scheme("amqp://HOST:PORT", "penstock.backends.rabbitmq.service", "rabbitmq"),
    "amqps": Scheme("amqps://HOST:PORT", "penstock.backends.rabbitmq.service", "rabbitmq"),
    "redis": Scheme("redis://HOST:PORT", "penstock.backends.redis.service", "redis", True),
    "rediss": Scheme("rediss://HOST:PORT", "penstock.backends.redis.service", "redis", True),
    "redis+cluster": Scheme(
        "redis+cluster://HOST:PORT,…", "penstock.backends.redis.service", "redis", True
    ),
    "redis+sentinel": Scheme(
        "redis+sentinel://HOST:PORT,…/MASTER", "penstock.backends.redis.service", "redis", True
    ),
    "mirror": Scheme("mirror:?primary=file:PATH&mirror=URL", "penstock.backends.mirror.service"),
}


# Up to the last @, because a password may have any character unescaped, but not into a URL that
# follows. Within the options of another URL all of it may be escaped.
_USERINFO: Final = re.compile(
    r"(:|%3a)(?://|%2f%2f)(?:(?!://|%3a%2f%2f).)*(?:@|%40)", re.IGNORECASE | re.DOTALL
)


# A URL with a host, up to the first character that ends it, and what follows.
_AUTHORITY: Final = re.compile(r"(?:[a-z]+:)?//([^/?]+)(.*)", re.DOTALL)
_HOST: Final = r"(?:\[[0-9A-Fa-f:.]+\]|[^:\[\]\s,@]+)(?::[0-9]{1,5})?"
_HOSTS: Final = re.compile(rf"{_HOST}(?:,{_HOST})*")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_HOST_PORT: Final = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}/?", re.ASCII)


class BackendUrl(NamedTuple):
    """A URL taken apart: `rest` is between the scheme and the question mark, `options` after it."""

    text: str
    scheme: str
    rest: str
    options: dict[str, str]

    def whole_number(self, name: str, default: int) -> int:
        """An option that must be a whole number of zero or more. Raises InvalidField."""
        text = self.options.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and len(text) <= 12):
            raise InvalidField(f"url: {name}={text!r} in {self.shown!r} is not a whole number")
        return int(text)

    def is_on(self, name: str) -> bool:
        """Whether an option that is 0 or 1 is 1; 0 if absent. Raises InvalidField."""
        text = self.options.get(name, "0")
        if text not in ("0", "1"):
            raise InvalidField(f"url: {name}={text!r} in {self.shown!r} is neither 0 nor 1")
        return text == "1"

    def has_option(self, name: str) -> bool:
        """Whether this URL has the option, or one of the two that `mirror:` has in its options."""
        inner = self.options.values() if self.scheme == "mirror" else ()
        return name in self.options or any(
            read_url(text).has_option(name) for text in inner if text.partition(":")[0] in SCHEMES
        )

    def check_options(self, known: set[str]) -> None:
        """Raises InvalidField for an option that this backend does not have."""
        for name in self.options:
            if name not in known:
                # Behind a '?' in a password, the rest of it looks like an option.
                what = "an unknown option" if "@" in self.text else f"no option {name!r}"
                raise InvalidField(
                    f"url: {self.scheme}: has {what}; it has {', '.join(sorted(known)) or 'none'}"
                )

    @property
    def shown(self) -> str:
        """The URL as it may be shown: without user, password and token."""
        return without_password(self.text)

    @property
    def path(self) -> str:
        """The path in a `file:` URL, `file:PATH` or `file:///PATH`. Raises InvalidField."""
        path = self.rest
        if path.startswith("//"):
            host, slash, below = path[2:].partition("/")
            if host or not slash:
                raise InvalidField(f"url: {self.shown!r} names a host; use file:PATH")
            path = "/" + below
        if not path or "\0" in path:
            raise InvalidField(f"url: {self.shown!r} names no path; use file:PATH")
        return path

    @property
    def directory(self) -> str | None:
        """The data directory whose queues this URL opens; None without one. Raises InvalidField."""
        if self.scheme == "mirror":
            return read_url(self.options.get("primary")).directory
        return self.path if self.scheme == "file" else None

    @property
    def is_in_this_process(self) -> bool:
        """Whether the queues are in the process that opens the URL, which no other can reach."""
        return self.scheme == "memory" or (self.scheme == "file" and self.is_on("embedded"))


def without_password(url: str) -> str:
    """The URL as it may be shown: user and password, before the @, are left out."""
    return _USERINFO.sub(r"\1//…@", url)


def is_address(text: str) -> bool:
    """Whether this is HOST:PORT, without a scheme."""
    return _HOST_PORT.fullmatch(text) is not None


def store_url(text: str) -> str:
    """The URL of the store that a person names: a path without a scheme is a `file:` URL."""
    is_path = text and not is_address(text) and not _SCHEME.match(text)
    return f"file:{text}" if is_path else text


def read_url(url: object) -> BackendUrl:
    """Takes a backend's URL apart. Raises InvalidField."""
    known = ", ".join(scheme.form for scheme in SCHEMES.values())
    if not isinstance(url, str):
        raise InvalidField(f"url: expected text such as {known}; got {type(url).__name__}")
    scheme, colon, rest = url.partition(":")
    shown = without_password(url)
    if scheme in ("http", "https") or is_address(url):
        endpoint = shown if colon and scheme in ("http", "https") else f"http://{shown}"
        raise InvalidField(
            f"url: {shown!r} is not the URL of a store; for the Amazon SQS endpoint there use "
            f"sqs://REGION?endpoint={endpoint}, such as sqs://us-east-1?endpoint={endpoint}"
        )
    if not colon:
        raise InvalidField(f"url: {shown!r} has no scheme; use {known}")
    if scheme not in SCHEMES:
        raise InvalidField(f"url: unknown URL scheme {scheme!r}; use {known}")
    try:
        urlsplit(url)
    except ValueError as error:
        # The error of urlsplit may quote a part of the password.
        reason = "" if "@" in url else f": {error}"
        raise InvalidField(f"url: {shown!r} cannot be read{reason}") from None
    if _ends_within_password(rest):
        raise InvalidField(
            f"url: {scheme}: the password has a '/' or a '?'; write special characters in the "
            "password as %XX"
        )
    rest, mark, query = rest.partition("?")
    options = _read_options(query)
    if mark and not options:
        raise InvalidField(f"url: {shown!r} has a '?' and no options behind it")
    return BackendUrl(url, scheme, rest, options)


def _ends_within_password(rest: str) -> bool:
    """Whether what stands for the host is the beginning of a user and a password.

    The host ends at the first / or ?, so that an error about it would quote that beginning.
    """
    found = _AUTHORITY.match(rest)
    if found is None or "@" not in found[2]:
        return False
    if "@" in found[2].partition("?")[0]:
        # A password may begin with digits, and then looks like a port.
        return True
    return _HOSTS.fullmatch(found[1].rpartition("@")[2]) is None


def _read_options(query: str) -> dict[str, str]:
    """The options after the question mark. Raises InvalidField rather than ignore one.

    A `#` begins no fragment: it is a character like others.
    """
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if not value:
            # Behind a '?' in a password, the rest of it looks like an option.
            if not name.isidentifier():
                raise InvalidField(
                    "url: an option behind the '?' is not NAME=VALUE; write special characters in "
                    "the password as %XX"
                )
            raise InvalidField(f"url: the option {name!r} has no value; write {name}=VALUE")
        if name in options:
            raise InvalidField(f"url: the option {name!r} is given twice")
        options[name] = value
    return options


def load_backend(url: BackendUrl) -> Any:
    """The module that opens this URL. Raises MissingExtra, which says what to install."""
    scheme = SCHEMES[url.scheme]
    try:
        return import_module(scheme.module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if scheme.extra is None or missing == "penstock":
            raise
        raise MissingExtra(
            f"url: {url.scheme}: needs the package {missing!r}; "
            f"install it with pip install 'PATH-OF-THE-CLONE[{scheme.extra}]'"
        ) from None


def why_not_connected(error: OSError) -> str:
    """Why a socket was not connected; asyncio's text has the address instead of the reason."""
    text = error.args[-1] if error.args and isinstance(error.args[-1], str) else str(error)
    if "Connect call failed" not in text:
        return text
    # A host with several addresses: "Multiple exceptions: [Errno 111] Connect call failed …".
    number = error.errno or next(map(int, re.findall(r"\[Errno (\d+)\]", text)), 0)
    return os.strerror(number) if number else text
