"""Dead letters over both protocols, and the tasks that move them back."""

import asyncio
import base64
import json
import time
import uuid

import pytest

from penstock.service import ConfigureQueue
from tests.server.conftest import until
from tests.server.sqs.asking import (
    arn,
    bodies,
    dead_letter_all,
    make,
    make_fifo,
    make_pair,
    push,
    receive,
    redrive,
    refused,
    send,
    shown,
)


def test_a_message_received_too_often_is_dead_lettered(local, either):
    """Row 17: after exactly as many receives as the policy says."""
    source, dead = make_pair(either, receives=2)
    policy = json.loads(shown(either, source)["RedrivePolicy"])
    assert policy == {"deadLetterTargetArn": arn(either, dead), "maxReceiveCount": 2}
    send(either, source, "poison")
    for _ in range(2):
        assert bodies(either, source) == ["poison"]
        local.clock.advance(seconds=30)
    assert bodies(either, source) == []
    (letter,) = receive(either, dead, AttributeNames=["All"])
    assert letter["Attributes"]["DeadLetterQueueSourceArn"] == arn(either, source)
    assert letter["Attributes"]["ApproximateReceiveCount"] == "3"
    assert either.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [source]
    assert not either.list_dead_letter_source_queues(QueueUrl=source).get("queueUrls")
    either.set_queue_attributes(QueueUrl=source, Attributes={"RedrivePolicy": ""})
    assert "RedrivePolicy" not in shown(either, source)


def test_a_dead_letter_of_a_fifo_queue_is_deduplicated_by_its_message_id(local, either):
    source, dead = make_pair(either, suffix=".fifo", FifoQueue="true")
    sent = push(either, source, "poison", MessageDeduplicationId="shared")
    assert bodies(either, source) == ["poison"]
    local.clock.advance(seconds=30)
    assert bodies(either, source) == []
    push(either, dead, "other", MessageDeduplicationId="shared")
    letters = receive(either, dead, MaxNumberOfMessages=10, AttributeNames=["All"])
    ids = {letter["Body"]: letter["Attributes"]["MessageDeduplicationId"] for letter in letters}
    assert ids == {"poison": sent["MessageId"], "other": "shared"}


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        ({"region_name": "eu-west-1"}, "Dead-letter target must be in same region as the source."),
        (
            {"aws_access_key_id": "111122223333"},
            "Dead-letter target owner should be same as the source.",
        ),
    ],
    ids=["region", "account"],
)
def test_a_dead_letter_queue_of_another_owner_or_region_is_refused(local, either, owner, reason):
    other = local.client(**owner)
    policy = redrive(arn(other, make(other, "dead")))
    message = f"Value {policy} for parameter RedrivePolicy is invalid. Reason: {reason}"
    attributes = {"RedrivePolicy": policy}
    assert refused(either.create_queue, QueueName="q", Attributes=attributes) == (
        "InvalidParameterValue",
        message,
    )
    url = make(either)
    assert refused(either.set_queue_attributes, QueueUrl=url, Attributes=attributes)[1] == message
    assert "RedrivePolicy" not in shown(either, url)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("not JSON", "Redrive policy is not a valid JSON map."),
        ('{"maxReceiveCount": 1}', "mandatory attribute: deadLetterTargetArn."),
        ('{"deadLetterTargetArn": "DEAD"}', "mandatory attribute: maxReceiveCount."),
        (redrive("dummy", 42), "Invalid value for deadLetterTargetArn."),
        (redrive("arn:aws:sqs:us-east-1:000000000000:none"), "target does not exist."),
        (redrive("FIFO"), "must be same type of queue as the source."),
        (redrive("DEAD", 0), "valid values are from 1 to 1000 both inclusive."),
        (redrive("DEAD", 1_001), "valid values are from 1 to 1000 both inclusive."),
        (redrive("DEAD", "x"), "valid values are from 1 to 1000 both inclusive."),
        (redrive("DEAD", "\u00b2"), "valid values are from 1 to 1000 both inclusive."),
        (redrive("DEAD", "\u0663"), "valid values are from 1 to 1000 both inclusive."),
        (redrive("DENIES"), "does not allow this queue as a source queue."),
        (redrive("OTHERS"), "does not allow this queue as a source queue."),
    ],
)
def test_a_bad_redrive_policy_is_refused(either, policy, reason):
    """Row 19: digits that are none of ASCII, among others."""
    dead = make(either, "dead")
    deny = make(either, "deny", RedriveAllowPolicy='{"redrivePermission": "denyAll"}')
    by_queue = {"redrivePermission": "byQueue", "sourceQueueArns": [arn(either, dead)]}
    others = make(either, "others", RedriveAllowPolicy=json.dumps(by_queue))
    fifo = make_fifo(either)
    for word, url in [("DEAD", dead), ("DENIES", deny), ("OTHERS", others), ("FIFO", fifo)]:
        policy = policy.replace(word, arn(either, url))
    given = {"RedrivePolicy": policy}
    code, message = refused(either.create_queue, QueueName="source", Attributes=given)
    assert code == "InvalidParameterValue"
    assert message.startswith(f"Value {policy} for parameter RedrivePolicy is invalid. Reason: ")
    assert message.endswith(reason)
    assert refused(either.get_queue_url, QueueName="source")[0].endswith("NonExistentQueue")


