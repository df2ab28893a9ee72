"""The endpoints of a cluster's three nodes: boto3 uses them in turn, and none delays the others.

The tests with boto3 are those of a single endpoint, with clients that call another one each time.
"""

import asyncio
import itertools
import json
import re
import signal
import socket
import time
from contextlib import closing, suppress

import boto3
import pytest
from botocore.config import Config

from penstock.cluster.placement import first_shard
from penstock.errors import PenstockError
from tests.browser import Browser
from tests.cluster.attacks import COMMANDS, MESSAGES_BETWEEN_NODES, NodeCrowd, chosen
from tests.measure import SLACK
from tests.server.console.pages import until
from tests.server.sqs.test_attacks import answer, post
from tests.server.sqs.test_boto3 import (
    test_a_batch_of_ten_succeeds_and_fails_entry_by_entry,
    test_a_long_poll_ends_when_a_message_arrives,
    test_a_message_is_sent_received_and_deleted,
    test_an_error_carries_the_codes_of_both_protocols,
    test_attributes_of_every_type_come_back_as_they_were_sent,
    test_regions_and_accounts_do_not_see_each_other,
    test_without_keys_the_url_of_another_accounts_queue_opens_it,
)
from tests.server.sqs.test_crowds import get

__all__ = [
    "test_a_batch_of_ten_succeeds_and_fails_entry_by_entry",
    "test_a_long_poll_ends_when_a_message_arrives",
    "test_a_message_is_sent_received_and_deleted",
    "test_an_error_carries_the_codes_of_both_protocols",
    "test_attributes_of_every_type_come_back_as_they_were_sent",
    "test_regions_and_accounts_do_not_see_each_other",
    "test_without_keys_the_url_of_another_accounts_queue_opens_it",
]


