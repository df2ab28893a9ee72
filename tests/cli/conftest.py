"""Three ways to run the command line: as a process, through main, and command by command."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import penstock
from penstock.cli import main, run_command
from penstock.cli.session import Session

EXECUTABLE = Path(sys.executable).with_name("penstock")


class Done(NamedTuple):
    """What a command line did."""

    status: int
    out: str
    err: str

    @property
    def results(self):
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch):
    monkeypatch.delenv("PENSTOCK_URL", raising=False)


@pytest.fixture
def process():
    """Run the real executable to its end."""

    def run(*words, stdin=b"", **environment):
        done = subprocess.run(
            [EXECUTABLE, *words],
            input=stdin,
            capture_output=True,
            timeout=60,
            check=False,
            env={**os.environ, **environment},
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture
def give_stdin(monkeypatch):
    def give(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return give


@pytest.fixture
def run_main(capsys, give_stdin):
    """Run `main` in this process."""

    def run(*words, stdin=b""):
        give_stdin(stdin)
        capsys.readouterr()
        status = main(list(words))
        return Done(status, *capsys.readouterr())

    return run


@pytest.fixture
def shell(run_main):
    """Run a script of commands on a store in memory."""

    def run(script, url="memory:?history=100"):
        return run_main("shell", "--url", url, stdin=script.encode())

    return run


@pytest.fixture
def clock():
    return penstock.ManualClock()


@pytest.fixture
def cli(clock, capsys):
    """Run commands one by one on one store, whose clock stands still, and read their JSON."""
    with Session(lambda url: penstock.connect(url, clock=clock)) as session:

        def run(line, json=True):
            words = shlex.split(line) if isinstance(line, str) else line
            capsys.readouterr()
            form = ["--json"] if json else []
            status = run_command(session, ["--url", "memory:?history=100", *form, *words])
            return Done(status, *capsys.readouterr())

        yield run
