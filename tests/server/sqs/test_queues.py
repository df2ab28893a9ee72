"""Queues over both protocols: creating, changing, listing, tags, permissions, deleting."""

import json

import pytest
from botocore.exceptions import ClientError

from penstock.service import ListQueues
from tests.server.sqs.asking import make, refused, send, shown
from tests.server.sqs.conftest import Local


def test_a_new_queue_has_amazons_defaults(either):
    url = make(either)
    assert shown(either, url) == {
        "QueueArn": "arn:aws:sqs:us-east-1:000000000000:q",
        "ApproximateNumberOfMessages": "0",
        "ApproximateNumberOfMessagesNotVisible": "0",
        "ApproximateNumberOfMessagesDelayed": "0",
        "CreatedTimestamp": "1700000000",
        "LastModifiedTimestamp": "1700000000",
        "VisibilityTimeout": "30",
        "MaximumMessageSize": "1048576",
        "MessageRetentionPeriod": "345600",
        "DelaySeconds": "0",
        "ReceiveMessageWaitTimeSeconds": "0",
        "SqsManagedSseEnabled": "true",
    }
    assert shown(either, url, "DelaySeconds", "Policy") == {"DelaySeconds": "0"}


def test_queues_are_listed_by_prefix_and_by_page(either):
    names = [f"list-{number:02}" for number in range(7)]
    for name in ["other", *names]:
        make(either, name)
    listed = either.list_queues(QueueNamePrefix="list-")
    assert [url.rsplit("/", 1)[1] for url in listed["QueueUrls"]] == names
    assert "NextToken" not in listed
    pages: list[list[str]] = []
    token: dict[str, str] = {}
    while True:
        page = either.list_queues(QueueNamePrefix="list-", MaxResults=3, **token)
        pages.append([url.rsplit("/", 1)[1] for url in page["QueueUrls"]])
        if "NextToken" not in page:
            break
        token = {"NextToken": page["NextToken"]}
    assert pages == [names[:3], names[3:6], names[6:]]
    assert "QueueUrls" not in either.list_queues(QueueNamePrefix="none")
    for limit in (0, 1_001):
        assert refused(either.list_queues, MaxResults=limit)[0] == "InvalidParameterValue"
    assert refused(either.list_queues, NextToken="ü?", MaxResults=1)[0] == "InvalidParameterValue"


def test_a_queue_of_another_region_is_not_found_by_its_internal_name(local, either):
    make(local.client(region_name="eu-west-1"))
    inside = "q@eu-west-1.000000000000"
    assert inside in local.execute(ListQueues())
    refusal = refused(either.get_queue_url, QueueName=inside)
    assert refusal[0] == "AWS.SimpleQueueService.NonExistentQueue"


def test_the_refusal_of_a_queues_name_says_where_such_a_queue_is(local, either):
    make(local.client(region_name="eu-west-1"))
    with pytest.raises(ClientError) as raised:
        either.get_queue_url(QueueName="q")
    text = raised.value.response["Error"]["Message"]
    assert text.endswith(
        " It was looked for in us-east-1 of account 000000000000, and exists in eu-west-1 of "
        "account 000000000000."
    )
    with pytest.raises(ClientError) as raised:
        either.get_queue_url(QueueName="other")
    assert "was looked for" not in raised.value.response["Error"]["Message"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, url: client.send_message(QueueUrl=url, MessageBody="x"),
        lambda client, url: client.receive_message(QueueUrl=url),
        lambda client, url: client.delete_message(QueueUrl=url, ReceiptHandle="x"),
        lambda client, url: client.delete_message_batch(
            QueueUrl=url, Entries=[{"Id": "1", "ReceiptHandle": "x"}]
        ),
        lambda client, url: client.get_queue_attributes(QueueUrl=url),
        lambda client, url: client.list_queue_tags(QueueUrl=url),
        lambda client, url: client.purge_queue(QueueUrl=url),
        lambda client, url: client.delete_queue(QueueUrl=url),
    ],
)
def test_every_action_on_a_missing_queue_says_where_one_of_its_name_is(local, either, ask):
    elsewhere = make(local.client(region_name="eu-west-1"))
    code, text = refused(lambda: ask(either, elsewhere))
    assert code == "AWS.SimpleQueueService.NonExistentQueue"
    assert "looked for in us-east-1 of account 000000000000, and exists in eu-west-1" in text
    _, text = refused(lambda: ask(either, elsewhere + "-not"))
    assert text.startswith("The specified queue does not exist")
    assert "was looked for" not in text


def test_a_key_is_not_told_of_the_queues_of_other_accounts(query_data):
    mine, other = "111122223333", "444455556666"
    server = Local(query_data, keys={mine: "secret", other: "secret"})
    try:

        def client(account, region):
            keys = {"aws_access_key_id": account, "aws_secret_access_key": "secret"}
            return server.client(region_name=region, **keys)

        make(client(other, "eu-west-1"))
        here = client(mine, "us-east-1")
        url = f"{server.url}/{mine}/q"
        _, text = refused(here.send_message, QueueUrl=url, MessageBody="x")
        assert "exists in" not in text
        make(client(mine, "eu-west-2"))
        _, text = refused(here.send_message, QueueUrl=url, MessageBody="x")
        assert text.endswith(f"and exists in eu-west-2 of account {mine}.")
    finally:
        server.close()


