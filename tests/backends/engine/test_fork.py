"""A store belongs to its process: the child of a fork can neither write it nor keep it locked."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

import penstock
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.store import open_engine
from penstock.errors import PenstockError
from penstock.persisted import PersistedQueue
from penstock.tasks import TaskApp


def result_in_child(call: Callable[[], object]) -> str:
    """Makes the call in a forked child; "done", or the error that it raised."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            call()
            os.write(write_end, b"done")
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text


def connect(path):
    return penstock.connect(f"file:{path}?embedded=1&durability=os")


def test_a_child_is_refused_and_the_parent_loses_nothing(quick_path):
    path = quick_path / "store"
    queues = connect(path)
    queues.create("q")
    queues.push("q", b"before")
    for call in (lambda: queues.push("q", b"child"), lambda: queues.pull("q")):
        result = result_in_child(call)
        assert result.startswith("JournalError")
        assert "open it here again" in result
    assert result_in_child(queues.close) == "done"
    queues.push("q", b"after")
    queues.close()
    with connect(path) as again:
        assert [message.body for message in again.peek("q", limit=10)] == [b"before", b"after"]


@pytest.mark.parametrize("url", ["memory:", "memory:?history=9"])
def test_a_child_is_refused_by_a_store_in_the_memory_of_its_parent(url):
    queues = penstock.connect(url)
    queues.create("q")
    queues.push("q", b"before")
    calls = [
        lambda: queues.push("q", b"child"),
        lambda: queues.pull("q"),
        lambda: queues.stats("q"),
    ]
    for call in calls:
        result = result_in_child(call)
        assert result.startswith("JournalError: ")
        assert "file:PATH" in result
    assert result_in_child(queues.close) == "done"
    queues.push("q", b"after")
    assert [message.body for message in queues.peek("q", 9)] == [b"before", b"after"]
    queues.close()


def test_a_task_app_on_a_store_in_memory_does_not_push_in_a_child_where_nobody_works():
    app = TaskApp("memory:")

    @app.task
    def work() -> None: ...

    work.push()
    result = result_in_child(work.push)
    assert result.startswith("JournalError: ")
    app.close()


def test_a_child_that_outlives_the_parent_connection_does_not_keep_the_store_locked(quick_path):
    path = quick_path / "store"
    queues = connect(path)
    end_read, end_write = os.pipe()
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(end_write)
        os.write(ready_write, b"ready")
        os.read(end_read, 1)
        os._exit(0)
    assert os.read(ready_read, 5) == b"ready"
    queues.close()
    connect(path).close()
    for each in (end_write, end_read, ready_read, ready_write):
        os.close(each)
    os.waitpid(pid, 0)


def test_a_lock_that_another_thread_held_at_the_fork_does_not_block_the_child(quick_path):
    engine = open_engine(quick_path / "store")
    service = BlockingEngine(engine)
    held, may_release = threading.Event(), threading.Event()

    def hold():
        with service._lock:
            held.set()
            may_release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert result_in_child(service.close) == "done"
    may_release.set()
    thread.join()
    service.close()


def test_a_persisted_queue_is_not_written_by_a_child(quick_path):
    with PersistedQueue(quick_path / "spool", durability="os") as queue:
        queue.push(b"parent")
        assert "open it here again" in result_in_child(lambda: queue.push(b"child"))
        queue.push(b"parent, too")
        assert list(queue) == [b"parent", b"parent, too"]


def test_a_child_opens_the_store_by_itself_once_the_parent_has_closed_it(quick_path):
    path = quick_path / "store"
    queues = connect(path)
    queues.create("q")
    queues.close()

    def push():
        with connect(path) as own:
            own.push("q", b"child")

    assert result_in_child(push) == "done"
    with connect(path) as again:
        assert again.stats("q").visible == 1


def test_a_child_raises_only_errors_of_penstock(quick_path):
    queues = connect(quick_path / "store")
    queues.create("q")
    queues.push("q", bytes(20_000))

    def try_all():
        for call in (lambda: queues.pull("q"), lambda: queues.peek("q"), lambda: queues.stats("q")):
            with suppress(PenstockError):
                call()

    assert result_in_child(try_all) == "done"
    queues.close()
