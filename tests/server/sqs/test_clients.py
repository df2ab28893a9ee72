"""Unmodified clients of others: aws-cli, the JavaScript SDK, sqs-consumer, a Celery worker."""

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import IN_CI
from tests.server.sqs.awscli import AWS_VERSIONS, aws_program
from tests.server.sqs.conftest import clean_environment, serve

CLIENTS = Path(__file__).parent / "clients"
EXAMPLE = Path(__file__).parents[3] / "examples" / "testing" / "shop.test.mjs"
# On a busy machine a client takes long to start.
CLIENT_S_MAX = 180
pytestmark = pytest.mark.timeout(600)
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def aws(server, program, *words, check=True, **environment):
    command = [program, "--endpoint-url", server.url, "sqs", *words]
    done = subprocess.run(
        command,
        env={**clean_environment(), **CREDENTIALS, **environment},
        capture_output=True,
        text=True,
        timeout=CLIENT_S_MAX,
        check=False,
    )
    if not check:
        return done
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


def test_the_aws_command_line_creates_sends_receives_and_deletes(server):
    ask = partial(aws, server, aws_program("1"))
    url = ask("create-queue", "--queue-name", "cli-orders")["QueueUrl"]
    assert url == f"{server.url}/000000000000/cli-orders"
    sent = ask("send-message", "--queue-url", url, "--message-body", "hello")
    received = ask("receive-message", "--queue-url", url, "--attribute-names", "All")
    (message,) = received["Messages"]
    assert (message["Body"], message["MessageId"]) == ("hello", sent["MessageId"])
    receipt = message["ReceiptHandle"]
    assert ask("delete-message", "--queue-url", url, "--receipt-handle", receipt) is None
    attributes = ask("get-queue-attributes", "--queue-url", url, "--attribute-names", "All")
    assert attributes["Attributes"]["ApproximateNumberOfMessages"] == "0"
    done = ask("get-queue-url", "--queue-name", "none", check=False)
    assert done.returncode != 0
    assert "(AWS.SimpleQueueService.NonExistentQueue)" in done.stderr


@pytest.mark.parametrize("version", AWS_VERSIONS)
def test_signatures_of_the_aws_command_line_are_accepted(version):
    keys = {"PENSTOCK_KEYS": "AKID:secret/with+odd=characters"}
    with serve("--store", "memory:", environment=keys) as server:
        good = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret/with+odd=characters"}
        ask = partial(aws, server, aws_program(version))
        url = ask("create-queue", "--queue-name", "q", **good)["QueueUrl"]
        ask("send-message", "--queue-url", url, "--message-body", "ü +%&=", **good)
        (message,) = ask("receive-message", "--queue-url", url, **good)["Messages"]
        assert message["Body"] == "ü +%&="
        done = ask("list-queues", check=False)
        assert "(SignatureDoesNotMatch)" in done.stderr


