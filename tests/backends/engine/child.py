"""A program that tests kill: an engine under load, which prints a line for each of its answers.

    child.py DIRECTORY [OPERATION:COUNT]

It prints `ready SECONDS CPU_SECONDS` when the store is open, with the elapsed and the processor
time that opening took; `pushed N` after the answer to a push; `pulled N EPOCH SINCE UNTIL` for a
claim; `deleting N` before it sends a delete, and `deleted N` after the answer.
With OPERATION:COUNT it kills itself at the COUNT-th operation of this kind: write, sync, create,
remove or archive in the journal, replace (a snapshot gets its final name), or open (any operation
while the store is opened).
"""

import os
import signal
import sys
import threading
import time

from penstock.backends.engine import upkeep
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.store import open_engine
from penstock.client import Queues
from penstock.errors import QueueExists
from penstock.journal import file_journal, room
from penstock.journal.disk import OsStorage

VISIBILITY_MS = 500
# It ends after this time if it is not killed; a busy machine needs much longer than an idle one.
RUN_S_MAX = 300
upkeep.SLICE = 50  # type: ignore[misc]
upkeep.GROWTH_BYTES_MIN = 60_000  # type: ignore[misc]
file_journal._MARK_BYTES = 10_000  # type: ignore[misc]
room._AMPLE_BYTES = 10_000  # type: ignore[misc]


class KillPoint:
    """Kills this process at the chosen point."""

    def __init__(self, text):
        self.operation, _, count = text.partition(":")
        self.left = int(count or 0)
        self.is_open = False

    def reach(self, operation):
        if operation == self.operation or (self.operation == "open" and not self.is_open):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Killing:
    """A storage, directory, file or map that reaches its kill point before and after each call."""

    WRAPPED = ("open", "create", "map")

    def __init__(self, kill_point, inner):
        self._kill_point = kill_point
        self._inner = inner

    def __getattr__(self, name):
        inner = getattr(self._inner, name)
        if not callable(inner):
            return inner

        def call(*words, **options):
            self._kill_point.reach(name)
            reply = inner(*words, **options)
            self._kill_point.reach(name)
            return Killing(self._kill_point, reply) if name in self.WRAPPED else reply

        return call

    def __getitem__(self, key):
        return self._inner[key]

    def __setitem__(self, key, value):
        self._kill_point.reach("write")
        # In two halves, so that a kill between them leaves a torn entry.
        start, stop, _ = key.indices(len(self._inner))
        middle = (start + stop) // 2
        self._inner[start:middle] = bytes(value)[: middle - start]
        self._kill_point.reach("write")
        self._inner[middle:stop] = bytes(value)[middle - start :]


def print_line(*words):
    # In one write, so that a kill cannot leave half a line.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def produce(queues, numbers, step):
    while True:
        while queues.stats("q").messages > 300:
            # The consumers must keep up, so that the journal has something to drop.
            threading.Event().wait(0.005)
        batch = [next(numbers) for _ in range(step)]
        bodies = [b"%d " % number * 40 for number in batch]
        for number, reply in zip(batch, queues.push_many("q", bodies), strict=True):
            assert reply.id
            print_line("pushed", number)


def consume(queues, step):
    while True:
        for claim in queues.pull_many("q", step, wait=1):
            number = int(claim.body.split()[0])
            assert claim.body == b"%d " % number * 40
            since_ms = claim.deadline_ms - VISIBILITY_MS
            print_line("pulled", number, claim.epoch, since_ms, claim.deadline_ms)
            if number % 10 or queues.stats("q").messages > 200:
                print_line("deleting", number)
                queues.delete(claim)
                print_line("deleted", number)


def main(path, kill_point=""):
    point = KillPoint(kill_point)
    replace = os.replace

    def replace_or_kill(*words, **options):
        point.reach("replace")
        replace(*words, **options)
        point.reach("replace")

    os.replace = replace_or_kill
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    engine = open_engine(
        path + "/store",
        file_bytes=32_768,
        storage=Killing(point, OsStorage()),
        archive=path + "/archive",
    )
    point.is_open = True
    print_line("ready", time.monotonic() - began_s, time.process_time() - began_cpu_s)
    queues = Queues(BlockingEngine(engine))
    try:
        queues.create("q", visibility_timeout=VISIBILITY_MS / 1_000)
    except QueueExists as error:
        raise AssertionError("the queue has other settings after a restart") from error
    numbers = iter(range(int(time.time() * 1_000_000), 1 << 62))
    for work in (
        lambda: produce(queues, numbers, 1),
        lambda: produce(queues, numbers, 7),
        lambda: consume(queues, 1),
        lambda: consume(queues, 5),
    ):
        threading.Thread(target=work, daemon=True).start()
    threading.Event().wait(RUN_S_MAX)


if __name__ == "__main__":
    main(*sys.argv[1:])
