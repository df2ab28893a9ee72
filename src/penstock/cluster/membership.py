"""The registers of a cluster: its settings, its nodes, and where shards are pinned.

cluster      the numbers of shards, the key of its receipts, the identity in its message ids
node.NAME    a node that was started, and whether it takes shards
owner.N      the owner of shard N (`takeover`)
pin.N        the node that an operator has moved shard N to
archive      whether the shards' streams are archived: if so, only what is archived is purged
snapshots.N  the snapshots of shard N (`snapshots`)
"""

import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Literal

import msgspec

from penstock.cluster.log import (
    RETRY_MS,
    LogSteps,
    Mismatch,
    Pause,
    ReadRegister,
    Register,
    Swap,
    Unanswered,
    until_answered,
)
from penstock.cluster.placement import IDENTITY_BYTES
from penstock.core.receipts import KEY_BYTES
from penstock.errors import InvalidField, StoreUnusable

FORMAT: Final = 1
# The format of a cluster that has grown: versions that know the first one only would not find
# queues.
GROWN_FORMAT: Final = 2
# Of a new cluster, unless its first node is told otherwise.
SHARDS: Final = 16
REPLICAS: Final = 3
ARCHIVE_KEY: Final = "archive"
ARCHIVE_ON: Final = b"on"
ARCHIVE_OFF: Final = b"off"
# After this many refused pings in a row a node has stopped; one may be a node that reconnects.
REFUSED_MAX: Final = 3
# A node that has answered no ping for so long has stopped, too.
SILENT_S: Final = 2.0
NodeState = Literal["up", "draining", "left"]
# Not settings: that a queue may be in any shards, by its note (`spread_rules`), and that the number
# of shards may grow.
ANY_SHARDS: Final = "move-queue"
GROWTH: Final = "reshard"
# The settings of queues that not all versions of Penstock know. Each node lists those that it knows
# in its register: as the next owner of a shard, a node would not follow one that it does not know.
LATER_SETTINGS: Final = ("priority_age_ms", "paused", ANY_SHARDS, GROWTH)


class ClusterSettings(msgspec.Struct, frozen=True):
    """The settings of a cluster; of these only the number of shards changes, and only grows."""

    shards: int
    replicas: int
    key: bytes
    identity: bytes
    format: int = FORMAT
    # With how many shards it was created; 0 if it has not grown since.
    created_shards: int = 0

    @property
    def homes(self) -> int:
        """How many shards may be the home of a queue: so many as the cluster was created with."""
        return self.created_shards or self.shards


class NodeInfo(msgspec.Struct, frozen=True):
    """The content of a node's register."""

    state: NodeState
    endpoint: str = ""
    # Which of `LATER_SETTINGS` the node knows; an older version lists none.
    settings: tuple[str, ...] = ()


class Peer:
    """Another node, as known to a node that pings it."""

    __slots__ = ("asked_s", "info", "refused")

    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.refused = 0
        # When the first ping was sent after the last one that was answered; None if none was. Time
        # in which no ping is sent does not count: the node that pings may have been stopped.
        self.asked_s: float | None = None

    def ask(self, now_s: float) -> None:
        """Notes that a ping is sent."""
        if self.asked_s is None:
            self.asked_s = now_s

    def answer(self) -> None:
        """Notes that a ping was answered."""
        self.refused = 0
        self.asked_s = None

    def is_live(self, now_s: float) -> bool:
        """Whether the node answers pings."""
        is_silent = self.asked_s is not None and now_s - self.asked_s >= SILENT_S
        return self.refused < REFUSED_MAX and not is_silent


_decode_settings = msgspec.json.Decoder(ClusterSettings).decode
_decode_node = msgspec.json.Decoder(NodeInfo).decode


def read_cluster_settings(register: Register) -> ClusterSettings:
    """The settings of a cluster. Raises StoreUnusable if they are of a later format."""
    settings = _decode_settings(register.value)
    if settings.format not in (FORMAT, GROWN_FORMAT):
        raise StoreUnusable(
            f"the cluster has format {settings.format}; this version of Penstock reads {FORMAT} "
            f"and {GROWN_FORMAT}"
        )
    return settings


