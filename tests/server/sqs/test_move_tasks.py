"""Move tasks that are resumed while requests arrive, with a slow backend."""

import asyncio
from typing import Any

import pytest

from penstock.backends.engine.asynchronous import AsyncEngine
from penstock.backends.engine.engine import Engine
from penstock.backends.loop import AwaitedService, result_of
from penstock.server.sqs.lookup import Caller, QueueLookup, Windows
from penstock.server.sqs.moves import NOTE, MoveActions
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    DescribeQueue,
    Push,
    Stats,
)
from penstock.wire.sqs import model
from penstock.wire.sqs.address import Owner, QueueDirectory

HOME = Owner("000000000000", "us-east-1")
DEAD_ARN = "arn:aws:sqs:us-east-1:000000000000:dead"
SOURCE_ARN = DEAD_ARN.replace("dead", "source")
START = model.StartMessageMoveTaskRequest(DEAD_ARN, SOURCE_ARN, 1)


class HeldEngine:
    """An engine of which one command of the class `held`, after `skipped` others, has to wait.

    `arrived` is set when it waits; it continues when the test sets `open`.
    """

    redrive_max = 1_000

    def __init__(self):
        self.engine = AsyncEngine(Engine())
        self.LACKS = self.engine.LACKS
        self.held = None
        self.skipped = 0
        self.arrived = asyncio.Event()
        self.open = asyncio.Event()

    async def execute(self, command):
        if type(command) is self.held and not self.skipped:
            self.held = None
            self.arrived.set()
            await self.open.wait()
        else:
            self.skipped -= type(command) is self.held
            await asyncio.sleep(0)
        return await self.engine.execute(command)

    async def close(self):
        await self.engine.close()


class MoveServers:
    """The move tasks of a server with dead letters, and of another one after a restart."""

    async def __aenter__(self):
        self.backend = HeldEngine()
        backend: Any = self.backend
        self.service = AwaitedService(backend)
        for command in (
            CreateQueue("dead"),
            CreateQueue("source", {"dead_letter": "dead", "max_receives": 1}),
            *(Push("dead", b"x") for _ in range(100)),
        ):
            await self.backend.execute(command)
        self.moves = self.restarted()
        self.caller = Caller(HOME, "", "http://localhost", confined=False, holder="test")
        return self

    def restarted(self):
        return MoveActions(QueueLookup(self.service, QueueDirectory(HOME), Windows()))

    async def __aexit__(self, *_):
        self.backend.open.set()
        await self.moves.close()
        await self.service.close()

    def begin(self, steps):
        return asyncio.ensure_future(result_of(self.service.run(steps)))

    def workers(self):
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("move ")]

    async def kept(self):
        info = await self.backend.execute(DescribeQueue("dead"))
        return info.settings.annotations.get(NOTE, "")


def run(check):
    async def main():
        async with MoveServers() as servers:
            await check(servers)

    asyncio.run(main())


def test_a_task_that_is_started_while_others_are_resumed_is_run_once():
    async def check(servers):
        # An earlier task that has ended, so that the queue has a note for `resume` to find.
        await servers.begin(servers.moves.start(START, servers.caller))
        (handle,) = [each.task for each in await listed(servers)]
        await servers.begin(
            servers.moves.cancel(model.CancelMessageMoveTaskRequest(handle), servers.caller)
        )
        servers.backend.held = ConfigureQueue
        starting = servers.begin(servers.moves.start(START, servers.caller))
        await servers.backend.arrived.wait()
        await servers.begin(servers.moves.resume())
        servers.backend.open.set()
        await starting
        assert len(servers.workers()) == 1

    run(check)


async def listed(servers):
    asked = model.ListMessageMoveTasksRequest(DEAD_ARN)
    return (await servers.begin(servers.moves.list(asked, servers.caller))).results


def test_a_task_that_is_cancelled_while_it_is_resumed_does_not_run():
    async def check(servers):
        await servers.begin(servers.moves.start(START, servers.caller))
        (handle,) = [each.task for each in await listed(servers)]
        await servers.moves.close()
        servers.moves = servers.restarted()
        before = await servers.backend.execute(Stats("dead"))
        servers.backend.held = Stats
        resuming = servers.begin(servers.moves.resume())
        await servers.backend.arrived.wait()
        await servers.begin(
            servers.moves.cancel(model.CancelMessageMoveTaskRequest(handle), servers.caller)
        )
        servers.backend.open.set()
        await resuming
        assert servers.workers() == []
        assert (await listed(servers))[0].status == "CANCELLED"
        assert '"CANCELLED"' in await servers.kept()
        assert (await servers.backend.execute(Stats("dead"))).messages == before.messages

    run(check)


def test_a_queue_that_is_deleted_while_tasks_are_resumed_leaves_the_others_resumed():
    async def check(servers):
        for command in (
            CreateQueue("a-dead"),
            CreateQueue("a-source", {"dead_letter": "a-dead", "max_receives": 1}),
            Push("a-dead", b"x"),
            Push("a-dead", b"x"),
        ):
            await servers.backend.execute(command)
        other = model.StartMessageMoveTaskRequest(DEAD_ARN.replace("dead", "a-dead"), SOURCE_ARN, 1)
        await servers.begin(servers.moves.start(other, servers.caller))
        await servers.begin(servers.moves.start(START, servers.caller))
        await servers.moves.close()
        servers.moves = servers.restarted()
        servers.backend.held = Stats
        resuming = servers.begin(servers.moves.resume())
        await servers.backend.arrived.wait()
        await servers.backend.engine.execute(DeleteQueue("a-dead"))
        servers.backend.open.set()
        await resuming
        assert len(servers.workers()) == 1

    run(check)


@pytest.mark.parametrize("held", [DescribeQueue, ConfigureQueue])
def test_a_task_that_ends_does_not_overwrite_the_note_of_the_next(held):
    async def check(servers):
        await servers.begin(servers.moves.start(START, servers.caller))
        (handle,) = [each.task for each in await listed(servers)]
        # The first DescribeQueue is for the queue of the request, and is skipped.
        servers.backend.held, servers.backend.skipped = held, int(held is DescribeQueue)
        cancelling = servers.begin(
            servers.moves.cancel(model.CancelMessageMoveTaskRequest(handle), servers.caller)
        )
        await servers.backend.arrived.wait()
        await servers.begin(servers.moves.start(START, servers.caller))
        servers.backend.open.set()
        await cancelling
        kept = await servers.kept()
        assert (kept.count('"CANCELLED"'), kept.count('"RUNNING"')) == (1, 1)

    run(check)
