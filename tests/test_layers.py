"""The import contracts of pyproject.toml allow imports along the layers and refuse the others."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.tidy import ROOT

LINTER = Path(sys.executable).with_name("lint-imports")
MODULES = [
    "cli/__init__.py",
    "testing/conformance.py",
    "server/http.py",
    "spark/source.py",
    "cluster/node.py",
    "tasks/worker.py",
    "backends/engine/engine.py",
    "client.py",
    "wire/frames/frames.py",
    "journal/segments.py",
    "persisted.py",
    "core/queue.py",
    "settings.py",
    "aio.py",
    "service.py",
    "url.py",
    "errors.py",
    "clock.py",
    "forked.py",
]


@pytest.fixture
def lint(tmp_path):
    """Lint a package of nearly empty modules, to which the test adds one import."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "penstock"
    for module in MODULES:
        path = package / module
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in (path.parent, *path.parent.parents):
            if parent == tmp_path:
                break
            (parent / "__init__.py").touch()
        path.touch()

    (package / "__init__.py").write_text("import penstock.client, penstock.backends.engine.engine")
    (package / "clock.py").write_text("import time")

    def run(module="errors.py", text=""):
        (package / module).write_text(text)
        command = [str(LINTER), "--no-logo", "--no-cache", "--config", "pyproject.toml"]
        environment = {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_a_package_that_imports_nothing_keeps_every_contract(lint):
    done = lint()
    assert done.returncode == 0, done.stdout
    assert "4 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("errors.py", "import penstock.clock"),
        ("service.py", "import penstock.core.queue"),
        ("core/queue.py", "import penstock.journal.segments"),
        ("wire/frames/frames.py", "import penstock.journal.segments"),
        ("client.py", "def connect():\n    import penstock.backends.engine"),
        ("backends/engine/engine.py", "import penstock.cluster.node"),
        ("tasks/worker.py", "import penstock.cluster.node"),
        ("server/http.py", "import penstock.cli"),
        ("server/http.py", "import penstock.backends.engine.engine"),
        ("journal/segments.py", "import penstock.persisted"),
        ("core/queue.py", "import os"),
        ("core/queue.py", "from time import monotonic"),
        ("core/queue.py", "import penstock.clock"),
        ("core/queue.py", "import penstock"),
        ("wire/frames/frames.py", "import asyncio"),
        ("spark/source.py", "import penstock.backends.engine"),
        ("spark/source.py", "import penstock.backends"),
        ("helpers.py", ""),
    ],
)
def test_an_import_against_the_layers_is_found(lint, module, text):
    done = lint(module, text)
    assert done.returncode == 1, done.stdout
    assert "1 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("__init__.py", "import penstock.client, penstock.backends.engine.engine"),
        ("aio.py", "import penstock.client, penstock.backends.engine.engine"),
        ("testing/conformance.py", "import penstock"),
        ("persisted.py", "import penstock.journal.segments"),
        ("backends/engine/engine.py", "import time, penstock.core.queue, penstock.journal"),
        ("spark/source.py", "import penstock.client"),
        ("core/queue.py", "import penstock.service, penstock.errors"),
    ],
)
def test_an_import_along_the_layers_is_allowed(lint, module, text):
    done = lint(module, text)
    assert done.returncode == 0, done.stdout
