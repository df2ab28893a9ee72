"""For a project that comes from another emulator: paths of LocalStack, queues on first use."""

import json
import re
import urllib.error
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from tests.server.sqs.asking import bodies, make, make_fifo, push, receive, refused, send, shown
from tests.server.sqs.conftest import Local, serve

PEEK = "/_aws/sqs/messages"
SECRET = "a-secret-of-16-or-more"


def get(url, body=None, **headers):
    """The status and the body of an answer."""
    try:
        with urlopen(Request(url, body, headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def peek(server, queue, body=None, **parameters):
    """The messages that a peek shows, as JSON."""
    query = urlencode({"QueueUrl": queue, **parameters})
    status, text = get(f"{server.url}{PEEK}?{query}", body, Accept="application/json")
    assert status == 200, text
    return json.loads(text)["ReceiveMessageResponse"]["ReceiveMessageResult"]["Message"]


def seen(messages):
    return [message["Body"] for message in messages]


@pytest.fixture
def creating(query_data):
    server = Local(query_data, create_on_use=True)
    yield server
    server.close()


@pytest.fixture
def guarded(query_data):
    server = Local(query_data, keys={"AKID": SECRET}, create_on_use=True)
    yield server
    server.close()


def test_the_health_path_of_localstack_says_that_sqs_is_running(local):
    status, text = get(f"{local.url}/_localstack/health")
    assert (status, json.loads(text)["services"]) == (200, {"sqs": "running"})
    assert get(f"{local.url}/_localstack/health", Origin="http://evil.example")[0] == 403


def test_a_peek_shows_messages_and_claims_none(local):
    client = local.client()
    url = make(client)
    for body in ("a", "b<&", "c"):
        send(client, url, body)
    for _ in range(2):
        assert seen(peek(local, url)) == ["a", "b<&", "c"]
    assert shown(client, url)["ApproximateNumberOfMessagesNotVisible"] == "0"
    (message,) = receive(client, url, AttributeNames=["ApproximateReceiveCount"])
    assert message["Attributes"] == {"ApproximateReceiveCount": "1"}
    assert seen(peek(local, url)) == ["b<&", "c"]


def test_a_peek_shows_delayed_and_invisible_messages_if_asked(local):
    client = local.client()
    url = make(client)
    send(client, url, "held")
    receive(client, url)
    send(client, url, "later", DelaySeconds=60)
    send(client, url, "now")
    assert seen(peek(local, url)) == ["now"]
    assert seen(peek(local, url, ShowDelayed="true")) == ["now", "later"]
    assert seen(peek(local, url, ShowInvisible="True")) == ["now", "held"]
    form = urlencode({"ShowInvisible": "1", "ShowDelayed": "1"}).encode()
    assert seen(peek(local, url, form)) == ["now", "later", "held"]
    assert seen(peek(local, url, ShowInvisible="false", ShowDelayed="0")) == ["now"]


def test_a_peek_shows_messages_behind_one_of_their_group_that_is_in_flight(local):
    client = local.client()
    url = make_fifo(client)
    push(client, url, "a")
    push(client, url, "b")
    receive(client, url)
    assert seen(peek(local, url)) == ["b"]


def test_an_sdk_peeks_with_a_receive_at_this_path(local):
    client = local.client()
    url = make(client)
    given = {"k": {"DataType": "Number", "StringValue": "7"}}
    send(client, url, "x", MessageAttributes=given)
    looking = local.client(endpoint_url=f"{local.url}{PEEK}")
    for _ in range(2):
        (message,) = receive(looking, url, MaxNumberOfMessages=1)
        assert message["Body"] == "x"
        assert message["MessageAttributes"] == given
        assert message["Attributes"]["ApproximateReceiveCount"] == "0"
        assert message["ReceiptHandle"] == "SQS/BACKDOOR/ACCESS"
    code, _ = refused(client.delete_message, QueueUrl=url, ReceiptHandle="SQS/BACKDOOR/ACCESS")
    assert code == "ReceiptHandleIsInvalid"


def test_a_peek_of_a_dead_letter_and_of_a_fifo_message_has_their_attributes(local):
    client = local.client()
    url = make_fifo(client)
    push(client, url, "x", group="g1")
    (message,) = peek(local, url)
    attributes = {each["Name"]: each["Value"] for each in message["Attribute"]}
    assert (attributes["MessageGroupId"], attributes["MessageDeduplicationId"]) == ("g1", "x")
    dead = make(client, "dead")
    policy = {
        "deadLetterTargetArn": shown(client, dead, "QueueArn")["QueueArn"],
        "maxReceiveCount": 1,
    }
    source = make(client, "source", RedrivePolicy=json.dumps(policy))
    send(client, source, "y")
    receive(client, source, VisibilityTimeout=0)
    receive(client, source)
    (message,) = peek(local, dead)
    attributes = {each["Name"]: each["Value"] for each in message["Attribute"]}
    assert attributes["DeadLetterQueueSourceArn"].endswith(":source")


def test_a_peek_is_xml_unless_json_is_accepted(local):
    client = local.client()
    url = make(client)
    send(client, url, "a<b")
    query = urlencode({"QueueUrl": url})
    for parameters in (query, f"Action=ReceiveMessage&{query}"):
        status, text = get(f"{local.url}{PEEK}?{parameters}")
        assert (status, re.findall("<Body>(.*?)</Body>", text)) == (200, ["a&lt;b"])
    assert get(f"{local.url}{PEEK}", query.encode())[1].count("<Message>") == 1
    assert peek(local, make(client, "empty")) == []


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({}, "must contain the parameter QueueUrl"),
        ({"QueueUrl": "none"}, "does not exist"),
        ({"QueueUrl": "q", "ShowInvisible": "perhaps"}, "Must be true or false"),
        ({"QueueUrl": "q", "Action": "PurgeQueue"}, "for ReceiveMessage only"),
    ],
)
def test_a_wrong_peek_is_refused(local, parameters, complaint):
    make(local.client())
    url = f"{local.url}{PEEK}?{urlencode(parameters)}"
    status, text = get(url, **{"X-Amz-Any": "1"})
    assert (status, complaint in text) == (400, True)


