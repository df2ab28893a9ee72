"""Maps queues to shards and shards to nodes: pure functions of names and numbers.

A queue's home shard is a hash of its name and of the number of shards that the cluster was created
with, so it never changes. If the cluster has more shards now, the queue belongs to its home shard
or to one that was added. A hot queue is spread over `k` consecutive shards; a push goes to the
shard of its group, or of its dedup id, or to each shard in turn. The nodes are ranked
for a shard by a hash of both names (rendezvous hashing): if a node joins or leaves, only its own
shards move.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Final

IDENTITY_BYTES: Final = 5


def _hash(*parts: str) -> int:
    # A name with surrogates is refused by the engine; here it must only not fail.
    text = "\0".join(parts).encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8)
    return int.from_bytes(digest.digest(), "big")


@lru_cache(maxsize=4_096)
def first_shard(queue: str, homes: int) -> int:
    """The home shard of a queue; `homes` is with how many shards the cluster was created."""
    return _hash("queue", queue) % homes


def grown_shard(queue: str, homes: int, shards: int) -> int:
    """The shard that a queue belongs to in a cluster that has grown to this many shards.

    Each shard that is added gets an equal share of the queues of all others; no queue moves
    otherwise. So the next shard to which this queue moves is numbered n or above in `homes / n` of
    all cases, and if it is in shard m, the next one is in `(m + 1) / n`.
    """
    shard, after = first_shard(queue, homes), homes
    while True:
        chance = (_hash("grown", str(after), queue) + 1) / 2**64
        following = int(after / chance)
        if following >= shards:
            return shard
        shard, after = following, following + 1


def read_shard(text: str) -> int | None:
    """The number of a shard in a message; None if it is none."""
    return int(text) if len(text) <= 4 and text.isascii() and text.isdecimal() else None


def shards_of(queue: str, homes: int, spread: int = 1) -> list[int]:
    """The shards of a queue that is spread over `spread` shards from its home shard on."""
    first = first_shard(queue, homes)
    return [(first + step) % homes for step in range(min(spread, homes))]


def shard_for(key: str, places: list[int]) -> int:
    """The one of a queue's shards that a group, or a dedup id, belongs to."""
    return places[_hash("key", key) % len(places)]


def ranked(shard: int, nodes: Collection[str], pinned: str | None = None) -> list[str]:
    """The nodes by rank for a shard: the first should own it, the second is its standby."""
    order = sorted(nodes, key=lambda node: _hash("node", str(shard), node))
    if pinned in nodes and pinned is not None:
        order.remove(pinned)
        order.insert(0, pinned)
    return order


class Elsewhere(Mapping[str, int]):
    """Maps the name of every queue whose home is another shard to that shard."""

    def __init__(self, shard: int, homes: int) -> None:
        self._shard = shard
        self._homes = homes

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and first_shard(name, self._homes) != self._shard

    def __getitem__(self, name: str) -> int:
        if name not in self:
            raise KeyError(name)
        return first_shard(name, self._homes)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


# A message id is the cluster's identity, the shard and the message's number (`core.receipts`).


def shard_identity(identity: bytes, shard: int) -> bytes:
    """The first part of the ids of this shard's messages."""
    return identity[:IDENTITY_BYTES] + shard.to_bytes(2, "big")


def shard_of_id(message_id: object, identity: bytes) -> int | None:
    """The shard of a message id; None if it is not an id of this cluster."""
    if not isinstance(message_id, str) or len(message_id) != 36:
        return None
    digits = message_id[:8] + message_id[9:13] + message_id[15:17]
    try:
        found = bytes.fromhex(digits)
    except ValueError:
        return None
    is_ours = found[:IDENTITY_BYTES] == identity[:IDENTITY_BYTES]
    return int.from_bytes(found[IDENTITY_BYTES:], "big") if is_ours else None


def shard_key(key: bytes, shard: int) -> bytes:
    """The key that signs a shard's receipts; those of another shard are not valid there."""
    return hashlib.blake2b(b"penstock shard %d" % shard, key=key, digest_size=32).digest()
