"""What the console reads of messages and does to them, by the requests that its pages send."""

import json
import os
from http.client import HTTPConnection

import boto3
import pytest

EVIL = "<img src=x onerror=document.title='run'>\u202e\x00"


@pytest.fixture
def orders(console):
    console.queues.create("orders", dead_letter="orders-dead", max_receives=1)
    return console


def sqs_of(server, key, secret):
    """A client of boto3 with this key."""
    return boto3.client(
        "sqs",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
    )


def bodies(shown):
    return [each["body"] for each in shown["messages"]]


def ids(shown):
    return [each["id"] for each in shown["messages"]]


def test_messages_are_paged_and_none_is_claimed(orders):
    orders.queues.push_many("orders", [str(number).encode() for number in range(25)])
    after, seen = 0, []
    while True:
        status, shown = orders.read(f"messages?queue=orders&limit=10&after={after}")
        assert status == 200
        seen += bodies(shown)
        if not shown["has_more"]:
            break
        after = shown["messages"][-1]["sequence"]
    assert seen == [str(number) for number in range(25)]
    assert orders.queues.stats("orders").counts.pulled == 0


def test_messages_are_found_by_body_attribute_group_and_id(orders):
    queues = orders.queues
    queues.push("orders", json.dumps({"customer": "Zoë"}).encode(), attributes={"kind": "vip"})
    wanted = queues.push("orders", b"plain", attributes={"kind": "plain"}).id
    queues.push("orders", b"other", group="eu")

    def found(text):
        given = f"search?queue=orders&text={text}"
        status, shown = orders.read(given)
        assert (status, shown["is_done"]) == (200, True)
        return bodies(shown)

    assert found("zo%C3%AB") == ['{"customer": "Zo\\u00eb"}'] or found("customer") != []
    assert found("kind=vip") == ['{"customer": "Zo\\u00eb"}']
    assert found("PLAIN") == ["plain"]
    assert found("eu") == ["other"]
    assert found(wanted) == ["plain"]
    assert found("nothing+like+it") == []


def test_hostile_bodies_and_attributes_come_as_json_text(orders):
    message_id = orders.queues.push("orders", EVIL.encode(), attributes={"<b>": EVIL}).id
    orders.queues.push("orders", b"\xff\x00binary")
    text, binary = orders.read("messages?queue=orders")[1]["messages"]
    assert (text["body"], text["attributes"]) == (EVIL, {"<b>": EVIL})
    assert binary["is_binary"]
    whole = orders.read(f"message?queue=orders&id={message_id}")[1]["message"]
    assert whole["body"] == EVIL


def test_a_server_that_masks_shows_no_body(start_console):
    server = start_console(mask_messages=True)
    server.queues.create("orders")
    message_id = server.queues.push("orders", b"secret", attributes={"card": "4111"}).id
    for path in ("messages?queue=orders", f"message?queue=orders&id={message_id}"):
        status, shown = server.read(path)
        assert status == 200
        assert "secret" not in str(shown)
        assert "4111" not in str(shown)
    assert server.read("search?queue=orders&text=secret")[0] == 403


def test_a_message_is_sent_with_all_its_fields(orders):
    given = {
        "queue": "orders",
        "body": "hello",
        "attributes": {"kind": "test"},
        "delay_ms": 60_000,
        "group": "eu",
        "dedup_id": "1",
        "priority": 3,
    }
    status, _, sent = orders.change("send", given)
    assert (status, sent["is_duplicate"]) == (200, False)
    assert orders.change("send", given)[2] == {"id": sent["id"], "is_duplicate": True}
    (message,) = orders.queues.peek("orders", state="delayed")
    assert (message.body, message.attributes) == (b"hello", {"kind": "test"})
    assert (message.group, message.priority) == ("eu", 3)


