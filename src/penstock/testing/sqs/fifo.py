"""FIFO queues: order, groups, deduplication, repeated receives; and groups of standard queues."""

from penstock.testing.sqs.checks import check, expect, require
from penstock.testing.sqs.target import CheckedServer, entries

ORDER = "FIFO order and groups"
DEDUP = "FIFO deduplication"
ATTEMPTS = "receive attempt ids"
FAIR = "fair queues"
NEEDS_DEDUP = (
    "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId "
    "provided explicitly"
)


@check(ORDER)
def a_fifo_queue_shows_its_attributes(target: CheckedServer) -> None:
    """FIFO attributes: FifoQueue, ContentBasedDeduplication, DeduplicationScope, the limit."""
    url = target.fifo(ContentBasedDeduplication="true")
    shown = target.attributes(url)
    wanted = {
        "FifoQueue": "true",
        "ContentBasedDeduplication": "true",
        "DeduplicationScope": "queue",
        "FifoThroughputLimit": "perQueue",
    }
    expect({name: shown.get(name) for name in wanted}, wanted, "the attributes")


@check(ORDER)
def high_throughput_is_set_by_both_attributes(target: CheckedServer) -> None:
    """FifoThroughputLimit: perMessageGroupId only with the DeduplicationScope messageGroup."""
    url = target.fifo()
    change = {"DeduplicationScope": "messageGroup", "FifoThroughputLimit": "perMessageGroupId"}
    target.set(url, **change)
    expect(target.attributes(url, *change), change, "the attributes")
    target.refuses(
        target.client.set_queue_attributes,
        "InvalidAttributeValue",
        QueueUrl=url,
        Attributes={"DeduplicationScope": "queue"},
    )


@check(ORDER)
def the_type_of_a_queue_cannot_be_changed(target: CheckedServer) -> None:
    """FifoQueue: can be given only when the queue is created."""
    change = target.client.set_queue_attributes
    target.refuses(
        change,
        "InvalidAttributeName",
        "Unknown Attribute FifoQueue.",
        QueueUrl=target.queue(),
        Attributes={"FifoQueue": "true"},
    )
    target.refuses(
        change,
        "InvalidAttributeValue",
        "Invalid value for the parameter FifoQueue. Reason: Modifying queue type is not supported.",
        QueueUrl=target.fifo(),
        Attributes={"FifoQueue": "false"},
    )


@check(ORDER)
def a_standard_queue_has_no_attributes_of_fifo_queues(target: CheckedServer) -> None:
    """DeduplicationScope, FifoThroughputLimit: for FIFO queues only."""
    url = target.queue()
    for name, value in (("DeduplicationScope", "queue"), ("FifoThroughputLimit", "perQueue")):
        target.refuses(
            target.client.set_queue_attributes,
            "InvalidAttributeName",
            f"You can specify the {name} only when FifoQueue is set to true.",
            QueueUrl=url,
            Attributes={name: value},
        )


@check(ORDER)
def a_message_of_a_fifo_queue_needs_a_group(target: CheckedServer) -> None:
    """SendMessage, MessageGroupId: required for FIFO queues."""
    target.refuses(
        target.client.send_message,
        "MissingParameter",
        "The request must contain the parameter MessageGroupId.",
        QueueUrl=target.fifo(),
        MessageBody="x",
        MessageDeduplicationId="1",
    )


@check(DEDUP)
def a_message_of_a_fifo_queue_needs_a_dedup_id(target: CheckedServer) -> None:
    """SendMessage: an error without MessageDeduplicationId and without dedup by content."""
    target.refuses(
        target.client.send_message,
        "InvalidParameterValue",
        NEEDS_DEDUP,
        QueueUrl=target.fifo(),
        MessageBody="x",
        MessageGroupId="g",
    )


@check(ORDER)
def a_message_of_a_fifo_queue_has_no_delay_of_its_own(target: CheckedServer) -> None:
    """SendMessage, DelaySeconds: on a FIFO queue only that of the queue."""
    target.refuses(
        target.client.send_message,
        "InvalidParameterValue",
        "Value 2 for parameter DelaySeconds is invalid. "
        "Reason: The request include parameter that is not valid for this queue type.",
        QueueUrl=target.fifo(),
        MessageBody="x",
        MessageGroupId="g",
        MessageDeduplicationId="d",
        DelaySeconds=2,
    )


