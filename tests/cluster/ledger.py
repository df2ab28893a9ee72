"""Clients that record every answer, to check that faults make none of them untrue."""

import asyncio
import itertools
from contextlib import suppress

from penstock.errors import BackendLost, RequestError
from tests.conftest import FULL

# The pause of a client between two messages. Faults last seconds; clients at full speed would take
# the processor from the nodes.
PACE_S = 0 if FULL else 0.01


async def pace():
    """Pauses between two messages of a client."""
    await asyncio.sleep(PACE_S)


class LoadLedger:
    """Pushes, pulls and deletes on some queues, and records every answer."""

    def __init__(self, queues, names):
        self.queues = queues
        self.names = names
        self.pushed = set()
        self.pulled = set()
        self.deleted = set()
        self.wrong = []
        self.answers = 0
        self.answered = asyncio.Event()
        self._stop = asyncio.Event()
        self._numbers = itertools.count()
        self._tasks = []

    async def begin(self, **settings):
        for name in self.names:
            await self.queues.create(name, visibility_timeout=600, **settings)
        for name in self.names:
            self._tasks.append(asyncio.create_task(self._push(name)))
            self._tasks.append(asyncio.create_task(self._pull(name)))

    def _count(self):
        self.answers += 1
        self.answered.set()

    async def next_answers(self, count):
        """Waits for this many further answers."""
        wanted = self.answers + count
        while self.answers < wanted:
            self.answered.clear()
            await self.answered.wait()

    async def _push(self, name):
        while not self._stop.is_set():
            number = next(self._numbers)
            with suppress(BackendLost):
                await self.queues.push(name, b"%d" % number, dedup_id=str(number))
                self.pushed.add(number)
                self._count()
            await pace()

    async def _pull(self, name):
        while not self._stop.is_set():
            with suppress(BackendLost):
                claim = await self.queues.pull(name, wait=1)
                if claim is not None:
                    self._note(claim)
                    await self._delete(claim)

    def _note(self, claim):
        number = int(claim.body)
        # Claims last longer than the test and none is given up: no message is given out again.
        if number in self.pulled:
            self.wrong.append(f"{number} was claimed twice, now under epoch {claim.epoch}")
        if number in self.deleted:
            self.wrong.append(f"{number} came back after its delete was answered")
        self.pulled.add(number)
        self._count()

    async def _delete(self, claim):
        with suppress(RequestError):
            await self.queues.delete(claim)
            self.deleted.add(int(claim.body))
            self._count()

    async def end(self):
        """Ends the clients, pulls what is left, and returns the violations that were found."""
        self._stop.set()
        await asyncio.gather(*self._tasks)
        for name in self.names:
            while claims := await self.queues.pull_many(name, 100):
                for claim in claims:
                    self._note(claim)
        held = 0
        for name in self.names:
            held += (await self.queues.stats(name)).in_flight
        lost = self.pushed - self.pulled
        # A claim whose answer was lost hides its message until it expires: that is no loss.
        if len(lost) > held:
            self.wrong.append(f"{len(lost)} answered pushes are gone, {held} are in flight")
        return self.wrong
