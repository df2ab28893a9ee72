"""Move tasks and limits of purges continue after a restart of the server."""

import signal
import time

import pytest

from tests.server.sqs.asking import arn, bodies, make, make_pair, receive, refused, send, shown
from tests.server.sqs.conftest import serve

WAIT_S_MAX = 60


@pytest.fixture
def data(tmp_path):
    return ["--data", str(tmp_path / "store")]


def latest_task(client, source, *statuses):
    """The latest move task of a queue, once it has one of these statuses."""
    until_s = time.monotonic() + WAIT_S_MAX
    while True:
        (task,) = client.list_message_move_tasks(SourceArn=source)["Results"]
        if task["Status"] in statuses or time.monotonic() > until_s:
            return task


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_move_task_continues_after_a_restart(data, how):
    with serve(*data) as server:
        client = server.client()
        source, dead = make_pair(client)
        for body in ("one", "two", "three"):
            send(client, source, body)
        assert len(receive(client, source, MaxNumberOfMessages=10, VisibilityTimeout=0)) == 3
        dead_arn = arn(client, dead)
        waiting = shown(client, dead, "ApproximateNumberOfMessages")
        assert waiting == {"ApproximateNumberOfMessages": "3"}
        started = client.start_message_move_task(SourceArn=dead_arn, MaxNumberOfMessagesPerSecond=2)
        server.stop(how)
    with serve(*data) as server:
        client = server.client()
        task = latest_task(client, dead_arn, "RUNNING", "COMPLETED")
        if task["Status"] == "RUNNING":
            assert task["TaskHandle"] == started["TaskHandle"]
        task = latest_task(client, dead_arn, "COMPLETED")
        assert task["Status"] == "COMPLETED"
        assert task["ApproximateNumberOfMessagesMoved"] == 3
        url = client.get_queue_url(QueueName="source")["QueueUrl"]
        assert sorted(bodies(client, url)) == ["one", "three", "two"]
    with serve(*data) as server:
        task = latest_task(server.client(), dead_arn, "COMPLETED")
        assert task["Status"] == "COMPLETED"


def test_a_purge_refuses_the_next_one_also_after_a_restart(data):
    with serve(*data, "--aws-limits") as server:
        client = server.client()
        url = make(client)
        before = shown(client, url, "LastModifiedTimestamp", "CreatedTimestamp")
        client.purge_queue(QueueUrl=url)
        server.stop()
    with serve(*data, "--aws-limits") as server:
        client = server.client()
        url = client.get_queue_url(QueueName="q")["QueueUrl"]
        assert refused(client.purge_queue, QueueUrl=url) == (
            "AWS.SimpleQueueService.PurgeQueueInProgress",
            "Only one PurgeQueue operation on q is allowed every 60 seconds.",
        )
        assert shown(client, url, "LastModifiedTimestamp", "CreatedTimestamp") == before
