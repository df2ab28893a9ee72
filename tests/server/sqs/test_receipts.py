"""Late receipts, and how long a message may be hidden, as at Amazon."""

import pytest

from tests.server.sqs.asking import make, make_fifo, push, receive, refused, send, shown

HOURS = 3_600


def late_receipt(local, client, url):
    """The receipt of a receive whose visibility timeout has ended."""
    (message,) = receive(client, url, VisibilityTimeout=2)
    local.clock.advance(seconds=3)
    return message["ReceiptHandle"]


def count(client, url):
    return int(shown(client, url, "ApproximateNumberOfMessages")["ApproximateNumberOfMessages"])


def test_a_standard_queue_accepts_a_late_delete(local, either):
    url = make(either)
    send(either, url)
    receipt = late_receipt(local, either, url)
    assert count(either, url) == 1
    either.delete_message(QueueUrl=url, ReceiptHandle=receipt)
    assert count(either, url) == 0


def test_a_batch_of_deletes_accepts_late_receipts(local, either):
    url = make(either)
    send(either, url)
    receipt = late_receipt(local, either, url)
    result = either.delete_message_batch(
        QueueUrl=url, Entries=[{"Id": "1", "ReceiptHandle": receipt}]
    )
    assert [each["Id"] for each in result["Successful"]] == ["1"]
    assert count(either, url) == 0


def test_a_late_receipt_can_hide_a_message_of_a_standard_queue_again(local, either):
    url = make(either)
    send(either, url)
    receipt = late_receipt(local, either, url)
    change = {"QueueUrl": url, "ReceiptHandle": receipt}
    either.change_message_visibility(**change, VisibilityTimeout=60)
    assert receive(either, url) == []
    local.clock.advance(seconds=59)
    assert receive(either, url) == []
    either.delete_message(**change)
    local.clock.advance(seconds=60)
    assert receive(either, url) == []


def test_a_late_receipt_may_release_a_message_that_is_visible_already(local, either):
    url = make(either)
    send(either, url)
    receipt = late_receipt(local, either, url)
    either.change_message_visibility(QueueUrl=url, ReceiptHandle=receipt, VisibilityTimeout=0)
    assert len(receive(either, url)) == 1


def test_a_receipt_of_an_earlier_receive_changes_nothing(local, either):
    url = make(either)
    send(either, url)
    old = {"QueueUrl": url, "ReceiptHandle": late_receipt(local, either, url)}
    (message,) = receive(either, url, VisibilityTimeout=30)
    either.delete_message(**old)
    assert refused(either.change_message_visibility, **old, VisibilityTimeout=600) == (
        "InvalidParameterValue",
        (
            f"Value {old['ReceiptHandle']} for parameter ReceiptHandle is invalid. Reason: Message "
            "does not exist or is not available for visibility timeout change."
        ),
    )
    local.clock.advance(seconds=29)
    assert receive(either, url) == []
    local.clock.advance(seconds=1)
    (again,) = receive(either, url)
    assert again["MessageId"] == message["MessageId"]


def test_a_fifo_queue_refuses_a_late_receipt(local, either):
    url = make_fifo(either)
    push(either, url, "one")
    receipt = late_receipt(local, either, url)
    assert refused(either.delete_message, QueueUrl=url, ReceiptHandle=receipt) == (
        "InvalidParameterValue",
        (
            f"Value {receipt} for parameter ReceiptHandle is invalid. "
            "Reason: The receipt handle has expired."
        ),
    )
    held = {"QueueUrl": url, "ReceiptHandle": receipt}
    assert refused(either.change_message_visibility, **held, VisibilityTimeout=5) == (
        "AWS.SimpleQueueService.MessageNotInflight",
        "The message referred to isn't in flight.",
    )
    assert count(either, url) == 1


def test_a_fifo_queue_accepts_a_delete_within_the_extended_visibility_timeout(local, either):
    url = make_fifo(either)
    push(either, url, "one")
    (message,) = receive(either, url, VisibilityTimeout=1)
    held = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
    either.change_message_visibility(**held, VisibilityTimeout=5)
    local.clock.advance(seconds=2)
    either.delete_message(**held)
    local.clock.advance(seconds=10)
    assert receive(either, url) == []


@pytest.mark.parametrize("receives", [1, 3])
def test_a_message_can_be_hidden_for_at_most_twelve_hours_from_its_receive(local, either, receives):
    url = make(either)
    send(either, url)
    for _ in range(receives - 1):
        receive(either, url, VisibilityTimeout=0)
        local.clock.advance(seconds=5 * HOURS)
    (message,) = receive(either, url)
    held = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
    either.change_message_visibility(**held, VisibilityTimeout=12 * HOURS)
    local.clock.advance(seconds=HOURS)
    either.change_message_visibility(**held, VisibilityTimeout=11 * HOURS)
    too_long = 11 * HOURS + 1
    assert refused(either.change_message_visibility, **held, VisibilityTimeout=too_long) == (
        "InvalidParameterValue",
        (
            f"Value {too_long} for parameter VisibilityTimeout is invalid. Reason: Total "
            "VisibilityTimeout for the message is beyond the limit [43200 seconds]."
        ),
    )
    result = either.change_message_visibility_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "long", "ReceiptHandle": held["ReceiptHandle"], "VisibilityTimeout": too_long},
            {"Id": "short", "ReceiptHandle": held["ReceiptHandle"], "VisibilityTimeout": 60},
        ],
    )
    assert [each["Id"] for each in result["Successful"]] == ["short"]
    assert [each["Code"] for each in result["Failed"]] == ["InvalidParameterValue"]
    local.clock.advance(seconds=59)
    assert receive(either, url) == []
    local.clock.advance(seconds=1)
    assert len(receive(either, url)) == 1
