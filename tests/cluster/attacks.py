"""Requests to the nodes of a cluster that could delay others, and the probe that measures them.

The suite runs a few of them with small figures, `make score` all.
"""

import asyncio
import itertools
import struct

from penstock.cluster.jetstream import open_client
from penstock.cluster.placement import first_shard
from penstock.service import (
    CreateQueue,
    DeleteQueue,
    DescribeQueues,
    PushMany,
    Redrive,
    Stats,
)
from penstock.wire import shard_protocol as protocol
from penstock.wire.frames.bodies import encode_command
from tests.conftest import FULL
from tests.measure import IN_SCORE
from tests.server.probe import Probe
from tests.server.sqs import test_crowds
from tests.server.sqs.test_crowds import BULK, service_at

SHARDS = 4
# A queue in the shard of `long`: a redrive to it is one command, to others one for each message.
BESIDE = next(
    name
    for name in (f"beside-{number}" for number in itertools.count())
    if first_shard(name, SHARDS) == first_shard("long", SHARDS)
)
QUEUES = 10_000 if FULL else 300 if IN_SCORE else 30
MESSAGES = 200_000 if FULL else 20_000 if IN_SCORE else 10_000
# A probe waits for other programs, too; a request that is slow by itself is so in every round.
ROUNDS = 4
# More than nodes send in one message, and less than NATS delivers.
MESSAGE_BYTES = 2_000_000 if IN_SCORE else 500_000


class NodeCrowd:
    """The nodes of a cluster with many queues and messages, a client, and a probe beside."""

    def __init__(self, cluster, ports):
        self.cluster = cluster
        self.ports = ports
        self.service = service_at(cluster.url)
        pids = {name: node["pid"] for name, node in cluster.nodes.items()}
        # The endpoint refuses the request of this probe by itself, without asking an owner: what
        # it waits for is the event loop that also serves the shards of the node.
        self._probe = Probe("refused", *((ports[name], pids[name]) for name in ports))
        # The id of the first message, for the cases of `tests.server.sqs.test_crowds`.
        self.first = ""

    def fill(self):
        settings = {"max_receives": 9, "dead_letter": "dead"}
        self.service.execute(CreateQueue("long", settings))
        for name in ("later", "in", BESIDE):
            self.service.execute(CreateQueue(name))
        self.service.execute(CreateQueue("in-order", {"fifo": True}))
        for number in range(QUEUES):
            self.service.execute(CreateQueue(f"queue-{number:05}", settings))
        self.first = self.service.execute(PushMany("long", [b"first"]))[0].id
        for _ in range(MESSAGES // BULK):
            self.service.execute(PushMany("long", [b"x"] * BULK))
            self.service.execute(PushMany("later", [b"x"] * BULK, delay_ms=3_600_000))

    def longest_ms(self, request, most_ms):
        """The longest wait of a probe at any node during a request: the least of some rounds."""
        least_ms = float("inf")
        for _ in range(ROUNDS):
            with self._probe.measuring() as seen:
                request()
            least_ms = min(least_ms, seen.longest_ms)
            if least_ms <= most_ms:
                break
        return least_ms

    def send(self, subject, message):
        """Sends a message to a node, and waits until the owner of `long` answers what is after."""

        async def work():
            client = await open_client(self.cluster.address, "test")
            name = self.cluster.address.name
            if subject == "serve":
                shard = first_shard("long", SHARDS)
                term = (await self.cluster.status()).shards[shard].term
                to = f"{name}.serve.{shard}.{term}"
            else:
                to = f"{name}.{subject}"
            await client.publish(to, message, reply=client.new_inbox() + ".1")
            await client.flush()
            await client.close()

        asyncio.run(work())
        self.service.execute(Stats("long"))

    def close(self):
        self._probe.close()
        self.service.close()


def item(token, data):
    """One item of a message to an owner (`penstock.wire.shard_protocol`)."""
    return struct.pack("<QI", token, len(data)) + data


def filled(data, size_bytes=MESSAGE_BYTES):
    """A message of items with the same data, each with a token of its own."""
    count = size_bytes // len(item(0, data))
    return b"".join(item(token, data) for token in range(1, count + 1))


COMMANDS = {
    **test_crowds.COMMANDS,
    "a redrive": lambda service, _: service.execute(Redrive("long", BESIDE, BULK)),
    "a queue in use": lambda service, _: service.execute(DeleteQueue("dead", force=False)),
}
DESCRIBE_ALL = protocol.COMMAND + encode_command(0, DescribeQueues(limit=2**31))
# What a node receives from routers and other nodes: the subject, and the message.
MESSAGES_BETWEEN_NODES = {
    "empty items": ("serve", filled(b"")),
    "items of no kind": ("serve", filled(b"?")),
    "commands without a header": ("serve", filled(protocol.COMMAND + b"12345")),
    "commands of no kind": ("serve", filled(protocol.COMMAND + bytes(10))),
    "cancels": ("serve", filled(protocol.CANCEL)),
    "ends of waits": ("serve", filled(protocol.END_WAIT)),
    "statistics": ("serve", filled(protocol.COMMAND + encode_command(0, Stats("long")))),
    "descriptions of all queues": ("serve", filled(DESCRIBE_ALL, 2_000)),
    "parts of a byte": ("serve", item(1, protocol.COMMAND_PART + b"x") * (MESSAGE_BYTES // 14)),
    "cut short": ("serve", filled(b"")[:-5] + b"\xff" * 5),
    "a long word": ("node.node1.ask", b"yield " + b"9" * MESSAGE_BYTES),
    "many words": ("node.node1.ask", b"a " * (MESSAGE_BYTES // 2)),
    "no number": ("node.node1.ask", b"yield \xc2\xb2"),
    "no shard": ("grown.x", b""),
    "no owner": ("owned.\xc2\xb2", b"1"),
}
IN_SUITE = (
    *("metrics", "sources", "a message of 1 MiB", "a pull of 10,000", "a batch of deletes"),
    *("settings", "a queue in use", "empty items", "parts of a byte"),
    *("a long word", "no number", "no owner"),
)


def chosen(cases):
    """The names of the cases that are run."""
    return [name for name in cases if IN_SCORE or name in IN_SUITE]
