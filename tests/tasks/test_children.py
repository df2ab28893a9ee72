"""Children that run one task each: how they start, and how their ends are reported."""

import os
import resource
import signal
from pathlib import Path

import pytest

from penstock.tasks.worker.children import ChildEnded, TaskChild
from penstock.tasks.worker.endings import ending_of

APP = "from penstock.tasks import TaskApp\napp = TaskApp('memory:')\n"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


def children():
    """The processes that this one has started, also those that have ended unnoticed."""
    threads = Path("/proc/self/task").iterdir()
    return {pid for thread in threads for pid in (thread / "children").read_text().split()}


def test_a_child_that_cannot_import_the_app_says_why_and_prints_nothing(directory, capfd):
    (directory / "shop.py").write_text(f"{APP}1 / 0\n")
    before = children()
    with pytest.raises(ChildEnded) as ended:
        TaskChild("shop:app", "memory:")
    where = f"{directory / 'shop.py'}:3"
    assert str(ended.value) == (
        "the process for the task did not start: "
        f"app: importing 'shop' failed: ZeroDivisionError: division by zero ({where})"
    )
    assert capfd.readouterr() == ("", "")
    # It has been waited for.
    assert children() == before


def test_a_child_starts_although_its_worker_has_many_open_files(directory):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4_096), hard))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < 1_100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        TaskChild("shop:app", "memory:").close()
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "status 3"),
        (0, "status 0"),
        (-signal.SIGKILL, "SIGKILL"),
        (-signal.SIGRTMIN - 1, f"signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_the_end_of_a_process_is_named_by_its_status_or_signal(code, text):
    assert ending_of(code) == text