class Endpoints:
    """Three endpoints that look like one to the tests."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.urls = [node.endpoint.rstrip("/") for node in nodes]
        self.url = self.urls[0]
        self._clients = []

    def client(self, **options):
        options = {
            "region_name": "us-east-1",
            "aws_access_key_id": "any",
            "aws_secret_access_key": "any",
            "config": Config(retries={"max_attempts": 0}, read_timeout=60),
            **options,
        }
        clients = [boto3.client("sqs", endpoint_url=url, **options) for url in self.urls]
        self._clients += clients
        return InTurn(clients, self)

    def close(self):
        for client in self._clients:
            client.close()


class InTurn:
    """Calls one client after another; the URLs of queues are those of the first."""

    def __init__(self, clients, endpoints):
        self._clients = clients
        self._turns = itertools.cycle(clients)
        self._endpoints = endpoints

    def __getattr__(self, name):
        method = getattr(next(self._turns), name)

        def call(**parameters):
            answer = method(**parameters)
            if "QueueUrl" in answer:
                path = re.sub(r"^http://[^/]+", "", answer["QueueUrl"])
                answer["QueueUrl"] = self._endpoints.url + path
            return answer

        return call

    def close(self):
        for client in self._clients:
            client.close()


@pytest.fixture(scope="module")
def server(local_cluster):
    asyncio.run(local_cluster.until_served())
    endpoints = Endpoints(asyncio.run(local_cluster.status()).nodes)
    assert len(endpoints.urls) == 3
    yield endpoints
    endpoints.close()


@pytest.fixture(scope="module")
def sqs(server):
    return server.client()


@pytest.fixture
def queue_name(request):
    plain = re.sub(r"[^A-Za-z0-9]", "-", request.node.name)[:60]
    return f"{plain}-{time.monotonic_ns() % 10**9}"


@pytest.fixture
def queue(sqs, queue_name):
    return sqs.create_queue(QueueName=queue_name)["QueueUrl"]


def test_a_queue_that_is_spread_serves_boto3_at_every_endpoint(local_cluster, sqs, queue_name):
    url = sqs.create_queue(QueueName=queue_name)["QueueUrl"]
    sqs.tag_queue(QueueUrl=url, Tags={"kept": "before"})
    local_cluster.spread(queue_name, 4)
    sqs.tag_queue(QueueUrl=url, Tags={"added": "after"})
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"kept": "before", "added": "after"}
    sent = set()
    for number in range(6):
        entries = [{"Id": str(n), "MessageBody": f"{number}-{n}"} for n in range(5)]
        answer = sqs.send_message_batch(QueueUrl=url, Entries=entries)
        sent |= {entry["MessageId"] for entry in answer["Successful"]}
    spread = local_cluster.spread(queue_name)
    assert (len(spread["shards"]), sum(spread["messages"].values())) == (4, 30)
    assert len([count for count in spread["messages"].values() if count]) > 1
    received = set()
    while messages := sqs.receive_message(
        QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1
    ).get("Messages"):
        received |= {each["MessageId"] for each in messages}
        entries = [
            {"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]}
            for n, each in enumerate(messages)
        ]
        deleted = sqs.delete_message_batch(QueueUrl=url, Entries=entries)
        assert len(deleted["Successful"]) == len(messages)
    assert received == sent
    sqs.create_queue(QueueName=queue_name)
    sqs.delete_queue(QueueUrl=url)


def make_with_dead_letters(sqs, name, fifo):
    """A queue, and its dead-letter queue in another shard; their URLs."""
    suffix, options = (".fifo", {"FifoQueue": "true"}) if fifo else ("", {})
    home = first_shard(name + suffix, 4)
    dead_name = next(
        f"{name}-{n}{suffix}" for n in range(50) if first_shard(f"{name}-{n}{suffix}", 4) != home
    )
    dead = sqs.create_queue(QueueName=dead_name, Attributes=options)["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])
    policy = {"deadLetterTargetArn": arn["Attributes"]["QueueArn"], "maxReceiveCount": 2}
    url = sqs.create_queue(
        QueueName=name + suffix, Attributes={**options, "RedrivePolicy": json.dumps(policy)}
    )["QueueUrl"]
    return url, dead


def receive_one(sqs, url):
    (message,) = sqs.receive_message(QueueUrl=url, WaitTimeSeconds=10, AttributeNames=["All"])[
        "Messages"
    ]
    return message


@pytest.mark.parametrize("fifo", [False, True])
def test_a_dead_letter_in_another_shard_keeps_its_id_and_its_counts(sqs, queue_name, fifo):
    url, dead = make_with_dead_letters(sqs, queue_name, fifo)
    options = {"MessageGroupId": "g", "MessageDeduplicationId": "d"} if fifo else {}
    sent = sqs.send_message(QueueUrl=url, MessageBody="poison", **options)
    first = {}
    for count in ("1", "2"):
        message = receive_one(sqs, url)
        first = message["Attributes"]
        assert message["Attributes"]["ApproximateReceiveCount"] == count
        sqs.change_message_visibility(
            QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=0
        )
    letter = receive_one(sqs, dead)
    found = letter["Attributes"]
    assert letter["MessageId"] == sent["MessageId"]
    assert found["ApproximateReceiveCount"] == "3"
    for name in ("SentTimestamp", "ApproximateFirstReceiveTimestamp"):
        assert found[name] == first[name]
    assert found["DeadLetterQueueSourceArn"].endswith(url.rpartition("/")[2])
    if fifo:
        assert found["MessageGroupId"] == "g"
        assert found["MessageDeduplicationId"] == sent["MessageId"]
    sqs.change_message_visibility(
        QueueUrl=dead, ReceiptHandle=letter["ReceiptHandle"], VisibilityTimeout=0
    )
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])
    sqs.start_message_move_task(SourceArn=arn["Attributes"]["QueueArn"])
    back = receive_one(sqs, url)
    assert back["MessageId"] == sent["MessageId"]
    assert back["Attributes"]["ApproximateReceiveCount"] == "1"
    assert "DeadLetterQueueSourceArn" not in back["Attributes"]


PROCESSING_MS_MAX = 50 * SLACK


def ask(action, **fields):
    return post(action, json.dumps(fields).encode())


REQUESTS = {
    "metrics": get("/metrics"),
    "a list": ask("ListQueues"),
    "sources": ask("ListDeadLetterSourceQueues", QueueUrl="dead"),
    "attributes": ask("GetQueueAttributes", QueueUrl="long", AttributeNames=["All"]),
    "a message of 1 MiB": ask("SendMessage", QueueUrl="in", MessageBody="x" * 2**20),
    "a purge": ask("PurgeQueue", QueueUrl="in"),
    "no queue": ask("DeleteQueue", QueueUrl="missing"),
}


@pytest.fixture(scope="module")
def crowd(local_cluster, server):
    ports = {node.node: int(node.endpoint.rstrip("/").rpartition(":")[2]) for node in server.nodes}
    with closing(NodeCrowd(local_cluster, ports)) as crowd:
        crowd.fill()
        yield crowd


def check_delay(crowd, request, record_property):
    took_ms = crowd.longest_ms(request, PROCESSING_MS_MAX)
    record_property("figure", f"{took_ms:.0f} ms at a node of a cluster")
    assert took_ms <= PROCESSING_MS_MAX


@pytest.mark.parametrize("case", chosen(REQUESTS))
def test_no_request_to_an_endpoint_delays_others_at_any_node(crowd, case, record_property):
    """Row 20: an endpoint shares its event loop with the shards that its node owns."""

    def request():
        port = next(iter(crowd.ports.values()))
        with socket.create_connection(("127.0.0.1", port), 30) as wire:
            wire.sendall(REQUESTS[case])
            assert answer(wire).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 4"))

    check_delay(crowd, request, record_property)


@pytest.mark.parametrize("case", chosen(COMMANDS))
def test_no_command_of_a_client_delays_others_at_any_node(crowd, case, record_property):
    """Row 20: at the owner of a shard, and at the standbys that read its log."""

    def request():
        with suppress(PenstockError):
            COMMANDS[case](crowd.service, crowd.first)

    check_delay(crowd, request, record_property)


@pytest.mark.parametrize("case", chosen(MESSAGES_BETWEEN_NODES))
def test_no_message_between_nodes_delays_others_or_ends_a_node(crowd, case, record_property):
    """Row 20: the largest messages, and malformed ones."""

    def request():
        crowd.send(*MESSAGES_BETWEEN_NODES[case])

    check_delay(crowd, request, record_property)


@pytest.mark.service("chromium")
@pytest.mark.service("chromium-driver")
def test_the_console_of_a_node_shows_the_cluster_live(local_cluster, tmp_path):
    """The last of these: it stops a node."""
    asyncio.run(local_cluster.until_served())
    nodes = asyncio.run(local_cluster.status()).nodes
    seen, stopped = nodes[0], nodes[1]
    rows = "document.querySelectorAll('tbody tr')"
    with Browser(tmp_path) as browser:
        browser.visit(f"{seen.endpoint.rstrip('/')}/console#/cluster")
        until(browser, f"{rows}.length === {len(nodes) + 4}")
        until(browser, "document.querySelector('.verdict').dataset.kind !== 'bad'")
        assert browser.texts("tbody tr b")[: len(nodes)] == [f" {each.node}" for each in nodes]
        local_cluster.signal(stopped.node, signal.SIGSTOP)
        try:
            name = json.dumps(f"down: {stopped.node}")
            until(browser, f"document.querySelector('.verdict p').textContent.includes({name})")
            # Another node takes its shards over, and the page says so by itself.
            until(browser, "document.querySelector('.verdict').dataset.kind === 'warn'")
            assert not any(stopped.node in each for each in browser.texts("td:nth-child(2)")[3:])
        finally:
            local_cluster.signal(stopped.node, signal.SIGCONT)
