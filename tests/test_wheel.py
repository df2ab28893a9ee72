"""What a wheel contains: the files that the package reads at run time, not only its modules."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import penstock
from penstock.backends.redis.scripts import NAMES
from tools import package

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "pyproject.toml"
SCRIPTS = {f"penstock/backends/redis/lua/{name}.lua" for name in (*NAMES, "queue", "push_plain")}


def data_files():
    """Every file of the packages that is neither a module nor compiled from one."""
    return [
        path
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]


def test_the_wheel_takes_whole_packages_and_leaves_nothing_out():
    wheel = tomllib.loads(BUILD.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["src/penstock", "src/pyspark_penstock", "src/pytest_penstock"]
    assert wheel.keys() == {"packages", "sbom-files"}
    found = {path.relative_to(ROOT / "src").as_posix() for path in data_files()}
    assert found >= {*SCRIPTS, "penstock/py.typed"}


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="this is no git checkout"
)
def test_no_data_file_is_ignored_by_git_which_would_keep_it_out_of_the_wheel():
    names = "\0".join(str(path) for path in data_files())
    command = ["git", "check-ignore", "--no-index", "-z", "--stdin"]
    done = subprocess.run(
        command, cwd=ROOT, input=names, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_a_wheel_that_is_built_has_every_script(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= SCRIPTS
    assert names >= {path.relative_to(ROOT / "src").as_posix() for path in data_files()}
    (bill,) = [name for name in names if name.endswith("/sboms/sbom.cdx.json")]
    assert zipfile.ZipFile(wheel).read(bill).decode() == package.bill_of_materials()


def test_the_version_of_the_module_is_that_of_the_package():
    assert tomllib.loads(BUILD.read_text())["project"]["version"] == penstock.__version__
