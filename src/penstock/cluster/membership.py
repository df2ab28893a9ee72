"""The registers of a cluster: its settings, its nodes, and where shards are pinned.

cluster      the number of shards, the key of its receipts, the identity in its message ids
node.NAME    a node that was started, and whether it takes shards
owner.N      the owner of shard N (`owner`)
pin.N        the node that an operator has moved shard N to
archive      whether the shards' streams are archived: if so, only what is archived is purged
snapshots.N  the snapshots of shard N (`snapshots`)
"""

import secrets
from collections.abc import Iterable
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
ARCHIVE_KEY: Final = "archive"
ARCHIVE_ON: Final = b"on"
ARCHIVE_OFF: Final = b"off"
# After this many refused pings in a row a node has stopped; one may be a node that reconnects.
REFUSED_MAX: Final = 3
# A node that has answered no ping for so long has stopped, too.
SILENT_S: Final = 2.0
NodeState = Literal["up", "draining", "left"]
# The settings of queues that not all versions of Penstock know. Each node lists those that it knows
# in its register: as the next owner of a shard, a node would not follow one that it does not know.
LATER_SETTINGS: Final = ("priority_age_ms",)


class ClusterSettings(msgspec.Struct, frozen=True):
    """The settings with which a cluster was created; they never change."""

    shards: int
    replicas: int
    key: bytes
    identity: bytes
    format: int = FORMAT


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
    if settings.format != FORMAT:
        raise StoreUnusable(
            f"the cluster has format {settings.format}; this version of Penstock reads {FORMAT}"
        )
    return settings


def read_node(register: Register) -> NodeInfo:
    """The node that a register describes."""
    return _decode_node(register.value)


def later_settings_in(settings: object) -> list[str]:
    """Those of `LATER_SETTINGS` that are set in the settings of a command."""
    given = settings if isinstance(settings, dict) else {}
    return [name for name in LATER_SETTINGS if given.get(name) is not None]


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


def create_or_read_settings(shards: int, replicas: int) -> LogSteps[ClusterSettings]:
    """The settings of the cluster; creates them if there are none."""
    settings = ClusterSettings(
        shards, replicas, secrets.token_bytes(KEY_BYTES), secrets.token_bytes(IDENTITY_BYTES)
    )
    while True:
        found: Register | None = yield from until_answered(ReadRegister("cluster"))
        if found is not None:
            return read_cluster_settings(found)
        try:
            yield Swap("cluster", msgspec.json.encode(settings), 0)
        except (Mismatch, Unanswered):
            yield Pause(RETRY_MS)
            continue
        return settings


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