def test_a_queue_is_found_by_every_form_of_its_url(either):
    url = make(either)
    send(either, url)
    account = url.rsplit("/", 2)[1]
    for address in (
        "q",
        "http://q",
        "http://localhost/queue/q",
        f"http://localhost:1/{account}/q",
        f"http://sqs.us-east-1.localhost:1/{account}/q",
        f"https://queue.amazonaws.com/{account}/q",
        f"http://localhost:1/queue/us-east-1/{account}/q",
    ):
        count = shown(either, address, "ApproximateNumberOfMessages")
        assert count == {"ApproximateNumberOfMessages": "1"}, address


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("http://nowhere", "AWS.SimpleQueueService.NonExistentQueue"),
        ("http://localhost/queue/nowhere", "AWS.SimpleQueueService.NonExistentQueue"),
        ("http://localhost/nowhere", "InvalidAddress"),
        ("http://localhost/queue/no where", "InvalidAddress"),
        ("http://[", "InvalidAddress"),
        ("/q", "InvalidAddress"),
    ],
)
def test_an_address_without_a_queue_is_refused(either, address, code):
    make(either)
    assert refused(either.purge_queue, QueueUrl=address)[0] == code


def test_permissions_become_a_policy(either):
    url = make(either)
    either.add_permission(
        QueueUrl=url,
        Label="cross",
        AWSAccountIds=["111122223333", "444455556666"],
        Actions=["ReceiveMessage"],
    )
    policy = json.loads(shown(either, url, "Policy")["Policy"])
    assert policy == {
        "Version": "2008-10-17",
        "Id": "arn:aws:sqs:us-east-1:000000000000:q/SQSDefaultPolicy",
        "Statement": [
            {
                "Sid": "cross",
                "Effect": "Allow",
                "Principal": {
                    "AWS": [
                        "arn:aws:iam::111122223333:root",
                        "arn:aws:iam::444455556666:root",
                    ]
                },
                "Action": "SQS:ReceiveMessage",
                "Resource": "arn:aws:sqs:us-east-1:000000000000:q",
            }
        ],
    }
    again = {"QueueUrl": url, "Label": "cross", "AWSAccountIds": ["111122223333"]}
    assert refused(either.add_permission, Actions=["*"], **again) == (
        "InvalidParameterValue",
        "Value cross for parameter Label is invalid. Reason: Already exists.",
    )
    many = ["SendMessage"] * 8
    assert refused(either.add_permission, Actions=many, **{**again, "Label": "b"}) == (
        "OverLimit",
        "8 Actions were found, maximum allowed is 7.",
    )
    either.remove_permission(QueueUrl=url, Label="cross")
    assert shown(either, url, "Policy") == {}
    assert refused(either.remove_permission, QueueUrl=url, Label="cross") == (
        "InvalidParameterValue",
        "Value cross for parameter Label is invalid. Reason: can't find label.",
    )


def test_a_policy_of_one_statement_needs_no_list(either):
    policy = json.dumps({"Statement": {"Sid": "one"}})
    url = make(either, Policy=policy)
    assert shown(either, url, "Policy") == {"Policy": policy}
    either.remove_permission(QueueUrl=url, Label="one")
    assert shown(either, url, "Policy") == {}


def test_the_two_kinds_of_encryption_exclude_each_other(either):
    url = make(either, KmsMasterKeyId="testKeyId", KmsDataKeyReusePeriodSeconds="6000")
    kms = ("KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds", "SqsManagedSseEnabled")
    assert shown(either, url, *kms) == {
        "KmsMasterKeyId": "testKeyId",
        "KmsDataKeyReusePeriodSeconds": "6000",
        "SqsManagedSseEnabled": "false",
    }
    managed = {"SqsManagedSseEnabled": "true"}
    both = {"KmsMasterKeyId": "another", **managed}
    assert refused(either.set_queue_attributes, QueueUrl=url, Attributes=both) == (
        "InvalidAttributeName",
        (
            "You can use one type of server-side encryption (SSE) at one time. "
            "You can either enable KMS SSE or SQS SSE."
        ),
    )
    either.set_queue_attributes(QueueUrl=url, Attributes=managed)
    assert shown(either, url, *kms) == managed


def test_removing_one_encryption_does_not_enable_another(either):
    url = make(either)
    names = ("KmsMasterKeyId", "KmsDataKeyReusePeriodSeconds", "SqsManagedSseEnabled")
    assert shown(either, url, *names) == {"SqsManagedSseEnabled": "true"}
    either.set_queue_attributes(QueueUrl=url, Attributes={"KmsMasterKeyId": "key"})
    assert shown(either, url, *names) == {
        "KmsMasterKeyId": "key",
        "KmsDataKeyReusePeriodSeconds": "300",
        "SqsManagedSseEnabled": "false",
    }
    either.set_queue_attributes(QueueUrl=url, Attributes={"KmsMasterKeyId": ""})
    assert shown(either, url, *names) == {"SqsManagedSseEnabled": "false"}


def test_a_boolean_may_begin_with_a_capital(either):
    written = {"FifoQueue": "True", "ContentBasedDeduplication": "TRUE"}
    url = make(either, "q.fifo", **written)
    assert make(either, "q.fifo", **written) == url
    assert make(either, "q.fifo", FifoQueue="true", ContentBasedDeduplication="true") == url
    either.set_queue_attributes(QueueUrl=url, Attributes={"FifoQueue": "True"})
    assert shown(either, url, *written) == dict.fromkeys(written, "true")
    other = {"FifoQueue": "true", "ContentBasedDeduplication": "False"}
    assert refused(either.create_queue, QueueName="q.fifo", Attributes=other) == (
        "QueueAlreadyExists",
        (
            "A queue already exists with the same name and a different value for attribute "
            "ContentBasedDeduplication"
        ),
    )
