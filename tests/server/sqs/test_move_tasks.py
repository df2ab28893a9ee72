"""Move tasks that are resumed while requests come, in front of a service that takes its time."""

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


class Distant:
    """An engine; one command of a class, after as many as are skipped, waits to be let through."""

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


class World:
    """Move tasks of a server, with some dead letters, and of one that is started after it."""

    async def __aenter__(self):
        self.distant = Distant()
        distant: Any = self.distant
        self.service = AwaitedService(distant)
        for command in (
            CreateQueue("dead"),
            CreateQueue("source", {"dead_letter": "dead", "max_receives": 1}),
            *(Push("dead", b"x") for _ in range(100)),
        ):
            await self.distant.execute(command)
        self.moves = self.restarted()
        self.caller = Caller(HOME, "", "http://localhost")
        return self

    def restarted(self):
        return MoveActions(QueueLookup(self.service, QueueDirectory(HOME), Windows()))

    async def __aexit__(self, *_):
        self.distant.open.set()
        await self.moves.close()
        await self.service.close()

    def begin(self, steps):
        return asyncio.ensure_future(result_of(self.service.run(steps)))

    def workers(self):
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("move ")]

    async def kept(self):
        info = await self.distant.execute(DescribeQueue("dead"))
        return info.settings.annotations.get(NOTE, "")


def run(story):
    async def scene():
        async with World() as world:
            await story(world)

    asyncio.run(scene())


def test_a_task_that_is_started_while_others_are_resumed_is_run_once():
    async def story(world):
        # An earlier task that has ended, so that the queue has a note for `resume` to find.
        await world.begin(world.moves.start(START, world.caller))
        (handle,) = [each.task for each in await listed(world)]
        await world.begin(
            world.moves.cancel(model.CancelMessageMoveTaskRequest(handle), world.caller)
        )
        world.distant.held = ConfigureQueue
        starting = world.begin(world.moves.start(START, world.caller))
        await world.distant.arrived.wait()
        await world.begin(world.moves.resume())
        world.distant.open.set()
        await starting
        assert len(world.workers()) == 1

    run(story)


async def listed(world):
    asked = model.ListMessageMoveTasksRequest(DEAD_ARN)
    return (await world.begin(world.moves.list(asked, world.caller))).results


def test_a_task_that_is_cancelled_while_it_is_resumed_does_not_run():
    async def story(world):
        await world.begin(world.moves.start(START, world.caller))
        (handle,) = [each.task for each in await listed(world)]
        await world.moves.close()
        world.moves = world.restarted()
        before = await world.distant.execute(Stats("dead"))
        world.distant.held = Stats
        resuming = world.begin(world.moves.resume())
        await world.distant.arrived.wait()
        await world.begin(
            world.moves.cancel(model.CancelMessageMoveTaskRequest(handle), world.caller)
        )
        world.distant.open.set()
        await resuming
        assert world.workers() == []
        assert (await listed(world))[0].status == "CANCELLED"
        assert '"CANCELLED"' in await world.kept()
        assert (await world.distant.execute(Stats("dead"))).messages == before.messages

    run(story)


def test_a_queue_that_is_deleted_while_tasks_are_resumed_leaves_the_others_resumed():
    async def story(world):
        for command in (
            CreateQueue("a-dead"),
            CreateQueue("a-source", {"dead_letter": "a-dead", "max_receives": 1}),
            Push("a-dead", b"x"),
            Push("a-dead", b"x"),
        ):
            await world.distant.execute(command)
        other = model.StartMessageMoveTaskRequest(DEAD_ARN.replace("dead", "a-dead"), SOURCE_ARN, 1)
        await world.begin(world.moves.start(other, world.caller))
        await world.begin(world.moves.start(START, world.caller))
        await world.moves.close()
        world.moves = world.restarted()
        world.distant.held = Stats
        resuming = world.begin(world.moves.resume())
        await world.distant.arrived.wait()
        await world.distant.engine.execute(DeleteQueue("a-dead"))
        world.distant.open.set()
        await resuming
        assert len(world.workers()) == 1

    run(story)


@pytest.mark.parametrize("held", [DescribeQueue, ConfigureQueue])
def test_a_task_that_ends_does_not_overwrite_the_note_of_the_next(held):
    async def story(world):
        await world.begin(world.moves.start(START, world.caller))
        (handle,) = [each.task for each in await listed(world)]
        # The first description is that of the queue that the request names.
        world.distant.held, world.distant.skipped = held, int(held is DescribeQueue)
        cancelling = world.begin(
            world.moves.cancel(model.CancelMessageMoveTaskRequest(handle), world.caller)
        )
        await world.distant.arrived.wait()
        await world.begin(world.moves.start(START, world.caller))
        world.distant.open.set()
        await cancelling
        kept = await world.kept()
        assert (kept.count('"CANCELLED"'), kept.count('"RUNNING"')) == (1, 1)

    run(story)
