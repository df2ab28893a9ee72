"""Claims: how long a received message is hidden, and what its receipt can do."""

from penstock.testing.sqs.checks import check, expect, require
from penstock.testing.sqs.target import CheckedServer

VISIBILITY = "visibility"
RECEIPTS = "receipts"
HOURS = 3_600


@check(VISIBILITY, wait_s=2)
def a_message_comes_back_when_its_visibility_timeout_ends(target: CheckedServer) -> None:
    """Visibility timeout: hidden from its receive on for the queue's time, then received again."""
    url = target.queue(VisibilityTimeout="2")
    sent = target.send(url)
    hidden = target.span(2)
    first = target.receive_one(url)
    expect(target.receive(url), [], "a receive at once")
    expect(target.count(url, "NotVisible"), 1, "ApproximateNumberOfMessagesNotVisible")
    hidden.nearly()
    expect(target.receive(url), [], "a receive before the end")
    hidden.over()
    again = target.receive_one(url)
    expect(again["MessageId"], sent["MessageId"], "the id of the message that came back")
    require(again["ReceiptHandle"] != first["ReceiptHandle"], "the receipt is that of before")


@check(VISIBILITY, wait_s=1)
def the_timeout_of_a_receive_replaces_that_of_the_queue(target: CheckedServer) -> None:
    """ReceiveMessage, VisibilityTimeout: for the messages of this receive."""
    url = target.queue(VisibilityTimeout="300")
    target.send(url)
    target.receive_one(url, VisibilityTimeout=1)
    target.wait(1)
    target.receive_one(url)
    expect(target.receive(url), [], "a receive within the queue's timeout")


@check(VISIBILITY, wait_s=3)
def a_timeout_can_be_extended(target: CheckedServer) -> None:
    """ChangeMessageVisibility: the new timeout counts from the moment of the call."""
    url = target.queue(VisibilityTimeout="2")
    target.send(url)
    target.hide(url, target.receive_one(url), 60)
    target.wait(3)
    expect(target.receive(url), [], "a receive after the first timeout")


@check(VISIBILITY)
def a_timeout_of_zero_releases_a_message(target: CheckedServer) -> None:
    """ChangeMessageVisibility with 0: the message can be received at once."""
    url = target.queue()
    target.send(url)
    target.hide(url, target.receive_one(url), 0)
    again = target.receive_one(url, AttributeNames=["ApproximateReceiveCount"])
    expect(again["Attributes"], {"ApproximateReceiveCount": "2"}, "Attributes")


@check(VISIBILITY)
def a_change_of_visibility_is_from_0_to_43200_seconds(target: CheckedServer) -> None:
    """ChangeMessageVisibility, VisibilityTimeout: 0 to 43,200."""
    url = target.queue()
    target.send(url)
    receipt = target.receive_one(url)["ReceiptHandle"]
    for value in (-1, 43_201):
        target.refuses(
            target.client.change_message_visibility,
            "InvalidParameterValue",
            QueueUrl=url,
            ReceiptHandle=receipt,
            VisibilityTimeout=value,
        )


@check(VISIBILITY, wait_s=HOURS)
def a_message_is_hidden_for_at_most_twelve_hours_from_its_receive(target: CheckedServer) -> None:
    """Visibility timeout: twelve hours in all; changing it does not begin them again."""
    url = target.queue()
    target.send(url)
    message = target.receive_one(url)
    target.hide(url, message, 12 * HOURS)
    target.wait(HOURS)
    target.hide(url, message, 11 * HOURS)
    too_long = 11 * HOURS + 1
    target.refuses(
        target.client.change_message_visibility,
        "InvalidParameterValue",
        f"Value {too_long} for parameter VisibilityTimeout is invalid. Reason: Total "
        "VisibilityTimeout for the message is beyond the limit [43200 seconds].",
        QueueUrl=url,
        ReceiptHandle=message["ReceiptHandle"],
        VisibilityTimeout=too_long,
    )


@check(VISIBILITY)
def the_visibility_of_a_deleted_message_cannot_be_changed(target: CheckedServer) -> None:
    """ChangeMessageVisibility: refused for a message that is not in flight any more."""
    url = target.queue()
    target.send(url)
    message = target.receive_one(url)
    target.delete(url, message)
    text = target.refuses(
        target.client.change_message_visibility,
        "InvalidParameterValue",
        QueueUrl=url,
        ReceiptHandle=message["ReceiptHandle"],
        VisibilityTimeout=1,
    )
    wanted = "Message does not exist or is not available"
    require(not target.texts or wanted in text, f"the text is {text}")


