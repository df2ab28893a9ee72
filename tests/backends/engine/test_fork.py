"""A store is its process's own: the child of a fork can neither write it nor keep it locked."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

import penstock
from penstock.backends.engine.blocking import BlockingEngine
from penstock.backends.engine.store import open_engine
from penstock.errors import PenstockError
from penstock.persisted import PersistedQueue


def said_by_a_child(what: Callable[[], object]) -> str:
    """What a forked child says of its try: "done", or the error it was refused with."""
    heard, said = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            what()
            os.write(said, b"done")
        except BaseException as error:
            os.write(said, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(said)
    with os.fdopen(heard, "rb") as pipe:
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
    for what in (lambda: queues.push("q", b"child"), lambda: queues.pull("q")):
        said = said_by_a_child(what)
        assert said.startswith("JournalError")
        assert "open it here again" in said
    assert said_by_a_child(queues.close) == "done"
    queues.push("q", b"after")
    queues.close()
    with connect(path) as again:
        assert [message.body for message in again.peek("q", limit=10)] == [b"before", b"after"]


def test_a_child_that_lives_on_does_not_keep_the_store_locked(quick_path):
    path = quick_path / "store"
    queues = connect(path)
    heard, go = os.pipe()
    ready, say = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)
        os.write(say, b"here")
        os.read(heard, 1)
        os._exit(0)
    assert os.read(ready, 4) == b"here"
    queues.close()
    connect(path).close()
    for each in (go, heard, ready, say):
        os.close(each)
    os.waitpid(pid, 0)


def test_a_lock_that_another_thread_held_at_the_fork_does_not_block_the_child(quick_path):
    engine = open_engine(quick_path / "store")
    service = BlockingEngine(engine)
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with service._lock:
            held.set()
            let_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert said_by_a_child(service.close) == "done"
    let_go.set()
    thread.join()
    service.close()


def test_a_persisted_queue_is_not_written_by_a_child(quick_path):
    with PersistedQueue(quick_path / "spool", durability="os") as queue:
        queue.push(b"parent")
        assert "open it here again" in said_by_a_child(lambda: queue.push(b"child"))
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

    assert said_by_a_child(push) == "done"
    with connect(path) as again:
        assert again.stats("q").visible == 1


def test_a_child_raises_only_errors_of_penstock(quick_path):
    queues = connect(quick_path / "store")
    queues.create("q")
    queues.push("q", bytes(20_000))

    def try_all():
        for what in (lambda: queues.pull("q"), lambda: queues.peek("q"), lambda: queues.stats("q")):
            with suppress(PenstockError):
                what()

    assert said_by_a_child(try_all) == "done"
    queues.close()
