"""Row 19: annotations of a queue that another client has set to anything break nothing here.

The endpoint stores what the engine has no setting for in annotations: tags, policies, move tasks.
Any client of the store can write them, too.
"""

import json
from urllib.request import urlopen

import pytest

from penstock.server.sqs.lookup import HOME_NOTE
from penstock.server.sqs.moves import NOTE
from penstock.service import CreateQueue
from penstock.wire.sqs import attributes, model
from tests.server.sqs.conftest import Local
from tests.server.sqs.test_limits import JsonWire

NAMES = (
    *(attributes.TAGS, attributes.POLICY, attributes.ALLOW_POLICY, attributes.KMS_KEY),
    *(attributes.KMS_REUSE, attributes.MANAGED_SSE, attributes.THROUGHPUT, attributes.REDRIVE),
    *(attributes.WITHHELD, attributes.SCOPE, HOME_NOTE, NOTE, ".purged"),
)
DEAD = "arn:aws:sqs:us-east-1:000000000000:junk-0"
TEXTS = (
    "",
    "junk",
    "[",
    "5",
    "[1]",
    "null",
    "9" * 5_000,
    "\u00b2",
    "messageGroup \u00b2",
    "[" * 2_000,
    '{"Statement":5}',
    '{"redrivePermission":"byQueue","sourceQueueArns":5}',
    json.dumps({"deadLetterTargetArn": DEAD}),
    json.dumps({"deadLetterTargetArn": DEAD, "maxReceiveCount": "x"}),
    '[{"id":"a","source":"x","to":null,"rate":0,"started_at_ms":0,"to_move":5}]',
    '[{"id":"a","source":5}]',
)


def requests(url, queue_arn):
    """Each action with the parameters that it needs."""
    receipt = {"ReceiptHandle": "x", "VisibilityTimeout": 0}
    entries = [{"Id": "1", "MessageBody": "x", "MessageGroupId": "g", **receipt}]
    given = {
        "QueueUrl": url,
        "QueueName": url.rpartition("/")[2],
        "MessageBody": "x",
        "Entries": entries,
        "AttributeNames": ["All"],
        "Attributes": {"VisibilityTimeout": "30"},
        "Label": "label",
        "AWSAccountIds": ["111122223333"],
        "Actions": ["*"],
        "Tags": {"a": "b"},
        "TagKeys": ["a"],
        "SourceArn": queue_arn,
        "TaskHandle": "x",
        **receipt,
    }
    for action in model.ACTIONS.values():
        known = set(action.parameters.__struct_encode_fields__)
        yield action.name, {name: value for name, value in given.items() if name in known}
    for permission in ("denyAll", "allowAll"):
        policy = json.dumps({"redrivePermission": permission})
        changes = {"RedriveAllowPolicy": policy}
        yield "SetQueueAttributes", {"QueueUrl": url, "Attributes": changes}


@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
def test_no_annotation_of_another_client_breaks_an_action_or_the_start(query_data, tmp_path, fifo):
    suffix = ".fifo" if fifo else ""
    queues = [f"junk-{number}{suffix}" for number in range(len(TEXTS))]
    before = Local(query_data, "file", tmp_path)
    try:
        for name, text in zip(queues, TEXTS, strict=True):
            settings = {"fifo": fifo, "annotations": dict.fromkeys(NAMES, text)}
            before.execute(CreateQueue(name, settings))
    finally:
        before.close()
    server = Local(query_data, "file", tmp_path, purged_window=60)
    wire = JsonWire(server.url)
    try:
        for name in queues:
            url = f"{server.url}/000000000000/{name}"
            for action, body in requests(url, f"arn:aws:sqs:us-east-1:000000000000:{name}"):
                if action != "DeleteQueue":
                    status, answer = wire.ask(action, body)
                    assert status == 200 or 400 <= status < 500, (action, name, answer)
        for name in queues:
            url = f"{server.url}/000000000000/{name}"
            assert wire.ask("DeleteQueue", {"QueueUrl": url})[0] == 200
        with urlopen(f"{server.url}/metrics") as page:
            assert b"penstock_faults_total 0.0" in page.read()
    finally:
        wire.close()
        server.close()
