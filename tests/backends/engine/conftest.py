"""What the tests of a store share: a directory that costs no disk, where none is wanted."""

import shutil
import tempfile
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_path(tmp_path):
    """A directory in memory, if the system has such a thing: the disk is not what is tested."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="penstock-", dir=MEMORY))
    yield path
    shutil.rmtree(path, ignore_errors=True)
