"""Reads an `amqp:` or `amqps:` URL.

    amqp://USER:PASSWORD@HOST:PORT/VHOST
    amqps://HOST/VHOST?ca_file=FILE     TLS; the certificates to trust, if not the system's
      ?nodes=HOST:PORT,HOST:PORT        other nodes of the cluster, if the first cannot be reached
      ?queues=quorum                    the kind of new queues: classic (default) or quorum
      ?timeout=SECONDS                  how long to wait for an answer of the broker (30)
      ?hold=SECONDS                     how long a message may be held at most (1,800)

Errors never show the password.
"""

import ssl
from typing import Final, Literal, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from penstock.errors import InvalidField
from penstock.files import check_named
from penstock.url import BackendUrl

TIMEOUT_S: Final = 30
# RabbitMQ closes a channel that holds a message for longer than its consumer_timeout, which is
# 30 minutes by default. It checks once a minute, so that a claim that ends just then is rarely met.
HOLD_S: Final = 1_800
PORTS: Final = {"amqp": 5672, "amqps": 5671}
Kind = Literal["classic", "quorum"]
KINDS: Final[tuple[Kind, ...]] = ("classic", "quorum")


class RabbitTarget(NamedTuple):
    """The broker's address, the user and the options of the URL."""

    scheme: str
    host: str
    port: int
    user: str
    password: str
    vhost: str
    kind: Kind
    timeout_s: float
    hold_ms: int
    ca_file: str | None
    others: tuple[tuple[str, int], ...] = ()

    @property
    def nodes(self) -> list["RabbitTarget"]:
        """This target at each node of the cluster, the one of the URL first."""
        return [self, *(self._replace(host=host, port=port) for host, port in self.others)]

    @property
    def shown(self) -> str:
        """The address for error messages, without user and password."""
        return f"{self.scheme}://{_joined(self.host, self.port)}"

    def url(self, name: str) -> str:
        """The URL for the AMQP client library, for a connection with this name."""
        who = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        where = f"{_joined(self.host, self.port)}/{quote(self.vhost, safe='')}"
        return f"{self.scheme}://{who}@{where}?heartbeat=30&name={name}"

    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings of an `amqps:` connection; None for `amqp:`. Raises InvalidField."""
        if self.scheme != "amqps":
            return None
        try:
            if self.ca_file is not None:
                check_named(self.ca_file)
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            reason = error.strerror or error
            raise InvalidField(f"url: ca_file={self.ca_file!r} cannot be read: {reason}") from None


def read_target(url: BackendUrl) -> RabbitTarget:
    """Reads an `amqp:` or `amqps:` URL. Raises InvalidField."""
    form = f"{url.scheme}://USER:PASSWORD@HOST:PORT/VHOST"
    try:
        parts = urlsplit(f"{url.scheme}:{url.rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        # The error of urlsplit would quote what may be a part of the password.
        raise InvalidField(
            f"url: the host or port cannot be read; use {form}, with special characters in the "
            "password as %XX"
        ) from None
    if parts.fragment:
        raise InvalidField(f"url: has a '#'; use {form}, with %23 for a # in the password")
    if not url.rest.startswith("//") or not host or port == 0:
        raise InvalidField(f"url: the host or port is missing; use {form}")
    # Errors quote the URL from here on: it must not contain the password.
    shown = url._replace(text=f"{url.scheme}://{host}:{port or PORTS[url.scheme]}")
    shown.check_options({"queues", "timeout", "hold", "ca_file", "nodes"})
    kind = url.options.get("queues", KINDS[0])
    if kind not in KINDS:
        raise InvalidField(f"url: queues={kind!r} is neither {' nor '.join(KINDS)}")
    ca_file = url.options.get("ca_file")
    if ca_file is not None and url.scheme != "amqps":
        raise InvalidField("url: ca_file is for amqps:// only")
    return RabbitTarget(
        url.scheme,
        host,
        port or PORTS[url.scheme],
        unquote(parts.username or "guest"),
        unquote(parts.password or "guest"),
        unquote(parts.path[1:]) or "/",
        kind,
        float(shown.whole_number("timeout", TIMEOUT_S) or 1),
        shown.whole_number("hold", HOLD_S) * 1_000 or 1_000,
        ca_file,
        _read_nodes(url.options.get("nodes", ""), PORTS[url.scheme]),
    )


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read_nodes(text: str, port: int) -> tuple[tuple[str, int], ...]:
    """The addresses of `nodes=`; `port` is that of one without. Raises InvalidField."""
    nodes = []
    for each in filter(None, text.split(",")):
        try:
            parts = urlsplit(f"//{each}")
            host, given = parts.hostname, parts.port
        except ValueError:
            raise InvalidField(f"url: nodes={each!r} is not HOST:PORT") from None
        if not host or given == 0 or each != parts.netloc or "@" in each:
            raise InvalidField(f"url: nodes={each!r} is not HOST:PORT")
        nodes.append((host, given or port))
    return tuple(nodes)
