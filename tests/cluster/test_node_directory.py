"""The directories of nodes among the temporary files: those of killed nodes do not stay."""

import os
import subprocess
import sys
import tempfile

import pytest

from penstock.cluster.node_directory import NodeDirectory

NOBODY = 65_534
NODE = """
import sys
from penstock.cluster.node_directory import NodeDirectory
directory = NodeDirectory()
(directory.path / "shard-0").mkdir()
(directory.path / "shard-0" / "part-0").write_bytes(b"x" * 1000)
print(directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def other_node(temporary):
    """Another process that uses a directory, and that directory."""
    with subprocess.Popen(
        [sys.executable, "-c", NODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, temporary / process.stdout.readline().strip()
        process.kill()


def test_the_directory_of_a_killed_node_is_removed_when_another_starts(other_node, temporary):
    process, left = other_node
    process.kill()
    process.wait()
    assert (left / "shard-0" / "part-0").exists()
    own = NodeDirectory()
    assert [*temporary.iterdir()] == [own.path]
    own.remove()


def test_the_directory_of_a_node_that_runs_stays(other_node, temporary):
    _, used = other_node
    own = NodeDirectory()
    assert {*temporary.iterdir()} == {own.path, used}
    own.remove()
    assert (used / "shard-0" / "part-0").exists()


def test_a_directory_is_removed_with_all_it_holds(temporary):
    own = NodeDirectory()
    (own.path / "shard-1").mkdir()
    assert own.path.stat().st_mode & 0o777 == 0o700
    own.remove()
    assert [*temporary.iterdir()] == []


def test_a_link_with_such_a_name_is_not_followed(temporary):
    kept = temporary / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (temporary / "penstock-copies-link").symlink_to(kept)
    NodeDirectory().remove()
    assert (kept / "file").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_a_directory_of_another_user_stays(temporary):
    other = temporary / "penstock-copies-other"
    other.mkdir()
    os.chown(other, NOBODY, NOBODY)
    NodeDirectory().remove()
    assert other.exists()
