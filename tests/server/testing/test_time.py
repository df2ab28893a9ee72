"""Time over the wire: all that depends on time follows a clock that a test moves."""

import threading
import time

import pytest
from botocore.exceptions import ClientError

from penstock.core.due import NEVER_MS
from penstock.server.testing.clock import MovableClock

HOUR_S = 3_600
DAY_S = 24 * HOUR_S


def bodies(sqs, url, **options):
    given = {"MaxNumberOfMessages": 10, **options}
    return [each["Body"] for each in sqs.receive_message(QueueUrl=url, **given).get("Messages", [])]


def create(sqs, name="orders", **attributes):
    given = {key: str(value) for key, value in attributes.items()}
    return sqs.create_queue(QueueName=name, Attributes=given)["QueueUrl"]


def test_a_visibility_timeout_of_twelve_hours_passes_at_once(controlled):
    sqs = controlled.client()
    url = create(sqs, VisibilityTimeout=12 * HOUR_S)
    sqs.send_message(QueueUrl=url, MessageBody="a")
    assert bodies(sqs, url) == ["a"]
    controlled.advance("11h")
    assert bodies(sqs, url) == []
    controlled.advance("1h")
    assert bodies(sqs, url) == ["a"]


def test_delays_of_messages_and_queues_end_when_the_clock_has_moved(controlled):
    sqs = controlled.client()
    url = create(sqs, DelaySeconds=900)
    sqs.send_message(QueueUrl=url, MessageBody="queue")
    sqs.send_message(QueueUrl=url, MessageBody="message", DelaySeconds=60)
    controlled.advance(60)
    assert bodies(sqs, url) == ["message"]
    controlled.advance("14m")
    assert bodies(sqs, url) == ["queue", "message"]


def test_the_dedup_window_ends_when_the_clock_has_moved_by_five_minutes(controlled):
    sqs = controlled.client()
    url = create(sqs, "orders.fifo", FifoQueue="true")
    given = {"QueueUrl": url, "MessageBody": "a", "MessageGroupId": "g"}
    first = sqs.send_message(MessageDeduplicationId="1", **given)["MessageId"]
    controlled.advance("4m")
    assert sqs.send_message(MessageDeduplicationId="1", **given)["MessageId"] == first
    controlled.advance("61s")
    assert sqs.send_message(MessageDeduplicationId="1", **given)["MessageId"] != first


def test_the_window_of_an_attempt_ends_when_the_clock_has_moved_by_five_minutes(controlled):
    sqs = controlled.client()
    url = create(sqs, "orders.fifo", FifoQueue="true", VisibilityTimeout=30)
    sqs.send_message(QueueUrl=url, MessageBody="a", MessageGroupId="g", MessageDeduplicationId="1")
    attempt = {"QueueUrl": url, "ReceiveRequestAttemptId": "x"}
    (first,) = sqs.receive_message(**attempt)["Messages"]
    (again,) = sqs.receive_message(**attempt)["Messages"]
    assert again["MessageId"] == first["MessageId"]
    controlled.advance("31s")
    with pytest.raises(ClientError, match="not valid anymore"):
        sqs.receive_message(**attempt)
    controlled.advance("5m")
    assert len(sqs.receive_message(**attempt)["Messages"]) == 1


def test_messages_end_with_the_retention_of_their_queue(controlled):
    sqs = controlled.client()
    url = create(sqs, MessageRetentionPeriod=4 * DAY_S)
    sqs.send_message(QueueUrl=url, MessageBody="a")
    controlled.advance("3d")
    assert controlled.ask("await", {"queue": "orders", "until": "empty", "timeout": 0})[0] == 409
    controlled.advance("1d")
    assert controlled.ask("await", {"queue": "orders", "until": "empty", "timeout": 0})[0] == 200


def test_the_rate_of_a_redrive_is_that_of_the_clock(controlled):
    sqs = controlled.client()
    dead = create(sqs, "dead")
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]
    policy = f'{{"deadLetterTargetArn":"{arn["QueueArn"]}","maxReceiveCount":1}}'
    url = create(sqs, VisibilityTimeout=0, RedrivePolicy=policy)
    for number in range(5):
        sqs.send_message(QueueUrl=url, MessageBody=str(number))
    assert len(bodies(sqs, url)) == 5
    assert bodies(sqs, url) == []
    sqs.start_message_move_task(SourceArn=arn["QueueArn"], MaxNumberOfMessagesPerSecond=1)
    back = {"queue": "dead", "until": "empty", "timeout": 0}
    assert controlled.ask("await", back)[0] == 409
    controlled.advance(2)
    # The first at once, and one for each second that has passed.
    assert controlled.ask("await", back)[0] == 409
    controlled.advance(2)
    assert controlled.ask("await", {**back, "timeout": 20})[0] == 200


