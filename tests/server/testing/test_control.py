"""The control interface: accounts of their own, awaited messages, and requests that are refused."""

import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from penstock.server.run import DRAIN_S
from penstock.server.testing.clock import NOW_MS_MAX
from penstock.service import Stats
from tests.server.conftest import until

ONE, OTHER = "111122223333", "444455556666"
NOW = {"timeout": 0}


def create(server, account="any", name="orders"):
    sqs = server.client(account)
    return sqs, sqs.create_queue(QueueName=name)["QueueUrl"]


def test_each_account_has_a_clock_of_its_own(controlled):
    before = {each: controlled.ask(f"clock?account={each}")[1]["now_ms"] for each in (ONE, OTHER)}
    controlled.advance("12h", account=ONE)
    after = {each: controlled.ask(f"clock?account={each}")[1]["now_ms"] for each in (ONE, OTHER)}
    assert after[ONE] - before[ONE] == 12 * 3_600_000
    assert after[OTHER] == before[OTHER]


def test_each_account_has_queues_of_its_own_which_a_reset_removes(controlled):
    one, _ = create(controlled, ONE)
    other, other_url = create(controlled, OTHER)
    controlled.ask("clock", {"advance": "1h", "account": ONE})
    assert controlled.ask("reset", {"account": ONE}) == (200, {"account": ONE})
    assert one.list_queues().get("QueueUrls") is None
    assert other.list_queues()["QueueUrls"] == [other_url]


def test_a_reset_of_the_servers_own_account_keeps_its_clock(controlled):
    sqs, _ = create(controlled)
    moved = controlled.advance("12h")
    controlled.ask("reset", {})
    assert sqs.list_queues().get("QueueUrls") is None
    assert controlled.ask("clock")[1] == moved


def test_a_request_of_another_key_belongs_to_the_account_of_its_queues_url(controlled):
    _, url = create(controlled, ONE)
    controlled.client("a-key").send_message(QueueUrl=url, MessageBody="a")
    found = controlled.ask("await", {"queue": "orders", "account": ONE, **NOW})[1]
    assert [each["body"] for each in found["messages"]] == ["a"]


def test_the_query_protocol_reaches_the_account_of_its_key(controlled):
    scope = f"AWS4-HMAC-SHA256 Credential={ONE}/20261119/us-east-1/sqs/aws4_request, Signature=x"
    made = urllib.request.Request(
        f"{controlled.url}/?Action=CreateQueue&QueueName=orders", headers={"Authorization": scope}
    )
    with urllib.request.urlopen(made) as answer:
        assert f"/{ONE}/orders".encode() in answer.read()
    assert controlled.client(ONE).list_queues()["QueueUrls"]


def test_a_message_is_awaited_by_a_part_of_its_json_body_though_it_was_deleted(controlled):
    sqs, url = create(controlled)
    # No JSON that can be read.
    sqs.send_message(QueueUrl=url, MessageBody="[" * 60_000)
    sqs.receive_message(QueueUrl=url)
    sqs.send_message(QueueUrl=url, MessageBody='{"id": 7, "lines": [{"sku": "a", "n": 1}]}')
    (message,) = sqs.receive_message(QueueUrl=url)["Messages"]
    sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    for match in ({"id": 7}, {"lines": [{"sku": "a"}]}):
        asked = {"queue": "orders", "match": match, "until": "deleted", **NOW}
        status, found = controlled.ask("await", asked)
        assert (status, found["messages"][0]["deliveries"]) == (200, 1)
    others: list[Any] = [{"id": 8}, {"id": True}, {"lines": []}, "7"]
    for other in others:
        assert controlled.ask("await", {"queue": "orders", "match": other, **NOW})[0] == 409


def test_an_await_is_answered_when_the_message_comes(controlled):
    sqs, url = create(controlled)
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(controlled.ask("await", {"queue": "orders", "timeout": 60}))
    )
    waiting.start()
    account = controlled.running._tested.home
    while not account.store.journal.listeners:
        threading.Event().wait(0.005)
    sqs.send_message(QueueUrl=url, MessageBody="a")
    waiting.join(60)
    ((status, answer),) = found
    assert (status, answer["messages"][0]["body"]) == (200, "a")
    assert account.store.journal.listeners == set()


