"""Short functions for the requests that many SQS tests send."""

import json

import pytest
from botocore.exceptions import ClientError


def refused(call, **parameters):
    """The code and the message of the error that a call raises."""
    with pytest.raises(ClientError) as caught:
        call(**parameters)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def arn(client, url):
    shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    return shown["Attributes"]["QueueArn"]


def shown(client, url, *names):
    return client.get_queue_attributes(QueueUrl=url, AttributeNames=[*names] or ["All"]).get(
        "Attributes", {}
    )


def make(client, name="q", tags=None, **attributes):
    more = {} if tags is None else {"tags": tags}
    return client.create_queue(QueueName=name, Attributes=attributes, **more)["QueueUrl"]


def send(client, url, body="x", **options):
    return client.send_message(QueueUrl=url, MessageBody=body, **options)


def receive(client, url, **options):
    return client.receive_message(QueueUrl=url, **options).get("Messages", [])


def bodies(client, url, **options):
    options.setdefault("MaxNumberOfMessages", 10)
    return [message["Body"] for message in receive(client, url, **options)]


def entries(count, **more):
    return [{"Id": f"e{n}", "MessageBody": "x", **more} for n in range(count)]


def make_fifo(client, name="q.fifo", **attributes):
    return make(client, name, FifoQueue="true", **attributes)


def push(client, url, body, group="g", **options):
    options.setdefault("MessageDeduplicationId", body)
    return send(client, url, body, MessageGroupId=group, **options)


def redrive(target_arn, count=1):
    return json.dumps({"deadLetterTargetArn": target_arn, "maxReceiveCount": count})


def make_pair(client, receives=1, suffix="", **more):
    dead = make(client, f"dead{suffix}", **more)
    policy = redrive(arn(client, dead), receives)
    return make(client, f"source{suffix}", RedrivePolicy=policy, **more), dead


def dead_letter_all(local, client, source, *letters):
    """Sends messages and receives each until it is a dead letter."""
    for body in letters:
        send(client, source, body)
    receive(client, source, MaxNumberOfMessages=10)
    local.clock.advance(seconds=31)
