"""Dead-letter queues: redrive policies, what they allow, and when a message is moved."""

import json

from penstock.testing.sqs.checks import check, expect, require
from penstock.testing.sqs.target import CheckedServer, redrive

LETTERS = "dead letters"


@check(LETTERS, wait_s=3)
def a_message_received_too_often_is_dead_lettered(target: CheckedServer) -> None:
    """RedrivePolicy: moved when it was received more than maxReceiveCount times."""
    source, dead = target.pair(receives=2, VisibilityTimeout="1")
    sent = target.send(source, "poison")
    for _ in range(2):
        expect(target.bodies(source), ["poison"], "an allowed receive")
        target.wait(1)
    expect(target.bodies(source), [], "the receive after the last that is allowed")
    letter = target.receive_one(dead, AttributeNames=["All"])
    found = (letter["Body"], letter["MessageId"])
    expect(found, ("poison", sent["MessageId"]), "the dead letter")
    expect(target.count(source), 0, "the count of the source")


@check(LETTERS, wait_s=1)
def a_dead_letter_names_its_source(target: CheckedServer) -> None:
    """DeadLetterQueueSourceArn: the queue that a dead letter comes from."""
    source, dead = target.pair(VisibilityTimeout="1")
    target.send(source)
    target.receive_one(source)
    target.wait(1)
    expect(target.receive(source), [], "the second receive")
    shown = target.receive_one(dead, AttributeNames=["All"]).get("Attributes", {})
    expect(shown.get("DeadLetterQueueSourceArn"), target.arn(source), "the attribute")


@check(LETTERS)
def a_released_message_counts_as_received(target: CheckedServer) -> None:
    """maxReceiveCount: every receive without a delete counts, also one that was released."""
    source, dead = target.pair(receives=1)
    target.send(source, "poison")
    target.hide(source, target.receive_one(source), 0)
    expect(target.bodies(source), [], "the receive after the last that is allowed")
    expect(target.bodies(dead), ["poison"], "the dead letters")


@check(LETTERS, wait_s=1)
def a_fifo_queue_moves_its_dead_letters_in_order(target: CheckedServer) -> None:
    """Dead-letter queues of FIFO queues are FIFO queues, and the group goes on."""
    source, dead = target.pair(suffix=".fifo", FifoQueue="true", VisibilityTimeout="1")
    for body in ("a1", "a2"):
        target.push(source, body)
    expect(target.bodies(source, MaxNumberOfMessages=1), ["a1"], "the first receive")
    target.wait(1)
    expect(target.bodies(source), ["a2"], "the second receive")
    expect(target.bodies(dead), ["a1"], "the dead letters")


@check(LETTERS)
def the_policy_is_returned_and_can_be_removed(target: CheckedServer) -> None:
    """RedrivePolicy: a JSON object with deadLetterTargetArn and maxReceiveCount; "" removes it."""
    source, dead = target.pair(receives=2)
    policy = json.loads(target.attributes(source)["RedrivePolicy"])
    wanted = {"deadLetterTargetArn": target.arn(dead), "maxReceiveCount": 2}
    found = {**policy, "maxReceiveCount": int(policy["maxReceiveCount"])}
    expect(found, wanted, "the policy")
    target.set(source, RedrivePolicy="")
    require(not target.attributes(source).get("RedrivePolicy"), "the policy is still there")


@check(LETTERS)
def the_sources_of_a_dead_letter_queue_are_listed(target: CheckedServer) -> None:
    """ListDeadLetterSourceQueues: the queues whose redrive policy names this one."""
    source, dead = target.pair()
    listed = target.client.list_dead_letter_source_queues
    expect(listed(QueueUrl=dead).get("queueUrls"), [source], "the list")
    require(not listed(QueueUrl=source).get("queueUrls"), "a queue without sources lists some")


@check(LETTERS)
def sources_are_listed_in_pages(target: CheckedServer) -> None:
    """ListDeadLetterSourceQueues: MaxResults and NextToken."""
    dead = target.queue()
    policy = redrive(target.arn(dead))
    urls = sorted(target.queue(RedrivePolicy=policy) for _ in range(3))
    listed = target.client.list_dead_letter_source_queues
    page = listed(QueueUrl=dead, MaxResults=2)
    rest = listed(QueueUrl=dead, MaxResults=2, NextToken=page["NextToken"])
    found = [page["queueUrls"], rest["queueUrls"]]
    expect([len(urls) for urls in found], [2, 1], "the pages")
    expect(sorted(found[0] + found[1]), urls, "the list")


def _refused(target: CheckedServer, policy: str, reason: str) -> None:
    name = target.name()
    text = target.refuses(
        target.client.create_queue,
        "InvalidParameterValue",
        QueueName=name,
        Attributes={"RedrivePolicy": policy},
    )
    if target.texts:
        start = f"Value {policy} for parameter RedrivePolicy is invalid. Reason: "
        require(text.startswith(start) and text.endswith(reason), f"the text is {text}")
    target.refuses(target.client.get_queue_url, "QueueDoesNotExist", QueueName=name)


@check(LETTERS)
def a_redrive_policy_must_be_complete(target: CheckedServer) -> None:
    """RedrivePolicy: a JSON object with both fields."""
    arn = target.arn(target.queue())
    _refused(target, "not JSON", "Redrive policy is not a valid JSON map.")
    _refused(target, '{"maxReceiveCount": 1}', "mandatory attribute: deadLetterTargetArn.")
    _refused(
        target, json.dumps({"deadLetterTargetArn": arn}), "mandatory attribute: maxReceiveCount."
    )


@check(LETTERS)
def the_receive_count_of_a_policy_is_from_1_to_1000(target: CheckedServer) -> None:
    """maxReceiveCount: 1 to 1,000."""
    arn = target.arn(target.queue())
    for bad in (0, 1_001, "x", "\u00b2", "\u0663"):
        reason = "valid values are from 1 to 1000 both inclusive."
        _refused(target, redrive(arn, bad), reason)
    for good in (1, 1_000):
        target.queue(RedrivePolicy=redrive(arn, good))


@check(LETTERS)
def the_target_of_a_policy_must_exist(target: CheckedServer) -> None:
    """deadLetterTargetArn: of a queue that exists."""
    arn = target.arn(target.queue())
    _refused(target, redrive("dummy", 42), "Invalid value for deadLetterTargetArn.")
    _refused(target, redrive(f"{arn}-none"), "target does not exist.")


@check(LETTERS)
def the_target_of_a_policy_is_of_the_same_type(target: CheckedServer) -> None:
    """Dead-letter queues: of a FIFO queue a FIFO queue, of a standard queue a standard queue."""
    reason = "must be same type of queue as the source."
    _refused(target, redrive(target.arn(target.fifo())), reason)


@check(LETTERS)
def an_allow_policy_that_denies_all_is_enforced(target: CheckedServer) -> None:
    """RedriveAllowPolicy, denyAll: no queue can use this one for its dead letters."""
    dead = target.queue(RedriveAllowPolicy='{"redrivePermission": "denyAll"}')
    reason = "does not allow this queue as a source queue."
    _refused(target, redrive(target.arn(dead)), reason)


@check(LETTERS)
def an_allow_policy_by_queue_is_enforced(target: CheckedServer) -> None:
    """RedriveAllowPolicy, byQueue: only the queues of sourceQueueArns."""
    dead, other = target.queue(), target.queue()
    name = target.name()
    allowed = target.arn(other).rpartition(":")[0] + f":{name}"
    allow = {"redrivePermission": "byQueue", "sourceQueueArns": [allowed]}
    target.set(dead, RedriveAllowPolicy=json.dumps(allow))
    _refused(target, redrive(target.arn(dead)), "does not allow this queue as a source queue.")
    source = target.queue(name, RedrivePolicy=redrive(target.arn(dead)))
    listed = target.client.list_dead_letter_source_queues(QueueUrl=dead)
    expect(listed.get("queueUrls"), [source], "the sources")


@check(LETTERS)
def a_bad_allow_policy_is_refused(target: CheckedServer) -> None:
    """RedriveAllowPolicy: allowAll, denyAll or byQueue with up to ten sources."""
    arn = target.arn(target.queue())
    many = [f"{arn}{number}" for number in range(11)]
    for policy in (
        "x",
        "{}",
        '{"redrivePermission": "some"}',
        '{"redrivePermission": "byQueue"}',
        json.dumps({"redrivePermission": "denyAll", "sourceQueueArns": [arn]}),
        '{"redrivePermission": "byQueue", "sourceQueueArns": ["x"]}',
        json.dumps({"redrivePermission": "byQueue", "sourceQueueArns": many}),
    ):
        target.refuses(
            target.client.create_queue,
            "InvalidParameterValue",
            QueueName=target.name(),
            Attributes={"RedriveAllowPolicy": policy},
        )
