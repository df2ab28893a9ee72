"""Where Redis is: a `redis:` URL taken apart.

    redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]
    rediss://…                                          the same over TLS
    redis+cluster://HOST:PORT[,HOST:PORT…]              a Redis Cluster, found through any node
    redis+sentinel://HOST:PORT[,HOST:PORT…]/MASTER[/DATABASE]    the master that Sentinels name

User and password may contain percent escapes. Errors never show them.
"""

import re
import ssl
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from penstock.errors import InvalidField
from penstock.files import check_named, read_secret
from penstock.service import check_number
from penstock.url import BackendUrl, without_password

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
TIMEOUT_S: Final = 10
_TIMEOUT_S_MAX: Final = 24 * 60 * 60
_HISTORY_MAX: Final = 10_000_000
_REPLICAS_MAX: Final = 100
_OPTIONS: Final = frozenset(
    {
        *("prefix", "timeout", "history", "replicas", "password_file", "evictable"),
        *("tls", "ca_file", "cert_file", "key_file"),
    }
)
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}", re.ASCII)

HostPort = tuple[str, int]


class RedisTarget(NamedTuple):
    """The parts of a URL. `master` is the name of the master in the Sentinels' configuration."""

    scheme: str
    hosts: tuple[HostPort, ...]
    master: str | None
    database: int
    prefix: str
    timeout_s: float
    history_max: int
    replicas: int
    evictable: bool
    shown: str
    credentials: dict[str, Any]
    tls: dict[str, Any]


def read_target(url: BackendUrl) -> RedisTarget:
    """Reads a URL of Redis. Raises InvalidField."""
    shown = without_password(url.text).partition("?")[0]
    url.check_options(set(_OPTIONS))
    return _read(url, shown)


def _read(url: BackendUrl, shown: str) -> RedisTarget:
    if not url.rest.startswith("//"):
        raise InvalidField(f"url: {shown!r} is not of the form {url.scheme}://HOST:PORT")
    authority, _, path = url.rest[2:].partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    is_sentinel = url.scheme == "redis+sentinel"
    default = SENTINEL_PORT if is_sentinel else PORT
    addresses = tuple(_read_host(text, default, shown) for text in hosts.split(","))
    if len(addresses) > 1 and "+" not in url.scheme:
        raise InvalidField(f"url: {shown!r} names several hosts; use redis+cluster:// for those")
    master = None
    if is_sentinel:
        master, _, path = path.partition("/")
        if not master:
            raise InvalidField(f"url: {shown!r} names no master; use {url.scheme}://HOST:PORT/NAME")
    database = _database(path, shown)
    if database and url.scheme == "redis+cluster":
        raise InvalidField(f"url: {shown!r} names a database; a Redis Cluster has only the first")
    prefix = url.options.get("prefix", "penstock")
    if not _PREFIX.fullmatch(prefix):
        raise InvalidField(f"url: prefix={prefix!r}: use 1 to 64 of A-Z a-z 0-9 _ . : -")
    timeout_s = check_number(
        "timeout", url.whole_number("timeout", TIMEOUT_S) or 1, 1, _TIMEOUT_S_MAX
    )
    return RedisTarget(
        url.scheme,
        addresses,
        master,
        database,
        prefix,
        float(timeout_s),
        check_number("history", url.whole_number("history", 0), 0, _HISTORY_MAX),
        check_number("replicas", url.whole_number("replicas", 0), 0, _REPLICAS_MAX),
        url.is_on("evictable"),
        shown,
        _credentials(userinfo if at else "", url.options.get("password_file")),
        _tls(url),
    )


def _read_host(text: str, default: int, shown: str) -> HostPort:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?", text)
    if found is None or (found[2] is not None and not 0 < int(found[2]) < 65_536):
        raise InvalidField(f"url: {shown!r}: {text!r} is not of the form HOST:PORT")
    return found[1].strip("[]"), int(found[2] or default)


def _database(path: str, shown: str) -> int:
    if path in ("", "/"):
        return 0
    if not (path.isascii() and path.isdigit() and len(path) <= 5):
        raise InvalidField(f"url: {shown!r}: the database {path!r} is not a number")
    return int(path)


def _credentials(userinfo: str, password_file: str | None) -> dict[str, Any]:
    username, colon, password = userinfo.partition(":")
    if not colon and userinfo:
        username, password = "", userinfo
    given: dict[str, Any] = {}
    if username:
        given["username"] = unquote(username)
    if password:
        given["password"] = unquote(password)
    if password_file is not None:
        try:
            given["password"] = read_secret(password_file)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise InvalidField(
                f"url: password_file: cannot read {password_file!r}: {reason}"
            ) from None
    return given


def _tls(url: BackendUrl) -> dict[str, Any]:
    """The TLS options of a connection; empty for one without TLS."""
    ca_file, cert_file, key_file = map(url.options.get, ("ca_file", "cert_file", "key_file"))
    if key_file is not None and cert_file is None:
        raise InvalidField("url: key_file: there is no cert_file to which the key belongs")
    if not (url.scheme == "rediss" or url.is_on("tls") or ca_file or cert_file):
        return {}
    name, file = "ca_file", ca_file
    try:
        if ca_file is not None:
            check_named(ca_file)
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            name, file = "cert_file", cert_file
            check_named(cert_file)
            check_named(key_file or cert_file)
            # A key with a passphrase is refused: there is no way to ask the user for it.
            context.load_cert_chain(cert_file, key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidField(f"url: {name}: cannot use {file!r}: {reason}") from None
    return {
        "ssl_ca_certs": ca_file,
        "ssl_certfile": cert_file,
        "ssl_keyfile": key_file,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }
