"""A service the tests need is installed, or skipped loudly at home, or a failure in CI."""

import os
import subprocess

import pytest

from tools.tidy import ROOT

pytest_plugins = ["pytester"]


class Machine:
    """A machine that needs one package, whose apt-get is a script of the test's choosing."""

    def __init__(self, root):
        self.programs = root / "bin"
        self.programs.mkdir()
        self.listed = root / "services.txt"
        self.listed.write_text("# what the tests need\n\nhydrant-server hydrantd\n")
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
    return Machine(tmp_path)


def test_a_missing_package_is_installed_by_name(machine):
    made = machine.programs / "hydrantd"
    done = machine.services(
        f'case "$*" in *install*hydrant-server) touch {made}; chmod +x {made};; esac'
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert made.exists()


def test_nothing_is_installed_when_the_program_is_there(machine):
    machine.add_program("hydrantd", "")
    done = machine.services("echo apt-get was called; exit 1", CI="true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_at_home_a_package_that_cannot_be_installed_costs_one_loud_line(machine):
    done = machine.services("exit 100")
    assert done.returncode == 0
    assert done.stderr == (
        "WARNING: could not install hydrant-server; the tests that need them WILL BE SKIPPED\n"
    )


def test_in_ci_a_package_that_cannot_be_installed_is_a_failure(machine):
    done = machine.services("exit 100", CI="true")
    assert done.returncode == 1
    assert "hydrant-server" in done.stderr


def test_an_install_that_brings_no_program_counts_as_failed(machine):
    done = machine.services("exit 0", CI="true")
    assert done.returncode == 1


@pytest.fixture
def suite(pytester, monkeypatch):
    """A suite of one test that needs a service this machine does not have."""
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    service(package): needs a package")
    (pytester.path.parent / "tools").mkdir(exist_ok=True)
    (pytester.path.parent / "tools" / "services.txt").write_text("hydrant-server hydrantd\n")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.service('hydrant-server')\ndef test_it_flows(): assert True"
    )
    monkeypatch.delenv("CI", raising=False)
    return pytester


def test_at_home_a_test_without_its_service_skips_with_one_loud_line(suite):
    result = suite.runpytest_subprocess()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["WARNING: 1 tests SKIPPED because hydrant-server *"])


def test_in_ci_a_test_without_its_service_fails(suite, monkeypatch):
    monkeypatch.setenv("CI", "true")
    result = suite.runpytest_subprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*hydrant-server is not installed, and CI must not skip*"])


def test_a_service_that_is_not_on_the_list_is_a_mistake_in_the_test(suite):
    suite.makepyfile(
        "import pytest\n@pytest.mark.service('geyser')\ndef test_it_flows(): assert True"
    )
    result = suite.runpytest_subprocess()
    result.stdout.fnmatch_lines(["*geyser is not in tools/services.txt*"])
