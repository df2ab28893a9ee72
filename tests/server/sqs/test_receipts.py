"""Late receipts, and how long a message may be hidden, as at Amazon."""

import asyncio

import pytest

from penstock.backends.loop import result_of
from penstock.server.sqs.receipts import STRICT_RECEIPTS
from penstock.service import ConfigureQueue, DescribeQueue
from tests.server.sqs.asking import make, receive, refused, send, shown
from tests.server.sqs.conftest import Local

HOURS = 3_600


def late_receipt(local, client, url):
    """The receipt of a receive whose visibility timeout has ended."""
    (message,) = receive(client, url, VisibilityTimeout=2)
    local.clock.advance(seconds=3)
    return message["ReceiptHandle"]


def annotate(server, name, annotation, value):
    async def run():
        service = server.running.service
        info = await result_of(service.submit(DescribeQueue(name)))
        annotations = {**info.settings.annotations, annotation: value}
        await result_of(service.submit(ConfigureQueue(name, {"annotations": annotations})))

    asyncio.run_coroutine_threadsafe(run(), server._loop).result(10)


def count(client, url):
    return int(shown(client, url, "ApproximateNumberOfMessages")["ApproximateNumberOfMessages"])


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


@pytest.fixture(params=["every queue", "one queue"])
def strict(request, query_data, store, redis_url, quick_path):
    """A server, and whether all its queues are strict."""
    url = "memory:" if redis_url is None else f"{redis_url}?prefix={quick_path.name}"
    is_for_all = request.param == "every queue"
    server = Local(query_data, store, quick_path, url=url, strict_receipts=is_for_all)
    yield server, is_for_all
    server.close()


@pytest.mark.parametrize("protocol", ["json", "query"])
def test_a_strict_queue_refuses_late_receipts_and_nothing_else(strict, protocol):
    server, is_for_all = strict
    client = server.client(protocol)
    url = make(client)
    if not is_for_all:
        annotate(server, url.rpartition("/")[2], STRICT_RECEIPTS, "1")
    send(client, url)
    late = {"QueueUrl": url, "ReceiptHandle": late_receipt(server, client, url)}
    entry = {"Id": "1", "ReceiptHandle": late["ReceiptHandle"]}
    expired = "InvalidParameterValue"
    assert refused(client.delete_message, **late)[0] == expired
    (failed,) = client.delete_message_batch(QueueUrl=url, Entries=[entry])["Failed"]
    assert failed["Code"] == expired
    for hidden_s in (0, 60):
        asked = {**late, "VisibilityTimeout": hidden_s}
        assert refused(client.change_message_visibility, **asked)[0].endswith("MessageNotInflight")
        entries = [{**entry, "VisibilityTimeout": hidden_s}]
        (failed,) = client.change_message_visibility_batch(QueueUrl=url, Entries=entries)["Failed"]
        assert failed["Code"].endswith("MessageNotInflight")
    assert count(client, url) == 1
    (message,) = receive(client, url)
    held = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
    # Also an old receipt while another consumer has the message.
    assert refused(client.delete_message, **late)[0] == expired
    client.change_message_visibility(**held, VisibilityTimeout=60)
    client.delete_message(**held)
    assert count(client, url) == 0


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
