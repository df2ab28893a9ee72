"""A missing package is installed; if it cannot be, its tests are skipped, and in CI they fail."""

import os
import subprocess

import pytest

from tools.tidy import ROOT

pytest_plugins = ["pytester"]


class AptMachine:
    """A machine that needs one package, and whose apt-get is a script that the test writes."""

    def __init__(self, root):
        self.programs = root / "bin"
        self.programs.mkdir()
        self.listed = root / "services.txt"
        self.listed.write_text("# what the tests need\n\nexample-server exampled\n")
        self.add_program("sudo", '[ "$1" = -n ] && shift; exec "$@"')

    def add_program(self, name, text):
        (self.programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.programs / name).chmod(0o755)

    def services(self, apt_get, **environment):
        self.add_program("apt-get", apt_get)
        path = os.pathsep.join([str(self.programs), os.environ["PATH"]])
        return subprocess.run(
            [ROOT / "tools" / "services.sh"],
            env={"PATH": path, "PENSTOCK_SERVICES": str(self.listed), **environment},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )


@pytest.fixture
def machine(tmp_path):
    return AptMachine(tmp_path)


def test_a_missing_package_is_installed_by_name(machine):
    made = machine.programs / "exampled"
    done = machine.services(
        f'case "$*" in *install*example-server) touch {made}; chmod +x {made};; esac'
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert made.exists()


def test_nothing_is_installed_when_the_program_is_there(machine):
    machine.add_program("exampled", "")
    done = machine.services("echo apt-get was called; exit 1", CI="true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_outside_ci_a_package_that_cannot_be_installed_is_one_line_of_warning(machine):
    done = machine.services("exit 100")
    assert done.returncode == 0
    assert done.stderr == (
        "WARNING: could not install example-server; the tests that need them WILL BE SKIPPED\n"
    )


def test_in_ci_a_package_that_cannot_be_installed_is_a_failure(machine):
    done = machine.services("exit 100", CI="true")
    assert done.returncode == 1
    assert "example-server" in done.stderr


def test_an_install_after_which_the_program_is_still_missing_is_a_failure(machine):
    done = machine.services("exit 0", CI="true")
    assert done.returncode == 1


@pytest.fixture
def suite(pytester, monkeypatch):
    """A suite of one test that needs a service that is not installed."""
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    service(package): needs a package")
    (pytester.path.parent / "tools").mkdir(exist_ok=True)
    (pytester.path.parent / "tools" / "services.txt").write_text("example-server exampled\n")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.service('example-server')\ndef test_the_example(): assert True"
    )
    monkeypatch.delenv("CI", raising=False)
    return pytester


def test_outside_ci_a_test_without_its_service_is_skipped_with_one_line_of_warning(suite):
    result = suite.runpytest_subprocess()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["WARNING: 1 tests SKIPPED because example-server *"])


def test_in_ci_a_test_without_its_service_fails(suite, monkeypatch):
    monkeypatch.setenv("CI", "true")
    result = suite.runpytest_subprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*example-server is not installed, and CI must not skip*"])


def test_a_test_that_names_a_service_that_is_not_on_the_list_fails(suite):
    suite.makepyfile(
        "import pytest\n@pytest.mark.service('unlisted-server')\ndef test_example(): assert True"
    )
    result = suite.runpytest_subprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*unlisted-server is not in tools/services.txt*"])
