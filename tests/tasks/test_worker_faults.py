"""Row 26: commands of a worker that fail half-way: no task is lost, and the worker can end."""

import asyncio
import threading
from typing import Any

import pytest

from penstock import ManualClock
from penstock.backends import open_async_service
from penstock.errors import BackendLost, RequestError
from penstock.service import Batch, Claim, Delete, Extend, Pull, Push, Stats
from penstock.steps import await_steps
from penstock.tasks import TaskApp
from penstock.tasks.commands import push_creating
from penstock.tasks.envelope import Envelope
from penstock.tasks.names import TASK_QUEUE
from penstock.tasks.worker.options import WorkerOptions
from penstock.tasks.worker.process import WorkerProcess
from tests.tasks.conftest import TIMEOUT_S


class InterceptedService:
    """A real service, with code of a test around each of its commands."""

    def __init__(self, service):
        self.service = service
        self.LACKS = service.LACKS
        self.redrive_max = service.redrive_max
        self.stop: Any = None

    async def before(self, command):
        """Called before a command is executed; what it raises is raised to the caller."""

    async def after(self, command, reply):
        """Called with a command's reply; what it returns is the caller's reply."""
        return reply

    async def execute(self, command):
        await self.before(command)
        return await self.after(command, await self.service.execute(command))


def items_of(command, kind):
    """The items of this kind in a batch; none for other commands."""
    items = command.items if isinstance(command, Batch) else ()
    return [item for item in items if isinstance(item, kind)]


def work_on(app, make_service, pushes=(), visibility_ms=30, **options):
    """Runs a worker process on a store in memory until it ends; the store's last counts."""

    async def whole():
        service = make_service(await open_async_service("memory:", app.clock))
        # The shortest claims on the system's clock, by which a worker extends them; in the store
        # they do not run out, because its clock stands still.
        process = WorkerProcess(
            app, service, WorkerOptions("app", visibility_ms=visibility_ms, **options)
        )
        service.stop = process.stop
        for push in pushes:
            await await_steps(service.service.execute, push_creating(push, TASK_QUEUE))
        await process.run()
        stats = await service.service.execute(Stats("tasks"))
        await service.service.close()
        return stats

    return asyncio.run(asyncio.wait_for(whole(), TIMEOUT_S))


@pytest.fixture
def app():
    return TaskApp("memory:", clock=ManualClock())


def push_of(task, *args):
    return task.push_of(Envelope(task.name, task.prepare(*args).encoded()))


@pytest.mark.parametrize("kind", [Pull, Extend])
def test_a_fault_in_a_step_ends_the_worker_and_is_not_passed_over(app, kind):
    """Without the step the process would stay, pull nothing or extend nothing, and say nothing."""
    going_on = threading.Event()

    @app.task
    def work() -> None:
        assert going_on.wait(TIMEOUT_S)

    class Faulty(InterceptedService):
        def __init__(self, service):
            super().__init__(service)
            self.finished = asyncio.Event()

        async def before(self, command):
            if isinstance(command, kind):
                raise ZeroDivisionError("a fault in the program")
            if items_of(command, kind):
                going_on.set()
                await self.finished.wait()
                raise ZeroDivisionError("a fault in the program")

        async def after(self, command, reply):
            if items_of(command, Delete):
                self.finished.set()
            return reply

    with pytest.raises(ZeroDivisionError, match="a fault in the program"):
        work_on(app, Faulty, [push_of(work)])


def test_lost_tasks_that_end_while_a_finish_fails_do_not_keep_the_worker_from_ending(app):
    gate = asyncio.Event()
    loops = set()
    all_ended = threading.Event()

    @app.task
    async def work(name: str) -> None:
        loops.add(asyncio.get_running_loop())
        await gate.wait()
        if name == "last":
            # The others end in the turn of the loop before.
            for _ in range(3):
                await asyncio.sleep(0)
            all_ended.set()

    class OneFinishFails(InterceptedService):
        claims: tuple[Claim, ...] = ()
        failed = False

        async def before(self, command):
            if items_of(command, Delete) and not self.failed:
                self.failed = True
                raise BackendLost("the connection was lost")

        async def after(self, command, reply):
            if isinstance(command, Pull):
                self.claims = (*self.claims, *reply)
                if len(self.claims) == 3:
                    # Another has ended the first task, as if its claim had run out.
                    claim = self.claims[0]
                    await self.service.execute(Delete(claim.queue, claim.proof))
            extended = items_of(command, Extend) and len(loops)
            if extended and any(isinstance(each, RequestError) for each in reply):
                # The worker's loop does not go on before both tasks are there to be finished.
                loops.pop().call_soon_threadsafe(gate.set)
                assert all_ended.wait(TIMEOUT_S)
            if items_of(command, Delete):
                self.stop()
            return reply

    pushes = [push_of(work, name) for name in ("lost", "kept", "last")]
    assert work_on(app, OneFinishFails, pushes).messages == 0