@check(RECEIPTS)
def a_delete_may_be_repeated(target: CheckedServer) -> None:
    """DeleteMessage: deleting a message again is no error."""
    url = target.queue()
    target.send(url)
    message = target.receive_one(url)
    target.delete(url, message)
    target.delete(url, message)
    expect(target.count(url, "NotVisible"), 0, "what is in flight")


@check(RECEIPTS)
def a_forged_receipt_is_refused(target: CheckedServer) -> None:
    """DeleteMessage, ChangeMessageVisibility: ReceiptHandleIsInvalid."""
    url = target.queue()
    for receipt in ("forged", "0" * 80):
        for call, more in (
            (target.client.delete_message, {}),
            (target.client.change_message_visibility, {"VisibilityTimeout": 0}),
        ):
            target.refuses(
                call,
                "ReceiptHandleIsInvalid",
                f'The input receipt handle "{receipt}" is not a valid receipt handle.',
                QueueUrl=url,
                ReceiptHandle=receipt,
                **more,
            )


@check(RECEIPTS)
def a_receipt_of_another_queue_is_refused(target: CheckedServer) -> None:
    """A receipt handle belongs to one receive of one queue; elsewhere it is invalid."""
    one, other = target.queue(), target.queue()
    target.send(one)
    receipt = target.receive_one(one)["ReceiptHandle"]
    for call, more in (
        (target.client.delete_message, {}),
        (target.client.change_message_visibility, {"VisibilityTimeout": 0}),
    ):
        target.refuses(
            call,
            "ReceiptHandleIsInvalid",
            f'The input receipt handle "{receipt}" is not a valid receipt handle.',
            QueueUrl=other,
            ReceiptHandle=receipt,
            **more,
        )
    expect(target.count(one, "NotVisible"), 1, "what is in flight in the first queue")


@check(RECEIPTS, wait_s=1)
def a_standard_queue_accepts_a_delete_after_the_timeout(target: CheckedServer) -> None:
    """DeleteMessage: the latest receipt deletes also when the visibility timeout has ended."""
    url = target.queue()
    target.send(url)
    message = target.receive_one(url, VisibilityTimeout=1)
    target.wait(1)
    target.delete(url, message)
    expect(target.receive(url), [], "a receive after the delete")
    target.send(url)
    message = target.receive_one(url, VisibilityTimeout=0)
    entry = {"Id": "1", "ReceiptHandle": message["ReceiptHandle"]}
    answer = target.client.delete_message_batch(QueueUrl=url, Entries=[entry])
    expect([each["Id"] for each in answer.get("Successful", [])], ["1"], "what was deleted")
    expect(target.count(url), 0, "the count")


@check(RECEIPTS, wait_s=1)
def a_fifo_queue_refuses_a_delete_after_the_timeout(target: CheckedServer) -> None:
    """DeleteMessage on a FIFO queue: refused if the visibility timeout has ended."""
    url = target.fifo()
    target.push(url, "one")
    receipt = target.receive_one(url, VisibilityTimeout=1)["ReceiptHandle"]
    target.wait(1)
    target.refuses(
        target.client.delete_message,
        "InvalidParameterValue",
        f"Value {receipt} for parameter ReceiptHandle is invalid. "
        "Reason: The receipt handle has expired.",
        QueueUrl=url,
        ReceiptHandle=receipt,
    )
    expect(target.count(url), 1, "the count")


@check(RECEIPTS, wait_s=1)
def a_fifo_queue_refuses_a_change_of_visibility_after_the_timeout(target: CheckedServer) -> None:
    """ChangeMessageVisibility: MessageNotInflight for a message that is not in flight."""
    url = target.fifo()
    target.push(url, "one")
    receipt = target.receive_one(url, VisibilityTimeout=1)["ReceiptHandle"]
    target.wait(1)
    target.refuses(
        target.client.change_message_visibility,
        "MessageNotInflight",
        "The message referred to isn't in flight.",
        QueueUrl=url,
        ReceiptHandle=receipt,
        VisibilityTimeout=5,
    )


@check(RECEIPTS, wait_s=2)
def a_fifo_queue_accepts_a_delete_within_the_extended_timeout(target: CheckedServer) -> None:
    """ChangeMessageVisibility: the receipt is valid for as long as the message is hidden."""
    url = target.fifo()
    target.push(url, "one")
    message = target.receive_one(url, VisibilityTimeout=1)
    target.hide(url, message, 60)
    target.wait(2)
    target.delete(url, message)
    expect((target.count(url), target.count(url, "NotVisible")), (0, 0), "the counts")