@check(ORDER, wait_s=1)
def the_delay_of_a_fifo_queue_applies_to_its_messages(target: CheckedServer) -> None:
    """Delay queues: DelaySeconds of the queue, also on FIFO queues."""
    url = target.fifo(DelaySeconds="1")
    target.push(url, "late")
    expect(target.bodies(url), [], "what is received at once")
    target.wait(1)
    expect(target.bodies(url), ["late"], "what is received afterwards")


@check(ORDER)
def group_and_dedup_ids_have_up_to_128_plain_characters(target: CheckedServer) -> None:
    """MessageGroupId, MessageDeduplicationId: alphanumeric and punctuation, 128 at most."""
    url = target.fifo()
    for name in ("MessageGroupId", "MessageDeduplicationId"):
        given = {"MessageGroupId": "g", "MessageDeduplicationId": "d", name: "!" * 128}
        target.send(url, **given)
        for bad in ("x" * 129, "ü", "a b", "\n"):
            text = target.refuses(
                target.client.send_message,
                "InvalidParameterValue",
                QueueUrl=url,
                MessageBody="x",
                **{**given, name: bad},
            )
            wanted = f"{name} can only include alphanumeric and punctuation characters"
            require(not target.texts or wanted in text, f"the text is {text}")


@check(ORDER)
def messages_of_a_group_are_received_in_the_order_of_their_sends(target: CheckedServer) -> None:
    """FIFO delivery: strictly in order within a message group."""
    url = target.fifo()
    for number in range(12):
        target.push(url, f"a{number:02}")
    found: list[str] = []
    # A receive may give fewer than there are.
    for _ in range(12):
        for message in target.receive(url, MaxNumberOfMessages=10):
            found.append(message["Body"])
            target.delete(url, message)
    expect(found, [f"a{number:02}" for number in range(12)], "the order")


@check(ORDER)
def a_receive_gets_as_many_messages_of_one_group_as_it_can(target: CheckedServer) -> None:
    """FIFO receive: as many messages of one group as possible, then those of others."""
    url = target.fifo()
    for body in ("a1", "b1", "a2", "a3"):
        target.push(url, body, body[0])
    expect(target.bodies(url), ["a1", "a2", "a3", "b1"], "the order")


@check(ORDER)
def a_group_is_blocked_while_one_of_its_messages_is_in_flight(target: CheckedServer) -> None:
    """FIFO receive: no more of a group while some of it are in flight; others go on."""
    url = target.fifo()
    for body in ("a1", "a2", "b1"):
        target.push(url, body, body[0])
    first = target.receive_one(url)
    expect(first["Body"], "a1", "the first message")
    expect(target.bodies(url), ["b1"], "what else can be received")
    target.delete(url, first)
    expect(target.bodies(url), ["a2"], "what can be received after the delete")


@check(ORDER, wait_s=1)
def a_group_keeps_its_order_when_a_message_comes_back(target: CheckedServer) -> None:
    """FIFO receive: a message whose timeout ends is received before the later ones of its group."""
    url = target.fifo()
    for body in ("a1", "a2"):
        target.push(url, body)
    expect(target.receive_one(url, VisibilityTimeout=1)["Body"], "a1", "the first message")
    target.wait(1)
    expect(target.bodies(url)[:1], ["a1"], "the next message")


@check(ORDER)
def a_released_message_is_received_before_the_rest_of_its_batch(target: CheckedServer) -> None:
    """FIFO receive: a message that is visible again is the next of its group."""
    url = target.fifo()
    for body in ("a1", "a2", "b1"):
        target.push(url, body, body[0])
    first, _ = target.receive(url, MaxNumberOfMessages=2)
    target.hide(url, first, 0)
    expect(sorted(target.bodies(url)), ["a1", "b1"], "what can be received")


@check(ORDER, wait_s=2)
def messages_behind_a_hidden_one_of_their_group_are_hidden(target: CheckedServer) -> None:
    """FIFO receive: while an earlier message of the group is in flight, later ones wait."""
    url = target.fifo(VisibilityTimeout="1")
    for body in ("a1", "a2", "a3"):
        target.push(url, body)
    messages = target.receive(url, MaxNumberOfMessages=5)
    expect(len(messages), 3, "the number of received messages")
    target.hide(url, messages[1], 60)
    target.wait(2)
    expect(target.bodies(url), ["a1"], "what can be received")


