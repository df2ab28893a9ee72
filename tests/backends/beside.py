"""Random commands to two stores, which must get the same replies from both.

Both use one manual clock. Each store has its own ids and receipts, so messages are compared by
their bodies, which are all different.
"""

import random
from typing import Any

from penstock.errors import MessageGone, PenstockError, StaleReceipt
from penstock.public import to_settings
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    Extend,
    Peek,
    Pull,
    Purge,
    Push,
    PushReply,
    Redrive,
    Release,
    Stats,
)

STEPS = 120
QUEUES = ("plain", "limited", "aged", "ordered.fifo", "dead", "dead.fifo")
SETTINGS: dict[str, dict[str, Any]] = {
    "dead": {},
    "dead.fifo": {"fifo": True},
    "plain": {"dead_letter": "dead", "max_receives": 3, "visibility_timeout": 20},
    "limited": {"max_messages": 12, "max_bytes": 200, "max_in_flight": 6, "delay": 2},
    "aged": {"priority_age": 8, "visibility_timeout": 20},
    "ordered.fifo": {
        "fifo": True,
        "dead_letter": "dead.fifo",
        "max_receives": 2,
        "visibility_timeout": 15,
        "dedup_by_content": True,
    },
}


class AllowedDifference(Exception):
    """The two stores differ in a way that is allowed; the next replies cannot be compared."""