def tasks(client, source, count=1):
    return client.list_message_move_tasks(SourceArn=source, MaxResults=count).get("Results", [])


def wait_for(client, source, *statuses):
    """The latest task, once it has one of these statuses."""
    return until(
        lambda: next((each for each in tasks(client, source) if each["Status"] in statuses), None)
    )


def test_a_task_does_not_exceed_its_rate_and_can_be_cancelled(local, either):
    source, dead = make_pair(either)
    dead_letter_all(local, either, source, *"abcdefghij")
    dead_arn = arn(either, dead)
    began_s = time.monotonic()
    started = either.start_message_move_task(SourceArn=dead_arn, MaxNumberOfMessagesPerSecond=1)
    (task,) = tasks(either, dead_arn)
    assert task["Status"] == "RUNNING"
    assert task["TaskHandle"] == started["TaskHandle"]
    assert task["MaxNumberOfMessagesPerSecond"] == 1
    assert refused(either.start_message_move_task, SourceArn=dead_arn) == (
        "InvalidParameterValue",
        (
            "There is already a task running. Only one active task is allowed for a source "
            "queue arn at a given time."
        ),
    )
    cancelled = either.cancel_message_move_task(TaskHandle=started["TaskHandle"])
    # The first message is moved at once.
    moved_max = 1 + (time.monotonic() - began_s)
    assert cancelled["ApproximateNumberOfMessagesMoved"] <= moved_max
    task = wait_for(either, dead_arn, "CANCELLED")
    assert task["ApproximateNumberOfMessagesToMove"] == 10
    assert refused(either.cancel_message_move_task, TaskHandle=started["TaskHandle"])[0] == (
        "AWS.SimpleQueueService.UnsupportedOperation"
    )
    assert len(bodies(either, dead)) == 10 - task["ApproximateNumberOfMessagesMoved"]


def test_a_task_fails_when_its_destination_is_deleted(local, either):
    source, dead = make_pair(either)
    other = make(either, "other")
    for letters in ("abcdefghij", "klmnopqrst"):
        dead_letter_all(local, either, source, *letters)
    dead_arn = arn(either, dead)
    either.start_message_move_task(
        SourceArn=dead_arn, DestinationArn=arn(either, other), MaxNumberOfMessagesPerSecond=3
    )
    # Before the task has ended, which takes six seconds of the clock.
    either.delete_queue(QueueUrl=other)
    local.clock.advance(seconds=1)
    task = wait_for(either, dead_arn, "FAILED")
    assert task["FailureReason"] == "AWS.SimpleQueueService.NonExistentQueue"


def test_a_task_whose_destination_is_deleted_says_that_it_failed(local, either):
    """It never says that it is complete while messages are left that it did not move."""
    _, dead = make_pair(either)
    other = make(either, "other")
    for body in ("a", "b", "c"):
        send(either, dead, body)
    either.start_message_move_task(
        SourceArn=arn(either, dead),
        DestinationArn=arn(either, other),
        MaxNumberOfMessagesPerSecond=1,
    )
    either.delete_queue(QueueUrl=other)
    local.clock.advance(seconds=60)
    while local.call(lambda: any(map(is_move, asyncio.all_tasks()))):
        pass
    (task,) = either.list_message_move_tasks(SourceArn=arn(either, dead))["Results"]
    assert task["Status"] == "FAILED"
    assert "NonExistentQueue" in task["FailureReason"]
    assert len(bodies(either, dead)) == 3 - task["ApproximateNumberOfMessagesMoved"]


def test_a_task_ends_with_its_queue_and_moves_nothing_of_a_new_queue_of_that_name(local, either):
    _, dead = make_pair(either)
    other = make(either, "other")
    for body in ("a", "b", "c"):
        send(either, dead, body)
    either.start_message_move_task(
        SourceArn=arn(either, dead),
        DestinationArn=arn(either, other),
        MaxNumberOfMessagesPerSecond=1,
    )
    either.delete_queue(QueueUrl=dead)
    local.clock.advance(seconds=60)
    send(either, make(either, "dead"), "new")
    while local.call(lambda: any(map(is_move, asyncio.all_tasks()))):
        pass
    assert bodies(either, dead) == ["new"]
    assert "new" not in bodies(either, other)


def is_move(task):
    return task.get_name().startswith("move ")