@check(ORDER)
def sequence_numbers_grow_and_have_20_digits(target: CheckedServer) -> None:
    """SequenceNumber: 128 bits, non-consecutive, and it grows within a group."""
    url = target.fifo()
    numbers = [target.push(url, body)["SequenceNumber"] for body in ("a", "b", "c")]
    require({len(number) for number in numbers} == {20}, f"the numbers are {numbers}")
    require(numbers == sorted(set(numbers)), f"the numbers are {numbers}")
    message = target.receive_one(url, AttributeNames=["All"])
    shown = message["Attributes"]
    wanted = {"SequenceNumber": numbers[0], "MessageGroupId": "g", "MessageDeduplicationId": "a"}
    expect({name: shown.get(name) for name in wanted}, wanted, "the attributes")


@check(DEDUP)
def a_duplicate_is_accepted_and_not_delivered(target: CheckedServer) -> None:
    """MessageDeduplicationId: within five minutes a repeated send is answered as the first."""
    url = target.fifo()
    first = target.push(url, "x", MessageDeduplicationId="d")
    again = target.push(url, "y", MessageDeduplicationId="d")
    expect(again["MessageId"], first["MessageId"], "the id of the duplicate")
    expect(target.bodies(url), ["x"], "what is received")


@check(DEDUP)
def a_duplicate_of_a_deleted_message_is_not_delivered(target: CheckedServer) -> None:
    """Deduplication: SQS continues to keep the id also after the message was deleted."""
    url = target.fifo()
    target.push(url, "x", MessageDeduplicationId="d")
    target.delete(url, target.receive_one(url))
    target.push(url, "y", MessageDeduplicationId="d")
    expect(target.bodies(url), [], "what is received")


@check(DEDUP, wait_s=301)
def the_deduplication_window_is_five_minutes(target: CheckedServer) -> None:
    """Deduplication interval: five minutes from the send, then the id is new again."""
    url = target.fifo()
    minutes = target.span(300)
    target.push(url, "x", MessageDeduplicationId="d")
    target.delete(url, target.receive_one(url))
    minutes.nearly()
    target.push(url, "within", MessageDeduplicationId="d")
    expect(target.bodies(url), [], "what is received within")
    minutes.over()
    target.push(url, "later", MessageDeduplicationId="d")
    expect(target.bodies(url), ["later"], "what is received later")


@check(DEDUP)
def content_can_be_the_dedup_id(target: CheckedServer) -> None:
    """ContentBasedDeduplication: the SHA-256 of the body, not of the attributes."""
    url = target.fifo(ContentBasedDeduplication="true")
    text = {"DataType": "String", "StringValue": "x"}
    target.send(url, "same", MessageGroupId="a")
    target.send(url, "same", MessageGroupId="b", MessageAttributes={"a": text})
    target.send(url, "other", MessageGroupId="a")
    expect(sorted(target.bodies(url)), ["other", "same"], "what is received")


@check(DEDUP)
def an_explicit_dedup_id_replaces_that_of_the_content(target: CheckedServer) -> None:
    """ContentBasedDeduplication: a MessageDeduplicationId overrides the generated one."""
    url = target.fifo(ContentBasedDeduplication="true")
    target.send(url, "same", MessageGroupId="a", MessageDeduplicationId="1")
    target.send(url, "same", MessageGroupId="a", MessageDeduplicationId="2")
    expect(target.bodies(url), ["same", "same"], "what is received")


@check(DEDUP)
def the_scope_of_deduplication_can_be_the_group(target: CheckedServer) -> None:
    """DeduplicationScope: queue or messageGroup."""
    url = target.fifo(ContentBasedDeduplication="true", DeduplicationScope="messageGroup")
    for group in ("a", "a", "b"):
        target.send(url, "same", MessageGroupId=group)
    expect(target.bodies(url), ["same", "same"], "what is received")


@check(DEDUP)
def a_standard_queue_takes_no_dedup_id(target: CheckedServer) -> None:
    """MessageDeduplicationId: applies only to FIFO queues."""
    target.refuses(
        target.client.send_message,
        "InvalidParameterValue",
        QueueUrl=target.queue(),
        MessageBody="x",
        MessageDeduplicationId="d",
    )