def test_selected_messages_are_deleted_released_and_redriven(orders, capfd):
    queues = orders.queues
    queues.push_many("orders", [b"a", b"b", b"c"])
    shown = orders.read("messages?queue=orders")[1]
    first, second, third = ids(shown)
    queues.pull("orders")
    assert orders.change("delete", {"queue": "orders", "ids": [first, second]})[2] == {
        "count": 1,
        "left": 1,
    }
    # The claim of the first ends, and it was pulled as often as it may be.
    assert orders.change("release", {"queue": "orders", "ids": [first]})[2]["count"] == 1
    assert [each.body for each in queues.peek("orders-dead")] == [b"a"]
    assert orders.change("redrive", {"queue": "orders-dead", "ids": [first]})[2]["count"] == 1
    assert sorted(each.body for each in queues.peek("orders", 9)) == [b"a", b"c"]
    life = orders.read(f"life?id={second}")[1]
    assert life["state"] == "deleted"
    assert "The console (somebody at 127.0.0.1) deleted it" in " ".join(life["sentences"])
    written = capfd.readouterr().err
    assert "penstock: console: somebody at 127.0.0.1 deleted 1 messages of orders\n" in written
    assert "moved 1 messages of orders-dead to their source queues" in written
    assert third in ids(orders.read("messages?queue=orders")[1])


def test_a_redrive_of_all_is_done_in_parts(orders):
    queues = orders.queues
    queues.push_many("orders", [b"x"] * 1_500)
    for claim in queues.pull_many("orders", 1_500):
        queues.release(claim)
    given = {"queue": "orders-dead", "to": None}
    assert orders.change("redrive", given)[2] == {"count": 1_000, "is_done": False}
    assert orders.change("redrive", given)[2] == {"count": 500, "is_done": True}
    assert queues.stats("orders").visible == 1_500


def test_queues_are_made_configured_purged_and_deleted(console):
    assert console.change("create-queue", {"queue": "new", "settings": {}})[0] == 200
    console.queues.push("new", b"x")
    given = {"queue": "new", "settings": {"visibility_ms": 5_000}}
    assert console.change("configure-queue", given)[0] == 200
    assert console.queues.describe("new").settings.visibility_timeout == 5
    assert console.change("purge", {"queue": "new"})[2] == {"count": 1}
    assert console.change("delete-queue", {"queue": "new"})[0] == 200
    assert console.read("queue?name=new")[0] == 404


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("send", {"queue": "orders"}),
        ("send", {"queue": "orders", "body": "x", "delay_ms": "soon"}),
        ("send", {"queue": "orders", "body": "x", "attributes": {"a": {"b": 1}}}),
        ("send", {"queue": "orders", "body": "%", "is_binary": True}),
        ("delete", {"queue": "orders", "ids": []}),
        ("delete", {"queue": "orders", "ids": "all"}),
        ("redrive", {"queue": "nowhere"}),
        ("configure-queue", {"queue": "orders", "settings": {"annotations": {}}}),
        ("configure-queue", {"queue": "orders", "settings": {"visibility_ms": -1}}),
        ("create-queue", {"queue": "../etc", "settings": {}}),
    ],
)
def test_a_wrong_change_is_refused_with_a_sentence(orders, name, given):
    status, _, shown = orders.change(name, given)
    assert status == 400
    assert len(shown["error"]) > 10


def test_a_wrong_question_is_refused_with_a_sentence(orders):
    for path in (
        "messages?queue=nowhere",
        "messages?queue=orders&state=odd",
        "messages?queue=orders&after=x",
        "search?queue=orders",
        "life?id=x",
    ):
        status, shown = orders.read(path)
        assert status == 400, path
        assert shown["error"]


def test_a_read_only_server_changes_nothing(start_console):
    server = start_console(host="0.0.0.0", insecure_without_keys=True, insecure_without_tls=True)
    server.queues.create("orders")
    assert server.change("purge", {"queue": "orders"})[0] == 403
    assert server.change("send", {"queue": "orders", "body": "x"})[0] == 403
    assert server.queues.stats("orders").messages == 0


