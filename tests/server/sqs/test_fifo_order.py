"""The order in which messages of a FIFO queue are received, as at Amazon."""

from itertools import count

import pytest

from tests.server.sqs.asking import bodies, make_fifo, push, receive, shown


def fill(local, client, url, *names):
    """Sends messages named like `a1`, a second apart: the letter is the group."""
    for name in names:
        push(client, url, name, group=name[0])
        local.clock.advance(seconds=1)


def release(client, url, message, seconds=0):
    client.change_message_visibility(
        QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=seconds
    )


def delete(client, url, message):
    client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])


def test_a_group_that_becomes_visible_again_is_received_after_the_others(local, either):
    url = make_fifo(either, VisibilityTimeout="20")
    fill(local, either, url, "a1", "a2", "a3", "a4", "b1", "c1")
    assert bodies(either, url, MaxNumberOfMessages=2) == ["a1", "a2"]
    assert bodies(either, url, MaxNumberOfMessages=1) == ["b1"]
    local.clock.advance(seconds=21)
    order = bodies(either, url, VisibilityTimeout=0)
    assert order == ["c1", "a1", "a2", "a3", "a4", "b1"]


def test_after_a_receive_with_visibility_zero_the_next_group_is_received(local, either):
    url = make_fifo(either)
    fill(local, either, url, "a1", "b1", "b2", "c1", "a2")
    assert bodies(either, url, MaxNumberOfMessages=3, VisibilityTimeout=0) == ["a1", "a2", "b1"]
    assert bodies(either, url, VisibilityTimeout=0) == ["c1", "a1", "a2", "b1", "b2"]


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_released_message_can_be_received_before_the_rest_of_its_batch(local, either, seconds):
    url = make_fifo(either)
    fill(local, either, url, "a1", "a2", "b1")
    first, _ = receive(either, url, MaxNumberOfMessages=2)
    release(either, url, first, seconds)
    local.clock.advance(seconds=2)
    assert bodies(either, url, MaxNumberOfMessages=3) == ["b1", "a1"]


@pytest.mark.parametrize(("extended", "received"), [(0, []), (1, ["a1"]), (2, ["a1", "a2"])])
def test_messages_after_a_hidden_message_of_their_group_are_hidden(
    local, either, extended, received
):
    url = make_fifo(either, VisibilityTimeout="1")
    fill(local, either, url, "a1", "a2", "a3")
    messages = receive(either, url, MaxNumberOfMessages=5)
    release(either, url, messages[extended], 4)
    local.clock.advance(seconds=2)
    assert bodies(either, url, MaxNumberOfMessages=5) == received


def test_a_group_continues_with_its_next_message_after_a_delete(local, either):
    url = make_fifo(either)
    fill(local, either, url, "a1", "b1", "a2", "b2", "a3", "a4", "c1")
    held = receive(either, url, MaxNumberOfMessages=2)
    assert [message["Body"] for message in held] == ["a1", "a2"]
    delete(either, url, held[0])
    assert bodies(either, url, VisibilityTimeout=0) == ["b1", "b2", "c1"]
    local.clock.advance(seconds=1)
    delete(either, url, held[1])
    assert bodies(either, url) == ["a3", "a4", "b1", "b2", "c1"]


def test_after_a_purge_a_message_with_the_same_dedup_id_is_accepted(local, either):
    url = make_fifo(either)
    push(either, url, "one")
    either.purge_queue(QueueUrl=url)
    push(either, url, "one")
    push(either, url, "one")
    assert bodies(either, url) == ["one"]


@pytest.mark.parametrize(
    ("before", "after"), [("queue", "messageGroup"), ("messageGroup", "queue")]
)
def test_a_new_deduplication_scope_is_shown_at_once_and_applies_a_minute_later(
    local, either, before, after
):
    def sent():
        """How many of two messages with one dedup id in two groups arrive."""
        dedup_id = str(next(dedup_ids))
        for group in ("a", "b"):
            either.send_message(
                QueueUrl=url,
                MessageBody="x",
                MessageGroupId=group,
                MessageDeduplicationId=dedup_id,
            )
        messages = receive(either, url, MaxNumberOfMessages=10)
        for message in messages:
            delete(either, url, message)
        return len(messages)

    dedup_ids = count()
    arrive = {"queue": 1, "messageGroup": 2}
    url = make_fifo(either, DeduplicationScope=before)
    assert sent() == arrive[before]
    either.set_queue_attributes(QueueUrl=url, Attributes={"DeduplicationScope": after})
    assert shown(either, url, "DeduplicationScope") == {"DeduplicationScope": after}
    local.clock.advance(seconds=59)
    assert sent() == arrive[before]
    local.clock.advance(seconds=1)
    assert sent() == arrive[after]
    assert shown(either, url, "DeduplicationScope") == {"DeduplicationScope": after}
    for scope in (before, after):
        either.set_queue_attributes(QueueUrl=url, Attributes={"DeduplicationScope": scope})
    local.clock.advance(seconds=61)
    assert sent() == arrive[after]
