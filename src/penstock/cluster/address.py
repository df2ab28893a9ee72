"""A cluster's URL: `cluster:nats://USER:PASSWORD@HOST:PORT,HOST:PORT?name=…`.

    nats:// or tls://   the NATS servers, separated by commas, with user and password or a token
                        in the first of them or in each
    name=penstock       prefix of the names of this cluster's streams and subjects
    shards=16           number of shards of a new cluster; `penstock cluster reshard` adds some. A
                        node that is started with a number the cluster never had is refused
    replicas=3          how many NATS servers store each stream of a new cluster; it cannot be
                        changed later
    credentials=PATH    a NATS credentials file, in place of user and password
    ca=PATH             the certificate authority of the servers, for tls://
    node=NAME           the name of a node, for penstock serve; generated if absent
    archive=DIR         where a node stores the shards' streams as segment files, for penstock
                        serve; the same directory for all nodes; archive=none ends the archive
    insecure=1          allow servers off this machine without TLS or without credentials

A client that may publish on these subjects has full access to every queue. Only NATS
authenticates clients, so off loopback a URL without credentials or TLS is refused.
"""

import ipaddress
import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from penstock.errors import InvalidField
from penstock.url import BackendUrl

OPTIONS: Final = {
    "name",
    "node",
    "shards",
    "replicas",
    "credentials",
    "ca",
    "archive",
    "insecure",
}
SHARDS_MAX: Final = 4_096
_NAME: Final = re.compile(r"[A-Za-z0-9-]{1,40}", re.ASCII)


class ClusterAddress(NamedTuple):
    """The NATS servers of a cluster, and the settings in its URL."""

    servers: tuple[str, ...]
    shown: str
    name: str
    # None if the URL does not say: a node then joins a cluster with any.
    shards: int | None
    replicas: int | None
    uses_tls: bool
    credentials_file: str | None
    ca_file: str | None


def read_address(url: BackendUrl) -> ClusterAddress:
    """The address in a `cluster:` URL. Raises InvalidField, which never shows a password."""
    url.check_options(OPTIONS)
    scheme, separator, hosts = url.rest.partition("://")
    if scheme not in ("nats", "tls") or not separator or not hosts.strip("/"):
        raise InvalidField("url: the URL of a cluster is cluster:nats://HOST:PORT,HOST:PORT")
    user = ""
    servers: list[str] = []
    shown: list[str] = []
    for text in hosts.rstrip("/").split(","):
        own, at, place = text.rpartition("@")
        user = own if at else user
        host = _check_host_port(place, is_shown="@" not in hosts)
        servers.append(f"{scheme}://{user}@{place}" if user else f"{scheme}://{place}")
        shown.append(place)
        is_protected = scheme == "tls" and (user or "credentials" in url.options)
        if not (is_protected or is_loopback(host) or url.is_on("insecure")):
            raise InvalidField(
                f"url: {host} is not this machine: use tls:// and credentials, "
                "or insecure=1 on a network that you trust"
            )
    name = url.options.get("name", "penstock")
    if not _NAME.fullmatch(name):
        raise InvalidField(f"url: name={name!r} is not 1 to 40 letters, digits and hyphens")
    shards = _count(url, "shards", SHARDS_MAX)
    replicas = _count(url, "replicas", 5)
    return ClusterAddress(
        tuple(servers),
        f"cluster:{scheme}://{','.join(shown)}",
        name,
        shards,
        replicas,
        scheme == "tls",
        url.options.get("credentials"),
        url.options.get("ca"),
    )


def _count(url: BackendUrl, option: str, most: int) -> int | None:
    """The number that an option names, if the URL has it. Raises InvalidField."""
    if option not in url.options:
        return None
    count = url.whole_number(option, 0)
    if not 1 <= count <= most:
        raise InvalidField(f"url: {option}={count} is outside 1 to {most}")
    return count


def read_node_name(url: BackendUrl) -> str | None:
    """The name of a node in its URL, if it has one. Raises InvalidField."""
    name = url.options.get("node")
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidField(f"url: node={name!r} is not 1 to 40 letters, digits and hyphens")
    return name


def _check_host_port(place: str, *, is_shown: bool) -> str:
    """The host in HOST:PORT. Raises InvalidField, which shows the place only if it may."""
    try:
        parts = urlsplit(f"//{place}")
        host = parts.hostname if parts.port is not None and parts.netloc == place else None
    except ValueError:
        host = None
    if not host:
        # With a comma in the password, this place is a part of it.
        shown = repr(place) if is_shown else "a server of the cluster"
        raise InvalidField(f"url: {shown} is not HOST:PORT")
    return host


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
