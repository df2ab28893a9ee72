"""The password of a store is in no list of processes, and in no output of a worker."""

import os
from pathlib import Path

import pytest

from tests.tasks.conftest import until

pytestmark = pytest.mark.service("redis-server")
SECRET = "s3cr3t-of-the-store"
SOURCE = """
    @app.task(timeout=60)
    def apart() -> None:
        note(f"child-{os.getpid()}")
        while not (SEEN / "go").exists():
            time.sleep(0.01)

    @app.task(retries=0)
    def fails() -> None:
        raise ValueError("no")
"""


@pytest.fixture
def secret_url(redis_server):
    """The URL of a store whose user has a password."""
    redis_server.ask("FLUSHALL")
    words = ("on", f">{SECRET}", "~*", "&*", "+@all")
    assert redis_server.ask("ACL", "SETUSER", "anna", *words) == "+OK"
    yield redis_server.url.replace("//", f"//anna:{SECRET}@")
    redis_server.ask("ACL", "DELUSER", "anna")


def processes_below(pid):
    """A process and all that descend from it, also those that its threads have started."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found += processes_below(int(child))
    return found


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]


@pytest.mark.parametrize("given", ["in the app", "by an option"])
def test_the_password_of_a_store_is_on_no_command_line(make_shop, secret_url, given):
    shop = make_shop(secret_url, SOURCE)
    module = shop.app()
    options = []
    if given == "by an option":
        options = ["--url", secret_url]
        shop.url = "redis://127.0.0.1:1"
        shop.write(SOURCE)
    worker = shop.start("--threads", "2", *options)
    module.apart.push()
    module.fails.push()
    (name,) = until(lambda: [each for each in shop.names() if each.startswith("child-")])
    until(lambda: "ValueError: no" in shop.output.read_text())
    supervisor, *others = processes_below(worker.pid)
    # The worker process, and its child in which the task runs.
    assert len(others) == 2
    assert int(name.removeprefix("child-")) in others
    for pid in others:
        words = command_line(pid)
        assert "shop:app" in words
        assert SECRET not in " ".join(words)
    # The first command line is the one that the user has typed.
    assert (SECRET in " ".join(command_line(supervisor))) == (given == "by an option")
    assert SECRET not in shop.output.read_text()
    (shop.seen / "go").touch()
    worker.terminate()
    assert worker.wait(60) == 0
    module.app.close()


def test_a_supervisor_that_dies_before_it_sent_the_options_leaves_no_process(tmp_path):
    """The options come on stdin, which ends with the supervisor."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "penstock.tasks.worker.process", "shop:app"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, cwd=tmp_path, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