class ServicePair:
    """Two services, and the pairs of claims that they returned.

    `moves_are_new` says that a redriven message is a new one in the other store; in the engine it
    keeps its number. `reopen`, if given, closes the other store and returns it opened again.
    """

    def __init__(self, memory, other, clock, seed, *, moves_are_new=False, reopen=None):
        self.both = [memory.service, other.service]
        self.clock = clock
        self.random = random.Random(seed)
        self.claims = []
        self.pushed = 0
        self._reopen = reopen
        self._moves_are_new = moves_are_new
        # Whether messages were redriven that are new ones in the other store.
        self.has_redriven = False

    def create_queues(self):
        for name, settings in SETTINGS.items():
            self.run(lambda _, name=name, words=settings: CreateQueue(name, to_settings(words)))

    def delete_queues(self):
        for name in SETTINGS:
            self.run(lambda _, name=name: DeleteQueue(name))

    def reopen(self):
        if self._reopen is not None:
            self.both[1] = self._reopen().service

    def run(self, make):
        """Runs the command that `make` returns for each of the two; the replies must be equal."""
        commands = [make(place) for place in range(2)]
        replies = [answer(*each) for each in zip(self.both, commands, strict=True)]
        in_order = getattr(commands[0], "state", "visible") == "visible"
        one, other = (shown(reply, in_order) for reply in replies)
        if self.has_redriven and one is StaleReceipt and other in (False, MessageGone):
            other = one
        if self.has_redriven and getattr(commands[0], "late", False) and one != other:
            # For the same reason a late receipt from before the redrive has no effect there.
            assert other in (False, MessageGone), commands[0]
            raise AllowedDifference
        assert one == other, commands[0]
        return replies

    def step(self):
        kinds = {
            self.push: 30,
            self.pull: 25,
            self.use_claim: 25,
            self.pass_time: 12,
            self.compare_all: 10,
            self.redrive: 3,
            self.configure: 2,
            self.purge: 0.5,
            self.reopen: 3 if self._reopen is not None else 0,
        }
        (kind,) = self.random.choices(list(kinds), weights=list(kinds.values()))
        kind()
        # The engine settles what is due in all queues, other stores only in the queue of a command.
        for queue in QUEUES:
            self.run(lambda _, queue=queue: Stats(queue))

    def maybe(self, chance, value):
        return value if self.random.random() < chance else None

    def push(self):
        chosen = self.random
        queue = chosen.choice(QUEUES)
        self.pushed += 1
        body = b"%d" % self.pushed
        fifo = queue.endswith("fifo")
        group = chosen.choice("abc") if fifo else self.maybe(0.3, chosen.choice("xy"))
        push = Push(
            queue,
            body * chosen.choice((1, 1, 1, 20)),
            delay_ms=self.maybe(0.2, chosen.choice((0, 1_000, 5_000))),
            priority=0 if fifo else chosen.choice((0, 0, 0, 1, 9)),
            ttl_ms=self.maybe(0.15, chosen.choice((3_000, 40_000))),
            dedup_id=self.maybe(0.2, chosen.choice("pqr")),
            group=group,
            attributes=self.maybe(0.1, {"n": "1", "b": b"\0"}),
        )
        self.run(lambda _: push)

    def pull(self):
        chosen = self.random
        pull = Pull(
            chosen.choice(QUEUES),
            chosen.choice((1, 1, 2, 5)),
            visibility_ms=self.maybe(0.3, chosen.choice((0, 2_000, 30_000))),
            wait_ms=0,
            attempt_id=self.maybe(0.15, chosen.choice("stu")),
            bytes_max=self.maybe(0.1, chosen.choice((1, 6, 50))),
            renew=chosen.random() < 0.3,
        )
        replies = self.run(lambda _: pull)
        if isinstance(replies[0], list):
            self.claims += zip(*replies, strict=True)
            del self.claims[:-40]

    def use_claim(self):
        if not self.claims:
            return
        chosen = self.random
        pair = chosen.choice(self.claims)
        late = chosen.random() < 0.3
        ms = chosen.choice((1, 5_000, 60_000))
        held_ms_max = self.maybe(0.3, 30_000)
        kind = chosen.choice(("delete", "delete", "extend", "release", "release later"))

        def make(place):
            claim = pair[place]
            if kind == "delete":
                return Delete(claim.queue, claim.receipt, late)
            if kind == "extend":
                return Extend(claim.queue, claim.receipt, ms, late, held_ms_max)
            return Release(claim.queue, claim.receipt, 0 if kind == "release" else ms, late)

        self.run(make)

    def pass_time(self):
        self.clock.advance(ms=self.random.choice((1, 500, 2_000, 10_000, 30_000, 120_000)))

    def compare_all(self):
        for queue in QUEUES:
            self.run(lambda _, queue=queue: Stats(queue))
            for state in ("visible", "delayed", "in_flight"):
                self.run(lambda _, queue=queue, state=state: Peek(queue, 100, state))

    def redrive(self):
        chosen = self.random
        queue = chosen.choice(("dead", "dead.fifo", "plain"))
        to = self.maybe(0.3, chosen.choice(QUEUES))
        limit = chosen.choice((1, 3, 1_000))
        self.run(lambda _: Redrive(queue, to, limit))
        self.has_redriven = self._moves_are_new

    def configure(self):
        chosen = self.random
        queue = chosen.choice(QUEUES)
        change = chosen.choice(
            (
                {"visibility_ms": 10_000},
                {"retention_ms": 60_000},
                {"retention_ms": 600_000},
                {"delay_ms": 0},
                {"body_bytes_max": 30},
                {"in_flight_max": 3},
                {"in_flight_max": None},
                {"messages_max": None, "bytes_max": None},
                {"priority_age_ms": 1_000},
                {"priority_age_ms": None},
            )
        )
        self.run(lambda _: ConfigureQueue(queue, change))

    def purge(self):
        queue = self.random.choice(QUEUES)
        self.run(lambda _: Purge(queue))


def answer(service, command):
    """The reply, or the error."""
    try:
        return service.execute(command)
    except PenstockError as error:
        return error


def shown(reply, in_order):
    """A reply without ids and receipts; messages are sorted if their order does not matter."""
    if isinstance(reply, PenstockError):
        return type(reply)
    if isinstance(reply, PushReply):
        return reply.duplicate
    if isinstance(reply, list):
        messages = [
            {
                name: getattr(each, name)
                for name in each.__struct_fields__
                if name not in ("id", "proof", "sequence")
            }
            for each in reply
        ]
        return messages if in_order else sorted(messages, key=lambda each: each["body"])
    if hasattr(reply, "oldest_age_ms"):
        # Counts begin anew with each process, and not every backend has them.
        names = [name for name in reply.__struct_fields__ if "oldest" not in name]
        return [getattr(reply, name) for name in names if name != "counts"]
    return reply
