"""After a fork the child cannot use the connection of its parent; an app in it connects again."""

import subprocess
import sys
import textwrap

import pytest

import penstock

pytestmark = pytest.mark.service("redis-server")


def run(source, url):
    """The sorted lines that a program prints, in a process without other threads."""
    program = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(source)]
    done = subprocess.run([*program, url], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_a_forked_child_is_refused_and_its_parent_can_still_push(shared_redis):
    source = """
        import os, sys, penstock
        queues = penstock.connect(sys.argv[1])
        queues.create("orders")
        queues.push("orders", b"before")
        child = os.fork()
        if not child:
            try:
                queues.push("orders", b"in the child")
            except penstock.errors.BackendLost as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        queues.push("orders", b"after")
        print([message.body for message in queues.peek("orders", 9)])
        queues.close()
    """
    assert run(source, f"{shared_redis.url}?prefix=forked") == [
        "[b'before', b'after']",
        "this process was forked from the one that connected; connect again here",
    ]


def test_an_app_pushes_from_a_forked_child_by_a_connection_of_its_own(shared_redis):
    url = f"{shared_redis.url}?prefix=forked-app"
    source = """
        import os, sys
        from penstock.tasks import TaskApp
        app = TaskApp(sys.argv[1])

        @app.task
        def work(number: int) -> None: ...

        work.push(1)
        child = os.fork()
        for number in range(100):
            work.push(number)
        app.close()
        if not child:
            os._exit(0)
        print(os.waitpid(child, 0)[1])
    """
    assert run(source, url) == ["0"]
    with penstock.connect(url) as queues:
        assert queues.stats("tasks").messages == 201
