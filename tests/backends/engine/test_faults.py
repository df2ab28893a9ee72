"""An exception that only a mistake in Penstock raises: logged once, and callers get one error."""

import asyncio
import logging
import threading
from typing import Any

import pytest

import penstock
from penstock.backends.engine.engine import Engine
from penstock.backends.engine.loop import LoopEngine
from penstock.backends.loop import result_of
from penstock.clock import ManualClock
from penstock.errors import JournalError, PenstockError
from penstock.journal import MemoryJournal
from penstock.service import CreateQueue, Peek, Pull, Push
from tests.server.conftest import until

SECRET = "the body of a message"


def fails(*_):
    raise IndexError(SECRET)


def check_logged(caplog):
    (logged,) = caplog.records
    assert (logged.name, logged.levelno) == ("penstock.engine", logging.ERROR)
    first, *traceback = logged.getMessage().splitlines()
    assert first == "fault in the engine, which was stopped: IndexError"
    assert traceback[-1].strip() == "raise IndexError(SECRET)"
    assert any("engine.py" in line for line in traceback)
    assert "\\n" not in logged.getMessage()
    assert SECRET not in logged.getMessage()


def test_a_fault_in_a_command_is_logged_once_and_its_caller_gets_the_error_of_the_engine(caplog):
    with penstock.connect("memory:") as queues:
        queues.create("q")
        service: Any = queues.service
        service._engine._handlers[Push] = fails
        pulled = []

        def pull():
            with pytest.raises(JournalError) as ended:
                queues.pull("q", wait=20)
            pulled.append(ended.value)

        thread = threading.Thread(target=pull)
        thread.start()
        until(lambda: queues.stats("q").waiting_pulls == 1)
        with pytest.raises(JournalError) as first:
            queues.push("q", b"x")
        thread.join()
        with pytest.raises(JournalError) as later:
            queues.push("q", b"x")
    assert str(first.value) == "the engine was stopped by IndexError; open a new one"
    assert isinstance(first.value.__cause__, IndexError)
    assert str(first.value) == str(later.value) == str(pulled[0])
    check_logged(caplog)


def test_a_fault_in_the_timer_is_logged_once_and_tells_the_listeners_of_the_service(caplog):
    async def main():
        clock = ManualClock()
        engine: Any = Engine(MemoryJournal(1), clock)
        service = LoopEngine(engine)
        failures: list[PenstockError] = []
        service.on_failure(failures.append)
        service.submit(CreateQueue("q"))
        waiting = service.submit(Pull("q", wait_ms=20_000))
        engine._line.tick = fails
        clock.advance(seconds=20)
        with pytest.raises(JournalError, match="was stopped by IndexError"):
            await result_of(waiting)
        with pytest.raises(JournalError, match="was stopped by IndexError"):
            service.submit(Peek("q"))
        await service.close()
        assert [str(each) for each in failures] == [
            "the engine was stopped by IndexError; open it again"
        ]

    asyncio.run(main())
    check_logged(caplog)