def test_a_task_that_is_lost_while_it_waits_for_a_token_does_not_keep_a_burst_from_ending(app):
    ran = []

    @app.task(rate="1/s")
    def work(name: str) -> None:
        ran.append(name)

    class LosesAClaim(InterceptedService):
        async def after(self, command, reply):
            for claim in reply if isinstance(command, Pull) else ():
                if b"lost" in claim.body:
                    await self.service.execute(Delete(claim.queue, claim.proof))
            extended = items_of(command, Extend)
            if extended and any(isinstance(each, RequestError) for each in reply):
                # The second token is there.
                app.clock.advance(seconds=1)
            return reply

    pushes = [push_of(work, name) for name in ("first", "lost")]
    assert work_on(app, LosesAClaim, pushes, burst=True).messages == 0
    assert ran == ["first"]


def test_a_retry_whose_push_had_no_answer_in_a_batch_is_pushed_again(app):
    attempts = []

    @app.task(backoff=0)
    def work(name: str) -> None:
        attempts.append(name)
        if len(attempts) == 1:
            raise ValueError("once")

    class LosesAnAnswer(InterceptedService):
        lost = False

        async def execute(self, command):
            if items_of(command, Push) and not self.lost:
                # Where Amazon SQS is lost half-way there is an error in an item's place.
                self.lost = True
                return [BackendLost("the connection was lost")]
            return await super().execute(command)

    assert work_on(app, LosesAnAnswer, [push_of(work, "x")], burst=True).messages == 0
    assert attempts == ["x", "x"]


def test_a_task_whose_delete_had_no_answer_in_a_batch_is_deleted_again_and_does_not_run_again(app):
    ran = []

    @app.task
    def work() -> None:
        ran.append(1)

    class LosesADelete(InterceptedService):
        lost = False

        async def execute(self, command):
            if items_of(command, Delete) and not self.lost:
                self.lost = True
                return [BackendLost("the connection was lost")]
            return await super().execute(command)

    assert work_on(app, LosesADelete, [push_of(work)], burst=True).messages == 0
    assert len(ran) == 1


def test_the_slots_of_a_limited_task_are_released_when_the_tokens_of_its_rate_cannot_be_pulled(app):
    slots = []

    @app.task(rate="1/s", concurrency=2)
    def work() -> None: ...

    class LosesThePullOfTokens(InterceptedService):
        lost = False

        async def before(self, command):
            if isinstance(command, Pull) and ".rate." in command.queue and not self.lost:
                self.lost = True
                raise BackendLost("the connection was lost")
            if isinstance(command, Pull) and ".slots." in command.queue:
                stats = await self.service.execute(Stats(command.queue))
                slots.append((stats.visible, stats.in_flight))

    assert work_on(app, LosesThePullOfTokens, [push_of(work)], burst=True).messages == 0
    assert slots == [(2, 0), (2, 0)]


def test_an_extension_that_fails_is_tried_again_after_a_part_of_the_usual_time(app, monkeypatch):
    slept = []
    usual_s = 30.0 / 3
    sleep = asyncio.sleep

    async def sleep_less(delay_s, *arguments):
        slept.append(delay_s)
        await sleep(min(delay_s, 0.001), *arguments)

    monkeypatch.setattr(asyncio, "sleep", sleep_less)
    gate = threading.Event()

    @app.task
    def work() -> None:
        gate.wait()

    class FailsToExtend(InterceptedService):
        extensions = 0

        async def before(self, command):
            if items_of(command, Extend):
                self.extensions += 1
                if self.extensions in (2, 3):
                    raise BackendLost("the connection was lost")
                if self.extensions == 6:
                    gate.set()

    pushes = [push_of(work)]
    assert work_on(app, FailsToExtend, pushes, burst=True, visibility_ms=30_000).messages == 0
    # The first and the second as usual; two fail; then as usual again.
    waits = [each for each in slept if each in (usual_s, usual_s / 3)]
    assert waits[:6] == [usual_s, usual_s, usual_s / 3, usual_s / 3, usual_s, usual_s]
