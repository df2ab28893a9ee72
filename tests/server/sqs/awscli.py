"""The aws command line: version 1 is a Python package, version 2 the Debian package awscli."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import IN_CI, NOT_INSTALLED, SEARCH_PATH, services

AWS_VERSIONS = ("1", "2")
PACKAGE = "awscli"


def aws_program(version):
    """The program of this version; skips the test if it is not installed."""
    if version == "1":
        return Path(sys.executable).with_name("aws")
    found = find_version_2()
    if found is None:
        give_up = pytest.fail if IN_CI and PACKAGE in services() else pytest.skip
        give_up(NOT_INSTALLED + PACKAGE)
    return found


@functools.cache
def find_version_2():
    for directory in SEARCH_PATH.split(os.pathsep):
        program = shutil.which("aws", path=directory)
        if program is not None:
            command = [program, "--version"]
            output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            if output.startswith("aws-cli/2."):
                return Path(program)
    return None
