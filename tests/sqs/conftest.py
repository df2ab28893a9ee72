"""Servers for the SQS tests: as a process, the way a user starts one, and in this process."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

PENSTOCK = Path(sys.executable).with_name("penstock")
STARTED = re.compile(rb"Amazon SQS at (\S+)")
START_S_MAX = 20


class Server:
    """A `penstock serve` that runs."""

    def __init__(self, process, url, output):
        self.process = process
        self.url = url
        self.output = output

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    def client(self, **options):
        options = {
            "endpoint_url": self.url,
            "region_name": "us-east-1",
            "aws_access_key_id": "any",
            "aws_secret_access_key": "any",
            "config": Config(retries={"max_attempts": 0}, read_timeout=60),
            **options,
        }
        return boto3.client("sqs", **options)

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait(30)


@contextmanager
def serve(*arguments, environment=None):
    """Starts a server on a free port, and ends it."""
    process = subprocess.Popen(
        [PENSTOCK, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**clean_environment(), **(environment or {})},
    )
    try:
        output, url = read_until_started(process)
        yield Server(process, url, output)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def clean_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


def read_until_started(process):
    """What the server says as it starts; fails with that if it does not start."""
    output = b""
    until_s = time.monotonic() + START_S_MAX
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"--message-body hello\n" not in output:
            if not selector.select(max(0, until_s - time.monotonic())):
                break
            piece = os.read(process.stdout.fileno(), 65_536)
            if not piece:
                break
            output += piece
    started = STARTED.search(output)
    if started is None:
        pytest.fail(f"the server did not start: {output.decode()}")
    return output.decode(), started[1].decode()


@pytest.fixture(scope="session")
def server():
    """One server in memory for all tests that do not mind each other."""
    with serve("--store", "memory:") as running:
        yield running


@pytest.fixture(scope="session")
def sqs(server):
    client = server.client()
    yield client
    client.close()


@pytest.fixture
def queue_name(request):
    """A name no other test uses."""
    plain = re.sub(r"[^A-Za-z0-9]", "-", request.node.name)[:60]
    return f"{plain}-{time.monotonic_ns() % 10**9}"


@pytest.fixture
def queue(sqs, queue_name):
    """A fresh standard queue's URL."""
    return sqs.create_queue(QueueName=queue_name)["QueueUrl"]


@pytest.fixture
def fifo(sqs, queue_name):
    """A fresh FIFO queue's URL."""
    attributes = {"FifoQueue": "true"}
    return sqs.create_queue(QueueName=f"{queue_name}.fifo", Attributes=attributes)["QueueUrl"]