def test_claims_name_their_holders(orders):
    sqs = sqs_of(orders, "AKIAEXAMPLE", "any")
    url = f"{orders.url}/000000000000/orders"
    message_id = orders.queues.push("orders", b"x").id
    (message,) = sqs.receive_message(QueueUrl=url)["Messages"]
    sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    sqs.close()
    consumed_id = orders.queues.push("orders", b"y").id
    for _ in orders.queues.consume("orders", idle=0):
        pass
    (first,) = [each for each in orders.queues.history(message_id) if each.kind == "Claimed"]
    assert first.holder.startswith("AKIAEXAMPLE Boto3/")
    assert "(127.0.0.1:" in first.holder
    assert len(first.holder) <= 64
    told = " ".join(orders.read(f"life?id={message_id}")[1]["sentences"])
    assert f"{first.holder} deleted it" in told
    (second,) = [each for each in orders.queues.history(consumed_id) if each.kind == "Claimed"]
    assert second.holder.endswith(f"(pid {os.getpid()})")


def test_senders_that_share_a_connection_keep_their_names_and_accounts(orders):
    orders.queues.push_many("orders", [b"x", b"y", b"z"])
    host = orders.url.removeprefix("http://")
    shared = HTTPConnection(host, timeout=60)

    def ask(key, agent, action, **fields):
        credential = f"Credential={key}/20260101/us-east-1/sqs/aws4_request"
        headers = {
            "Authorization": f"AWS4-HMAC-SHA256 {credential}, SignedHeaders=host, Signature=0",
            "User-Agent": agent,
            "X-Amz-Target": f"AmazonSQS.{action}",
            "Content-Type": "application/x-amz-json-1.0",
        }
        shared.request("POST", "/", json.dumps(fields), headers)
        return json.loads(shared.getresponse().read())

    url = f"{orders.url}/000000000000/orders"
    senders = [("ALICE", "first/1"), ("BOB", "first/1"), ("BOB", "second/2")]
    holders = []
    for key, agent in senders:
        (message,) = ask(key, agent, "ReceiveMessage", QueueUrl=url)["Messages"]
        (_, claimed) = orders.queues.history(message["MessageId"])
        holders.append(claimed.holder)
        made = ask("222222222222", agent, "CreateQueue", QueueName="orders")["QueueUrl"]
        assert made.endswith("/222222222222/orders")
        own = ask(key, agent, "GetQueueUrl", QueueName="orders")["QueueUrl"]
        assert own.endswith("/000000000000/orders")
    shared.close()
    expected = [f"{key} {agent} (127.0.0.1:" for key, agent in senders]
    assert [holder[: len(start)] for holder, start in zip(holders, expected, strict=True)] == (
        expected
    )


def test_a_push_names_its_sender_where_that_is_kept(orders):
    sqs = sqs_of(orders, "AKIAEXAMPLE", "any")
    url = f"{orders.url}/000000000000/orders"
    kind = {"kind": {"DataType": "String", "StringValue": "vip"}}
    named = sqs.send_message(QueueUrl=url, MessageBody="x", MessageAttributes=kind)["MessageId"]
    plain = sqs.send_message(QueueUrl=url, MessageBody="x")["MessageId"]
    sqs.close()
    own = orders.change("send", {"queue": "orders", "body": "x"})[2]["id"]
    assert " by AKIAEXAMPLE Boto3/" in orders.read(f"life?id={named}")[1]["sentences"][0]
    untold = " by a producer whose name was not kept."
    assert orders.read(f"life?id={plain}")[1]["sentences"][0].endswith(untold)
    assert (
        " by the console (somebody at 127.0.0.1)"
        in orders.read(f"life?id={own}")[1]["sentences"][0]
    )


def test_with_keys_every_push_names_its_sender(start_console):
    server = start_console(keys={"AKIAOWNER": "a secret"}, queues={"orders": {}})
    sqs = sqs_of(server, "AKIAOWNER", "a secret")
    url = f"{server.url}/000000000000/orders"
    sent = sqs.send_message(QueueUrl=url, MessageBody="x")["MessageId"]
    (message,) = sqs.receive_message(QueueUrl=url, AttributeNames=["All"])["Messages"]
    sqs.close()
    # It is for the journal, and not for consumers.
    assert not any("AKIAOWNER" in value for value in message["Attributes"].values())
    (pushed, _) = server.queues.history(sent)
    assert pushed.holder.startswith("AKIAOWNER Boto3/")