@check(ORDER)
def a_bad_message_of_a_fifo_batch_fails_alone(target: CheckedServer) -> None:
    """SendMessageBatch: the good entries of a batch to a FIFO queue are sent."""
    for bad in (
        {"MessageBody": ""},
        {"DelaySeconds": 3},
        {"MessageBody": "x" * 1_025},
        {"MessageGroupId": "a b"},
    ):
        url = target.fifo(ContentBasedDeduplication="true", MaximumMessageSize="1024")
        first, second = entries(2, MessageGroupId="g")
        answer = target.client.send_message_batch(
            QueueUrl=url, Entries=[{**first, "MessageBody": "first"}, {**second, **bad}]
        )
        expect([each["Id"] for each in answer.get("Successful", [])], ["e0"], "what was sent")
        failed = [(each["Id"], each["SenderFault"]) for each in answer.get("Failed", [])]
        expect(failed, [("e1", True)], "what failed")
        expect(target.bodies(url), ["first"], "what is received")


@check(ATTEMPTS, wait_s=4)
def a_repeated_receive_gives_the_same_messages_and_receipts(target: CheckedServer) -> None:
    """ReceiveRequestAttemptId: a retry gives the same set, and hides it anew."""
    url = target.fifo(VisibilityTimeout="4")
    target.push(url, "a")
    target.push(url, "b")
    attempt = {"ReceiveRequestAttemptId": "try-1", "MaxNumberOfMessages": 10}
    first = target.receive(url, **attempt)
    target.wait(1)
    again = target.receive(url, **attempt)
    found = [(message["Body"], message["ReceiptHandle"]) for message in again]
    wanted = [(message["Body"], message["ReceiptHandle"]) for message in first]
    expect((len(found), found), (2, wanted), "the repeated receive")
    target.wait(2)
    expect(target.bodies(url), [], "a receive within the new timeout")


@check(ATTEMPTS)
def an_attempt_whose_messages_were_deleted_is_refused(target: CheckedServer) -> None:
    """ReceiveRequestAttemptId: an error if a message of it was deleted or changed meanwhile."""
    url = target.fifo()
    target.push(url, "a")
    attempt = {"ReceiveRequestAttemptId": "try-1"}
    target.delete(url, target.receive_one(url, **attempt))
    target.refuses(target.client.receive_message, "InvalidParameterValue", QueueUrl=url, **attempt)


@check(ATTEMPTS, wait_s=301)
def an_attempt_id_is_kept_for_five_minutes(target: CheckedServer) -> None:
    """ReceiveRequestAttemptId: can be retried for five minutes after the receive."""
    url = target.fifo(VisibilityTimeout="600")
    target.push(url, "a", "a")
    minutes = target.span(300)
    attempt = {"ReceiveRequestAttemptId": "try-1"}
    first = target.receive_one(url, **attempt)
    minutes.nearly()
    again = target.receive_one(url, **attempt)
    expect(again["ReceiptHandle"], first["ReceiptHandle"], "the receipt within")
    target.push(url, "b", "b")
    target.wait(302)
    expect(target.bodies(url, **attempt), ["b"], "what is received later")


@check(ATTEMPTS)
def a_standard_queue_takes_no_attempt_id(target: CheckedServer) -> None:
    """ReceiveRequestAttemptId: applies only to FIFO queues."""
    target.refuses(
        target.client.receive_message,
        "InvalidParameterValue",
        QueueUrl=target.queue(),
        ReceiveRequestAttemptId="d",
    )


@check(FAIR)
def a_message_of_a_standard_queue_may_have_a_group(target: CheckedServer) -> None:
    """Fair queues: MessageGroupId on a standard queue names the tenant of a message."""
    url = target.queue()
    target.send(url, "x", MessageGroupId="tenant")
    message = target.receive_one(url, AttributeNames=["MessageGroupId"])
    expect(message.get("Attributes"), {"MessageGroupId": "tenant"}, "Attributes")


@check(FAIR)
def a_noisy_group_does_not_delay_the_others(target: CheckedServer) -> None:
    """Fair queues: messages of quiet groups are received before those of a noisy one."""
    url = target.queue()
    for _ in range(10):
        target.client.send_message_batch(QueueUrl=url, Entries=entries(10, MessageGroupId="noisy"))
    for _ in range(4):
        target.receive(url, MaxNumberOfMessages=10)
    target.send(url, "quiet", MessageGroupId="quiet")
    expect(target.receive_one(url)["Body"], "quiet", "the next message")
