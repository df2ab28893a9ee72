"""Every example runs as its docstring says, and prints the text in it."""

import ast
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.tasks.conftest import EXECUTABLE, TIMEOUT_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


class ExampleDirectory:
    """A directory with the examples, and a store whose URL is in the environment."""

    def __init__(self, directory, url):
        self.directory = directory
        self.environment = {**os.environ, "PENSTOCK_URL": url}
        shutil.copytree(EXAMPLES, directory, dirs_exist_ok=True)

    def expected(self, name, after):
        docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
        assert docstring is not None
        return textwrap.dedent(docstring.partition(f"{after}:\n\n")[2]).strip()

    def files(self):
        """The files beside the examples."""
        return {path.name for path in self.directory.iterdir() if path.is_file()}

    def run(self, *command):
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def worker(self, name, *options):
        return subprocess.Popen(
            [EXECUTABLE, "worker", f"{name}:app", *options],
            cwd=self.directory,
            env=self.environment,
            stderr=subprocess.DEVNULL,
        )


@pytest.fixture
def examples(tmp_path, file_url):
    return ExampleDirectory(tmp_path, file_url)


@pytest.mark.parametrize("name", ["mail", "schedule", "fan_out"])
def test_an_example_prints_what_its_docstring_says(examples, name):
    before = examples.files()
    worker = examples.worker(name, "--processes", "2")
    try:
        assert examples.run(sys.executable, f"{name}.py") == examples.expected(name, "It prints")
    finally:
        worker.terminate()
        assert worker.wait(TIMEOUT_S) == 0
    assert examples.files() == before, "somebody runs it in a clone of the repository"


def test_the_worker_of_the_priority_example_prints_in_order_of_priority(examples):
    examples.run(sys.executable, "priorities.py")
    out = examples.run(EXECUTABLE, "worker", "priorities:app", "--threads", "1", "--burst")
    assert out == examples.expected("priorities", "The worker prints")


def test_every_example_is_run_by_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "mail",
        "schedule",
        "priorities",
        "fan_out",
    }