def test_a_task_with_contradicting_parameters_is_refused(either):
    url = make(either)
    queue_arn = arn(either, url)
    none = "arn:aws:sqs:us-east-1:000000000000:none"
    begin = either.start_message_move_task
    assert refused(begin, SourceArn=queue_arn) == (
        "InvalidParameterValue",
        "Source queue must be configured as a Dead Letter Queue.",
    )
    missing = "The resource that you specified for the {} parameter doesn't exist."
    for call in (begin, either.list_message_move_tasks):
        assert refused(call, SourceArn=none) == (
            "ResourceNotFoundException",
            missing.format("SourceArn"),
        )
        assert refused(call, SourceArn="nonsense")[0] == "InvalidParameterValue"
    _, dead = make_pair(either, suffix="2")
    assert refused(begin, SourceArn=arn(either, dead), DestinationArn=none) == (
        "ResourceNotFoundException",
        missing.format("DestinationArn"),
    )
    for rate in (0, 501):
        code, _ = refused(begin, SourceArn=arn(either, dead), MaxNumberOfMessagesPerSecond=rate)
        assert code == "InvalidParameterValue"
    cancel = either.cancel_message_move_task
    assert refused(cancel, TaskHandle="nonsense") == (
        "InvalidParameterValue",
        "Value for parameter TaskHandle is invalid.",
    )
    unknown = base64.b64encode(json.dumps({"taskId": "x", "sourceArn": queue_arn}).encode())
    assert refused(cancel, TaskHandle=unknown.decode()) == (
        "ResourceNotFoundException",
        "Task does not exist.",
    )
    for limit in (0, 11):
        assert refused(either.list_message_move_tasks, SourceArn=queue_arn, MaxResults=limit)[
            0
        ] == ("InvalidParameterValue")


def test_a_queue_may_be_its_own_dead_letter_queue_and_nothing_moves(local, either):
    url = make(either)
    policy = redrive(arn(either, url), 1)
    either.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy})
    assert shown(either, url)["RedrivePolicy"] == policy
    assert either.list_dead_letter_source_queues(QueueUrl=url)["queueUrls"] == [url]
    send(either, url)
    for _ in range(3):
        assert len(receive(either, url)) == 1
        local.clock.advance(seconds=31)
    either.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": ""})
    assert "RedrivePolicy" not in shown(either, url)


def test_a_source_that_is_no_longer_allowed_keeps_its_dead_letters(local, either):
    source, dead = make_pair(either)
    policy = shown(either, source)["RedrivePolicy"]

    def allow(**permission):
        text = json.dumps(permission)
        either.set_queue_attributes(QueueUrl=dead, Attributes={"RedriveAllowPolicy": text})

    allow(redrivePermission="denyAll")
    assert shown(either, source)["RedrivePolicy"] == policy
    assert either.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [source]
    dead_letter_all(local, either, source, "kept")
    assert receive(either, dead) == []
    (message,) = receive(either, source)
    assert message["Body"] == "kept"
    either.delete_message(QueueUrl=source, ReceiptHandle=message["ReceiptHandle"])

    allow(redrivePermission="byQueue", sourceQueueArns=[arn(either, source)])
    dead_letter_all(local, either, source, "dead")
    assert bodies(either, dead) == ["dead"]
    assert shown(either, source)["RedrivePolicy"] == policy


def test_a_move_of_messages_without_a_source_queue_fails(local, either):
    _, dead = make_pair(either)
    send(either, dead, "sent here")
    dead_arn = arn(either, dead)
    handle = either.start_message_move_task(SourceArn=dead_arn)["TaskHandle"]
    handle_fields = json.loads(base64.b64decode(handle))
    assert (str(uuid.UUID(handle_fields["taskId"])), handle_fields["sourceArn"]) == (
        handle_fields["taskId"],
        dead_arn,
    )
    task = wait_for(either, dead_arn, "FAILED")
    assert (task["Status"], task["FailureReason"]) == ("FAILED", "CouldNotDetermineMessageSource")
    assert (
        task["ApproximateNumberOfMessagesMoved"],
        task["ApproximateNumberOfMessagesToMove"],
    ) == (0, 1)
    assert bodies(either, dead) == ["sent here"]


def test_a_redrive_policy_is_returned_as_it_was_given_with_its_count_as_a_number(local, either):
    dead = make(either, "dead")
    given = json.dumps({"maxReceiveCount": 7, "deadLetterTargetArn": arn(either, dead)}, indent=1)
    url = make(either, RedrivePolicy=given)
    assert shown(either, url)["RedrivePolicy"] == given
    make(either, RedrivePolicy=given)
    as_text = json.dumps({"deadLetterTargetArn": arn(either, dead), "maxReceiveCount": "9"})
    either.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": as_text})
    assert json.loads(shown(either, url)["RedrivePolicy"])["maxReceiveCount"] == 9
    changed = ConfigureQueue("q", {"max_receives": 3})
    local.execute(changed)
    assert json.loads(shown(either, url)["RedrivePolicy"])["maxReceiveCount"] == 3
    ended = ConfigureQueue("q", {"max_receives": None, "dead_letter": None})
    local.execute(ended)
    assert "RedrivePolicy" not in shown(either, url)
