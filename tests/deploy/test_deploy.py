"""The files of deploy/ and of the publishing workflow: checked as far as this machine can.

The image itself is built by hand, with buildah: no builder of images runs in CI.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.cli.parser import make_parser
from tests.ports import lasting_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def instructions():
    """Each instruction of the Dockerfile, with its continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def last(name):
    return [argument for instruction, argument in instructions() if instruction == name][-1]


def serve_arguments(*words):
    return make_parser().parse_args(["serve", *words])


@pytest.mark.service("systemd")
def test_systemd_accepts_the_unit_and_its_command_is_one_of_penstock(tmp_path):
    unit = (DEPLOY / "penstock.service").read_text()
    (command,) = re.findall(r"^ExecStart=/opt/penstock/bin/penstock (.*)$", unit, re.MULTILINE)
    make_parser().parse_args(shlex.split(command))
    present = unit.replace("/opt/penstock/bin/penstock", "/bin/true")
    (tmp_path / "penstock.service").write_text(present)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "penstock.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "penstock" in line]
    assert (done.returncode, said) == (0, [])


def test_the_image_runs_serve_as_a_user_of_its_own_with_a_volume_and_a_health_check():
    assert json.loads(last("ENTRYPOINT")) == ["penstock", "serve"]
    assert last("USER") == "penstock"
    assert last("VOLUME") == "/data"
    arguments = serve_arguments(*json.loads(last("CMD")))
    assert arguments.host == "0.0.0.0"
    assert "PENSTOCK_DATA=/data/store" in last("ENV")


def test_the_health_check_of_the_image_tells_a_server_from_none(tmp_path):
    port = lasting_port()
    check = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    check = [sys.executable, *check[1:-1], check[-1].replace("9324", str(port))]
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0
    environment = {**os.environ, "PENSTOCK_DATA": str(tmp_path / "store")}
    words = [*json.loads(last("CMD")), "--port", str(port)]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", "--json", *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            assert subprocess.run(check, check=False).returncode == 0
        finally:
            server.terminate()


def test_compose_publishes_the_port_on_loopback_only():
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["penstock"]
    assert service["ports"] == ["127.0.0.1:9324:9324"]
    assert serve_arguments(*service["command"]).allow_host == ["penstock"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_publishing_needs_no_password_and_only_its_own_job_may_ask_for_an_identity():
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())
    assert flow["permissions"] == {}
    rights = {name: job["permissions"] for name, job in flow["jobs"].items()}
    assert rights == {"build": {"contents": "read"}, "publish": {"id-token": "write"}}
    assert "secrets." not in json.dumps(flow, default=str)