def test_a_web_page_cannot_peek(local):
    url = make(local.client())
    query = urlencode({"QueueUrl": url})
    status, _ = get(f"{local.url}{PEEK}?{query}", Origin="http://evil.example")
    assert status == 403


def test_with_keys_a_peek_must_be_signed(guarded):
    keys = {"aws_access_key_id": "AKID", "aws_secret_access_key": SECRET}
    client = guarded.client(**keys)
    url = make(client)
    send(client, url, "x")
    status, text = get(f"{guarded.url}{PEEK}?{urlencode({'QueueUrl': url})}")
    assert (status, "Body" in text) == (403, False)
    looking = guarded.client(endpoint_url=f"{guarded.url}{PEEK}", **keys)
    assert bodies(looking, url) == ["x"]


def test_a_queue_is_created_when_it_is_first_used(creating):
    client = creating.client()
    home = f"{creating.url}/000000000000"
    assert client.get_queue_url(QueueName="asked")["QueueUrl"] == f"{home}/asked"
    send(client, f"{home}/sent", "x")
    assert receive(client, f"{home}/received") == []
    entries = [{"Id": "1", "MessageBody": "x"}]
    client.send_message_batch(QueueUrl=f"{home}/batched", Entries=entries)
    push(client, f"{home}/ordered.fifo", "x")
    urls = client.list_queues()["QueueUrls"]
    names = ["asked", "batched", "ordered.fifo", "received", "sent"]
    assert urls == [f"{home}/{name}" for name in names]
    assert shown(client, f"{home}/ordered.fifo")["FifoQueue"] == "true"
    assert bodies(client, f"{home}/sent") == ["x"]