@pytest.fixture(scope="session")
def clients(tmp_path_factory):
    """The JavaScript clients, installed beside their scripts, where git ignores them."""
    installed = CLIENTS / "node_modules"
    if not (installed / "sqs-consumer").is_dir():
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
        done = subprocess.run(command, cwd=CLIENTS, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(installed, ignore_errors=True)
            give_up = pytest.fail if IN_CI else pytest.skip
            give_up(f"service not installed: npm cannot fetch the clients: {done.stderr[-300:]}")
    return CLIENTS


def node(clients, script, *words):
    done = subprocess.run(
        ["node", clients / script, *words],
        capture_output=True,
        text=True,
        timeout=CLIENT_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SEEN = {
    "body": "grüße 😀",
    "sameId": True,
    "sameDigest": True,
    "text": "ü",
    "bytes": [0, 255],
    "receives": "1",
    "batch": 10,
    "order": ",".join(f"m{number}" for number in range(10)),
    "deleted": 10,
    "empty": None,
    "sequence": 20,
    "invalid": "InvalidParameterValue",
    "attributes": {"VisibilityTimeout": "60"},
    "queues": 2,
}


@pytest.mark.service("npm")
def test_every_action_works_with_the_javascript_sdk(clients):
    with serve("--store", "memory:") as server:
        seen = node(clients, "sdk.mjs", server.url)
    name, is_typed, status = seen.pop("error")
    assert name in ("QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue")
    assert (is_typed, status) == (True, 400)
    assert seen == SEEN


@pytest.mark.service("npm")
def test_signatures_of_the_javascript_sdk_are_accepted(clients):
    secret = "a-secret-of-enough-characters"
    with serve("--store", "memory:", environment={"PENSTOCK_KEYS": f"AKID:{secret}"}) as server:
        seen = node(clients, "sdk.mjs", server.url, "AKID", secret)
    assert seen["body"] == "grüße 😀"


@pytest.mark.service("npm")
def test_the_javascript_sdk_travels_in_time(clients):
    with serve("--clock", "manual") as server:
        seen = node(clients, "travel.mjs", server.url)
    assert seen == {"first": "later", "hidden": 0, "again": "later", "delivered": 2}


@pytest.mark.service("npm")
def test_the_example_in_javascript_finds_the_shop_that_charges_twice(clients, tmp_path):
    # Beside its packages, as in a project that has installed them.
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "node_modules").symlink_to(clients / "node_modules")
    with serve("--clock", "auto") as server:
        done = subprocess.run(
            ["node", "--preserve-symlinks", "--test", "--test-reporter", "tap", EXAMPLE.name],
            cwd=tmp_path,
            env={**os.environ, "PENSTOCK": server.url, "SEEDS": "12"},
            capture_output=True,
            text=True,
            timeout=CLIENT_S_MAX,
            check=False,
        )
    assert "not ok 1 - the hasty shop charges every order once" in done.stdout, done.stderr
    assert "seed 7: 1,2,3,3" in done.stdout
    assert "the message is delivered again" in done.stdout
    assert "ok 2 - the careful shop charges every order once" in done.stdout


@pytest.mark.service("npm")
def test_sqs_consumer_handles_and_deletes_every_message(clients, server):
    seen = node(clients, "consumer.mjs", server.url)
    assert seen == {"done": 25, "failures": 1, "left": "0", "held": "0"}


TASKS = """
    import socket

    from celery import Celery

    app = Celery("work", broker="sqs://any:any@127.0.0.1:{port}//")
    app.conf.broker_transport_options = {{
        "region": "us-east-1", "is_secure": False, "wait_time_seconds": 2, "polling_interval": 0,
    }}
    app.conf.task_default_queue = "celery-work"

    @app.task(bind=True, max_retries=3, acks_late=True)
    def send_number(self, number):
        if number == 3 and self.request.retries == 0:
            raise self.retry(countdown=0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(str(number).encode(), ("127.0.0.1", {to_port}))

    if __name__ == "__main__":
        for number in range(20):
            send_number.delay(number)
"""


def test_a_celery_worker_runs_every_task(server, tmp_path):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(CLIENT_S_MAX)
        to_port = receiver.getsockname()[1]
        source = textwrap.dedent(TASKS).format(port=server.port, to_port=to_port)
        (tmp_path / "work.py").write_text(source)
        environment = {**clean_environment(), **CREDENTIALS, "PYTHONPATH": str(tmp_path)}
        work = [sys.executable, str(tmp_path / "work.py")]
        subprocess.run(work, env=environment, check=True, timeout=CLIENT_S_MAX)
        celery = [str(Path(sys.executable).with_name("celery")), "-A", "work", "worker"]
        alone = ["--pool", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        printed = tmp_path / "worker.txt"
        with printed.open("wb") as output:
            worker = subprocess.Popen(
                [*celery, *alone], env=environment, cwd=tmp_path, stdout=output, stderr=output
            )
        try:
            numbers = {int(receiver.recv(100)) for _ in range(20)}
        except TimeoutError:
            pytest.fail(printed.read_text())
        finally:
            worker.terminate()
            worker.wait(60)
    assert numbers == set(range(20))
    client = server.client()
    url = client.get_queue_url(QueueName="celery-work")["QueueUrl"]
    shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert shown["ApproximateNumberOfMessages"] == "0"
    client.close()