def shards_in(register: Register) -> int:
    """How many shards the cluster has, by its settings of any format."""
    return _decode_settings(register.value).shards


def grow(shards: int) -> LogSteps[ClusterSettings]:
    """Gives the cluster so many shards, whose streams exist; its settings.

    Raises InvalidField if it has more already.
    """
    while True:
        found: Register | None = yield from until_answered(ReadRegister("cluster"))
        if found is not None:
            old = read_cluster_settings(found)
            if old.shards > shards:
                raise InvalidField(
                    f"shards: this cluster has {old.shards}, and cannot have fewer again"
                )
            if old.shards == shards:
                return old
            grown = msgspec.structs.replace(
                old, shards=shards, created_shards=old.homes, format=GROWN_FORMAT
            )
            with suppress(Mismatch, Unanswered):
                yield Swap("cluster", msgspec.json.encode(grown), found.revision)
                return grown
        yield Pause(RETRY_MS)


def read_node(register: Register) -> NodeInfo:
    """The node that a register describes."""
    return _decode_node(register.value)


def later_settings_in(settings: object) -> list[str]:
    """Those of `LATER_SETTINGS` that are set in the settings of a command."""
    given = settings if isinstance(settings, dict) else {}
    return [name for name in LATER_SETTINGS if given.get(name) not in (None, False)]


def check_settings_known(names: list[str], registers: Iterable[Register]) -> None:
    """Raises InvalidField if a node of the cluster does not know one of these settings."""
    for register in registers:
        info = read_node(register)
        unknown = [name for name in names if name not in info.settings]
        if unknown and info.state != "left":
            node = register.key.removeprefix("node.")
            raise InvalidField(
                f"{unknown[0]}: node {node!r} runs a version of Penstock that does not know it; "
                "upgrade that node first (if it was removed, start one of that name and stop it)"
            )


def create_or_read_settings(shards: int | None, replicas: int | None) -> LogSteps[ClusterSettings]:
    """The settings of the cluster; creates them if there are none.

    Raises InvalidField if there are other ones than those that are named.
    """
    settings = ClusterSettings(
        shards or SHARDS,
        replicas or REPLICAS,
        secrets.token_bytes(KEY_BYTES),
        secrets.token_bytes(IDENTITY_BYTES),
    )
    while True:
        found: Register | None = yield from until_answered(ReadRegister("cluster"))
        if found is not None:
            settings = read_cluster_settings(found)
            # It may have been started with the URL that is used again now, and have grown since.
            if shards is not None and not settings.homes <= shards <= settings.shards:
                check_shards(shards, settings.shards)
            _check_replicas(replicas, settings)
            return settings
        try:
            yield Swap("cluster", msgspec.json.encode(settings), 0)
        except (Mismatch, Unanswered):
            yield Pause(RETRY_MS)
            continue
        return settings


def check_shards(named: int, shards: int) -> None:
    """Raises InvalidField if a cluster has another number of shards than is named."""
    if named == shards:
        return
    if named > shards:
        hint = f"leave shards out; `penstock cluster reshard {named}` adds some while it runs"
    else:
        hint = "it cannot have fewer; leave shards out"
    raise InvalidField(f"shards: this cluster has shards={shards}, not {named}; {hint}")


def _check_replicas(named: int | None, settings: ClusterSettings) -> None:
    if named not in (None, settings.replicas):
        raise InvalidField(
            f"replicas: this cluster was created with replicas={settings.replicas}, which cannot "
            f"be changed to {named}; leave replicas out, or start a new cluster under another name"
        )


def set_register(key: str, value: bytes) -> LogSteps[int]:
    """Sets a register, whatever its value was; returns its revision.

    It is written also if it seems to have this value already: the read may lag.
    """
    while True:
        found: Register | None = yield from until_answered(ReadRegister(key))
        try:
            return (yield Swap(key, value, 0 if found is None else found.revision))  # type: ignore[no-any-return]
        except (Mismatch, Unanswered):
            yield Pause(RETRY_MS)