def test_a_queue_of_another_account_is_created_there(creating):
    client = creating.client()
    url = f"{creating.url}/111122223333/theirs"
    send(client, url, "x")
    named = {"QueueName": "named", "QueueOwnerAWSAccountId": "111122223333"}
    assert client.get_queue_url(**named)["QueueUrl"] == f"{creating.url}/111122223333/named"
    assert "QueueUrls" not in client.list_queues()
    other = creating.client(aws_access_key_id="111122223333")
    assert len(other.list_queues()["QueueUrls"]) == 2


def test_other_actions_and_peeks_create_no_queue(creating):
    client = creating.client()
    for call in (client.get_queue_attributes, client.purge_queue, client.delete_queue):
        assert refused(call, QueueUrl="none")[0] == "AWS.SimpleQueueService.NonExistentQueue"
    assert refused(client.get_queue_url, QueueName="a b")[0] == "InvalidParameterValue"
    assert get(f"{creating.url}{PEEK}?QueueUrl=none")[0] == 400
    assert "QueueUrls" not in client.list_queues()


def test_a_web_page_cannot_create_a_queue_by_asking_for_its_url(creating, local):
    query = "?Action=GetQueueUrl&QueueName=page"
    assert get(f"{creating.url}/{query}")[0] == 403
    assert "QueueUrls" not in creating.client().list_queues()
    # Without the option it only looks, and so needs no header.
    assert "NonExistentQueue" in get(f"{local.url}/{query}")[1]


def test_with_keys_no_queue_of_another_account_is_created(guarded):
    client = guarded.client(aws_access_key_id="AKID", aws_secret_access_key=SECRET)
    url = f"{guarded.url}/111122223333/theirs"
    call = client.send_message
    assert "NonExistent" in refused(call, QueueUrl=url, MessageBody="x")[0]
    assert "QueueUrls" not in client.list_queues()


def test_a_configuration_file_of_elasticmq_declares_queues_again_after_a_restart(tmp_path):
    config = tmp_path / "elasticmq.conf"
    text = (
        'include classpath("application.conf")\n'
        "queues {\n"
        "  orders {\n"
        "    defaultVisibilityTimeout = 10 seconds\n"
        "    deadLettersQueue { name = orders-dead, maxReceiveCount = 3 }\n"
        "    tags { team = shop }\n"
        "  }\n"
        "  orders-dead { }\n"
        "  events { fifo = true, contentBasedDeduplication = true }\n"
        "}\n"
    )
    config.write_text(text)
    arguments = ("--config", str(config), "--data", str(tmp_path / "data"))
    policy = '{"Version":"2012-10-17","Statement":[]}'
    with serve(*arguments) as server:
        client = server.client()
        url = client.get_queue_url(QueueName="orders")["QueueUrl"]
        assert shown(client, url)["VisibilityTimeout"] == "10"
        assert json.loads(shown(client, url)["RedrivePolicy"])["maxReceiveCount"] == 3
        assert client.list_queue_tags(QueueUrl=url)["Tags"] == {"team": "shop"}
        fifo = client.get_queue_url(QueueName="events.fifo")["QueueUrl"]
        assert shown(client, fifo)["ContentBasedDeduplication"] == "true"
        client.set_queue_attributes(QueueUrl=url, Attributes={"Policy": policy})
        assert server.stop() == 0
    config.write_text(text.replace("10 seconds", "1 minute").replace("shop", "web"))
    with serve(*arguments) as server:
        client = server.client()
        url = client.get_queue_url(QueueName="orders")["QueueUrl"]
        assert shown(client, url)["VisibilityTimeout"] == "60"
        assert client.list_queue_tags(QueueUrl=url)["Tags"] == {"team": "web"}
        assert shown(client, url)["Policy"] == policy