def test_an_await_in_vain_says_what_there_was_and_its_story(controlled):
    status, found = controlled.ask("await", {"queue": "orders", **NOW})
    assert (status, found["error"]) == (409, "await: there is no queue orders")
    sqs, url = create(controlled)
    sqs.send_message(QueueUrl=url, MessageBody="a")
    status, found = controlled.ask("await", {"queue": "orders", "until": "deleted", **NOW})
    assert (status, found["error"]) == (409, "await: 0 of 1 messages were deleted")
    assert "Pushed to orders" in found["story"][0]


def test_a_dead_letter_is_awaited_in_the_queue_that_it_came_to(controlled):
    sqs, dead = create(controlled, name="dead")
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]
    policy = f'{{"deadLetterTargetArn":"{arn["QueueArn"]}","maxReceiveCount":1}}'
    attributes = {"RedrivePolicy": policy, "VisibilityTimeout": "30"}
    url = sqs.create_queue(QueueName="orders", Attributes=attributes)["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="a")
    sqs.receive_message(QueueUrl=url)
    controlled.advance(30)
    for queue in ("dead", "orders"):
        assert controlled.ask("await", {"queue": queue, "until": "dead", **NOW})[0] == 200


def test_the_stories_tell_what_happened_to_each_message(controlled):
    sqs, url = create(controlled)
    sqs.send_message(QueueUrl=url, MessageBody="hello")
    sqs.receive_message(QueueUrl=url)
    controlled.advance("1m")
    (line,) = controlled.ask("stories?queue=orders")[1]["stories"]["orders"]
    assert "'hello'" in line
    assert "held it for 60.0 s until its claim ran out" in line


@pytest.mark.parametrize(
    ("page", "body", "told"),
    [
        ("clock", {"advance": -1}, "-1 s is outside 0 to"),
        ("clock", {"advance": "1e9d"}, "not a duration"),
        ("clock", {"advance": "soon"}, "use 30, 1.5, 30s, 5m, 2h or 4d"),
        ("clock", {"advance": "1h", "to": "2040-01-01"}, "give one of them"),
        ("clock", {"to": "tomorrow"}, "to: 'tomorrow' is not a time"),
        ("clock", {"mode": "fast"}, "none of manual, auto, system"),
        ("clock", {}, 'expected "advance", "to" or "mode"'),
        ("clock", {"advance": "1h", "account": "12"}, "account: '12' is not twelve digits"),
        ("clock", {"forward": 1}, "unknown field `forward`"),
        ("clock", {"mode": "auto", "advance": -5}, "time never goes back"),
        ("clock", {"mode": "fast", "advance": "1h"}, "is none of manual, auto, system"),
        ("clock", b"{", "body: "),
        ("clock", b"[" * 100_000, "body: "),
        ("clock", b'{"\xff": 1}', "body: "),
        ("await", b'{"queue": "q", "match": ' + b"[" * 10_000, "body: "),
        ("reset", {"account": "all"}, "not twelve digits"),
        ("await", {}, "missing required field `queue`"),
        ("await", {"queue": "no/name"}, "is not a queue name"),
        ("await", {"queue": "orders", "until": "gone"}, "pushed, delivered, deleted, dead, empty"),
        ("await", {"queue": "orders", "count": 0}, "give 1 or more"),
        ("await", {"queue": "orders", "timeout": 61}, "0 to 60 s of real time"),
        ("chaos", {"seed": -1}, "seed: -1 is outside"),
        ("chaos", {"seed": None, "only": [1]}, "go with a seed"),
    ],
)
def test_a_request_that_is_wrong_says_so_and_changes_nothing(controlled, page, body, told):
    before = controlled.ask("clock")
    status, found = controlled.ask(page, body)
    assert (status, told in found["error"]) == (400, True), found
    assert controlled.ask("clock") == before


def test_a_page_that_does_not_exist_names_those_that_do(controlled):
    status, found = controlled.ask("time")
    assert (status, "/_penstock/clock" in found["error"]) == (404, True)
    assert controlled.ask("reset")[0] == 405


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://a.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "a.example"},
        {"Content-Type": "text/plain"},
    ],
)
def test_a_web_page_can_move_no_clock(controlled, headers):
    before = controlled.ask("clock")
    status, _ = controlled.ask("clock", {"advance": "1h"}, **headers)
    assert status in (400, 403)
    assert controlled.ask("clock") == before