def test_the_window_after_a_purge_ends_when_the_clock_has_moved(serve_controlled):
    server = serve_controlled(aws_limits=True)
    sqs = server.client()
    url = create(sqs)
    sqs.purge_queue(QueueUrl=url)
    with pytest.raises(ClientError, match="PurgeQueueInProgress"):
        sqs.purge_queue(QueueUrl=url)
    server.advance("60s")
    sqs.purge_queue(QueueUrl=url)


def test_a_long_poll_ends_when_another_request_moves_the_clock(controlled):
    sqs = controlled.client()
    url = create(sqs)
    sqs.send_message(QueueUrl=url, MessageBody="later", DelaySeconds=15)
    found = []
    waiting = threading.Thread(
        target=lambda: found.extend(bodies(controlled.client(), url, WaitTimeSeconds=20))
    )
    waiting.start()
    while controlled.running.service.engine.has_waiters is False:
        threading.Event().wait(0.005)
    assert found == []
    controlled.advance(15)
    waiting.join(60)
    assert found == ["later"]


def test_in_the_mode_auto_a_long_poll_moves_the_clock_to_what_is_due(serve_controlled):
    server = serve_controlled(clock="auto")
    sqs = server.client()
    url = create(sqs)
    began_ms = server.ask("clock")[1]["now_ms"]
    sqs.send_message(QueueUrl=url, MessageBody="later", DelaySeconds=15)
    assert bodies(sqs, url, WaitTimeSeconds=20) == ["later"]
    assert server.ask("clock")[1]["now_ms"] - began_ms == 15_000


def test_in_the_mode_auto_a_long_poll_that_gets_nothing_moves_the_clock_by_its_wait(
    serve_controlled,
):
    server = serve_controlled(clock="auto")
    sqs = server.client()
    url = create(sqs)
    began_ms = server.ask("clock")[1]["now_ms"]
    assert bodies(sqs, url, WaitTimeSeconds=20) == []
    assert server.ask("clock")[1]["now_ms"] - began_ms == 20_000


def test_a_clock_of_the_system_flows_and_can_be_moved_besides(serve_controlled):
    server = serve_controlled(clock="system")
    sqs = server.client()
    url = create(sqs, VisibilityTimeout=HOUR_S)
    sqs.send_message(QueueUrl=url, MessageBody="a")
    assert bodies(sqs, url) == ["a"]
    moved = server.advance("1h")
    assert bodies(sqs, url) == ["a"]
    assert moved["mode"] == "system"
    assert moved["now_ms"] - time.time() * 1_000 > 3_590_000


def test_signatures_are_checked_by_the_real_clock(serve_controlled):
    secret = "a-secret-of-16-or-more"
    server = serve_controlled(keys={"AKID": secret})
    sqs = server.client("AKID", aws_secret_access_key=secret)
    url = create(sqs, VisibilityTimeout=12 * HOUR_S)
    sqs.send_message(QueueUrl=url, MessageBody="a")
    assert bodies(sqs, url) == ["a"]
    status, _ = server.ask("clock", {"advance": "12h"}, key=f"AKID:{secret}")
    assert status == 200
    assert bodies(sqs, url) == ["a"]


def test_the_clock_goes_to_an_instant_and_never_back(controlled):
    began = controlled.ask("clock")[1]["now"]
    assert controlled.ask("clock", {"to": "2030-01-01T00:00:00Z"})[1]["now"] == (
        "2030-01-01T00:00:00.000Z"
    )
    status, found = controlled.ask("clock", {"to": began})
    assert (status, "time never goes back" in found["error"]) == (400, True)
    assert controlled.ask("clock")[1]["now"] == "2030-01-01T00:00:00.000Z"


def test_a_long_poll_ends_after_its_longest_wait_of_real_time_though_the_clock_stands_still(
    controlled, monkeypatch
):
    sqs = controlled.client()
    url = create(sqs)
    before = controlled.ask("clock")
    monkeypatch.setattr("penstock.server.testing.accounts.WAIT_S_MAX", 0)
    assert bodies(sqs, url, WaitTimeSeconds=20) == []
    assert controlled.ask("clock") == before


def test_a_clock_that_moves_by_itself_stays_when_nothing_is_due_ever():
    clock = MovableClock("auto", start_ms=1_000)
    assert clock.waiter_timeout_s(NEVER_MS, blocks_thread=False) is None
    assert clock.now_ms() == 1_000