def test_with_keys_the_interface_needs_one_and_its_secret(serve_controlled):
    secret = "a-secret-of-16-or-more"
    server = serve_controlled(keys={"AKID": secret})
    for key in (None, "AKID:wrong", "OTHER:" + secret, "AKID"):
        assert server.ask("clock", key=key)[0] == 403
    assert server.ask("clock", key=f"AKID:{secret}")[0] == 200


def test_the_end_of_the_server_answers_what_waits_in_every_account(controlled):
    sqs, url = create(controlled, ONE)
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(sqs.receive_message(QueueUrl=url, WaitTimeSeconds=20))
    )
    waiting.start()
    told = []
    asked = {"queue": "orders", "account": ONE, "timeout": 60}
    awaiting = threading.Thread(target=lambda: told.append(controlled.ask("await", asked)))
    awaiting.start()
    account = controlled.running._tested.account(ONE)
    until(lambda: account.awaited and account.service.submit(Stats("orders")).waiting_pulls)
    began_s = time.monotonic()
    controlled.close()
    waiting.join(60)
    awaiting.join(60)
    assert [each.get("Messages") for each in found] == [None]
    assert [status for status, _ in told] == [409]
    assert time.monotonic() - began_s < DRAIN_S


def test_a_server_that_is_not_for_tests_has_no_such_interface(serve_controlled):
    server = serve_controlled(clock=None)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}/_penstock/clock")
    assert b"now_ms" not in refused.value.read()
    refused.value.close()


def test_accounts_beyond_the_limit_are_refused_until_some_are_reset(controlled, monkeypatch):
    monkeypatch.setattr("penstock.server.testing.accounts.ACCOUNTS_MAX", 1)
    create(controlled, ONE)
    status, found = controlled.ask(f"clock?account={OTHER}")
    assert (status, "reset some" in found["error"]) == (503, True)
    controlled.ask("reset", {"account": ONE})
    assert controlled.ask(f"clock?account={OTHER}")[0] == 200


def test_a_history_that_is_not_whole_is_not_judged(serve_controlled, monkeypatch):
    monkeypatch.setattr("penstock.server.testing.observed.ENTRIES_MAX", 3)
    server = serve_controlled()
    sqs, url = create(server)
    for _ in range(2):
        sqs.send_message(QueueUrl=url, MessageBody="a")
    assert server.ask("audit") == (200, {"broken": []})
    sqs.send_message(QueueUrl=url, MessageBody="a")
    status, found = server.ask("audit")
    assert (status, "of 1 command are not kept any more" in found["error"]) == (400, True)
    server.ask("reset", {})
    assert server.ask("audit") == (200, {"broken": []})


def test_a_clock_ends_before_dates_do(controlled):
    controlled.ask(f"clock?account={ONE}")
    clock = controlled.running._tested.account(ONE).clock
    clock.advance(ms=NOW_MS_MAX - clock.now_ms())
    assert controlled.ask(f"clock?account={ONE}")[1]["now"] == "9990-01-01T00:00:00.000Z"
    status, found = controlled.ask("clock", {"advance": 1, "account": ONE})
    assert (status, "ends with the year 9989" in found["error"]) == (400, True)


def test_the_clock_goes_on_to_what_is_due_next(controlled):
    sqs, url = create(controlled)
    sqs.send_message(QueueUrl=url, MessageBody="later", DelaySeconds=600)
    found = controlled.ask("queues")[1]
    assert found["queues"]["orders"] == {
        "visible": 0,
        "delayed": 1,
        "in_flight": 0,
        "dead_letter": None,
    }
    began_ms = controlled.ask("clock")[1]["now_ms"]
    while controlled.ask("queues")[1]["changes"] == found["changes"]:
        controlled.ask("clock", {"advance": "next"})
    assert controlled.ask("clock")[1]["now_ms"] - began_ms == 600_000
    assert controlled.ask("queues")[1]["queues"]["orders"]["visible"] == 1


def test_faults_that_are_paused_are_neither_made_nor_numbered(controlled):
    sqs, url = create(controlled, ONE)
    controlled.ask("chaos", {"account": ONE, "seed": 5, "paused": True})
    for _ in range(40):
        sqs.send_message(QueueUrl=url, MessageBody="a")
    assert controlled.ask(f"chaos?account={ONE}")[1] == {"seed": 5, "faults": []}
    status, found = controlled.ask("chaos", {"account": ONE})
    assert (status, found["error"]) == (400, 'chaos: expected "seed" or "paused"')
