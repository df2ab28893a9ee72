"""Every query of the alerts and the dashboard, evaluated on the figures of a real server."""

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from botocore.exceptions import ClientError

from penstock.journal import reader_positions
from tests.monitoring.promql import Query, read_scrape
from tests.server.sqs.conftest import serve

MONITORING = Path(__file__).parents[2] / "monitoring"
TARGET = {"job": "penstock", "instance": "127.0.0.1:9324"}
FAILED = {"PenstockErrors": ("penstock_requests_total",)}
VARIABLES = {"$instance": ".*", "$queue": ".*", "$__rate_interval": "1m"}


def alerts():
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def panels():
    found = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    queries = {}
    for panel in found:
        for target in panel["targets"]:
            text = target["expr"]
            for variable, value in VARIABLES.items():
                text = text.replace(variable, value)
            assert "$" not in text
            queries[f"{panel['title']} {target['refId']}"] = text
    return queries


def scrape(server):
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        return read_scrape(page.read().decode(), time.monotonic(), TARGET)


def work(server, times):
    """Pushes, claims, returns, deletes, makes dead letters, and is refused."""
    sqs = server.client()
    dead = sqs.create_queue(QueueName="orders-dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])
    policy = {"deadLetterTargetArn": arn["Attributes"]["QueueArn"], "maxReceiveCount": "2"}
    attributes = {"RedrivePolicy": json.dumps(policy), "VisibilityTimeout": "600"}
    url = sqs.create_queue(QueueName="orders", Attributes=attributes)["QueueUrl"]
    for _ in range(times):
        for _ in range(2):
            sqs.send_message(QueueUrl=url, MessageBody="x")
        # The first message comes back twice, and is a dead letter then.
        for is_deleted in (False, False, True):
            (message,) = sqs.receive_message(QueueUrl=url)["Messages"]
            receipt = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
            if is_deleted:
                sqs.delete_message(**receipt)
            else:
                sqs.change_message_visibility(**receipt, VisibilityTimeout=0)
        with pytest.raises(ClientError):
            sqs.send_message(QueueUrl=url + "-nowhere", MessageBody="x")


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory):
    """Two scrapes of one server, and what happened in between."""
    path = tmp_path_factory.mktemp("monitoring") / "data"
    with serve("--data", str(path)) as server:
        sqs = server.client()
        sqs.create_queue(QueueName="held")
        reader_positions.register(path, "mirror", 0, 1)
        work(server, 1)
        before = scrape(server)
        work(server, 5)
        yield before, scrape(server)


@pytest.mark.parametrize("name", panels())
def test_a_panel_of_the_dashboard_shows_the_figures_of_a_server(scrapes, name):
    query = Query(panels()[name], *scrapes)
    found = query.evaluate()
    # Only these have no sample on a server where nothing is wrong.
    absent = {"penstock_queue_paused", "penstock_commands_total"}
    if not absent & query.selected.keys():
        assert found
    assert all(re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", str(value)) for value in found.values())


@pytest.mark.parametrize("name", alerts())
def test_an_alert_is_about_figures_that_a_server_has(scrapes, name):
    query = Query(alerts()[name], *scrapes)
    query.evaluate()
    missing = {metric for metric, count in query.selected.items() if not count}
    # No queue is paused here, and no request fails.
    assert missing <= {"penstock_queue_paused", *FAILED.get(name, ())}


def firing(before, after):
    return {name for name, expr in alerts().items() if Query(expr, before, after).evaluate()}


def test_what_is_wrong_with_a_server_fires_its_alerts_and_no_others(scrapes):
    # How fast the disk of this machine fills up, and how long its syncs take, is not the server's.
    of_machine = {"PenstockDiskFillsUp", "PenstockDiskNearlyFull", "PenstockSlowSyncs"}
    of_machine.add("PenstockSlowRequests")
    expected = {"PenstockRefusals", "PenstockRedeliveries", "PenstockDeadLetters"}
    assert firing(*scrapes) - of_machine == expected


def changed(scrape, **values):
    """The same scrape with another value for every sample of these metrics."""
    samples = {
        name: dict.fromkeys(vector, values[name]) if name in values else vector
        for name, vector in scrape.samples.items()
    }
    return scrape._replace(samples=samples)


@pytest.mark.parametrize(
    ("alert", "values"),
    [
        ("PenstockOldMessages", {"penstock_oldest_message_age_seconds": 1_000}),
        ("PenstockQueuesLeftOut", {"penstock_queues_left_out": 5}),
        ("PenstockDown", {"up": 0}),
        ("PenstockFault", {"penstock_faults_total": 3}),
        ("PenstockDiskNearlyFull", {"penstock_disk_free_bytes": 1}),
        ("PenstockDiskFillsUp", {"penstock_disk_free_bytes": 1}),
        ("PenstockJournalLags", {"penstock_journal_unsynced_bytes": 10**9}),
        ("PenstockUpkeepFails", {"penstock_upkeep_failed": 1}),
        ("PenstockReaderAbandoned", {"penstock_reader_abandoned": 1}),
        ("PenstockReaderFillsDisk", {"penstock_reader_behind_bytes": 10**18}),
    ],
)
def test_an_alert_fires_for_the_figures_that_it_is_about(scrapes, alert, values):
    before, after = scrapes
    assert alert in firing(before, changed(after, **values))


def test_messages_that_nobody_pulls_fire_an_alert_unless_their_queue_is_paused(tmp_path):
    with serve("--data", str(tmp_path / "data")) as server:
        sqs = server.client()
        url = sqs.create_queue(QueueName="orders")["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="x")
        before = scrape(server)
        assert "PenstockNobodyPulls" in firing(before, scrape(server))
        request = urllib.request.Request(
            f"{server.url}/console/api/configure-queue",
            json.dumps({"queue": "orders", "settings": {"paused": True}}).encode(),
            {"Content-Type": "application/json", "X-Penstock-Console": "1"},
        )
        urllib.request.urlopen(request).close()
        fired = firing(before, scrape(server))
    assert "PenstockNobodyPulls" not in fired
    assert "PenstockQueuePaused" in fired


@pytest.mark.parametrize(
    "query",
    [
        "penstock_messages{state=}",
        "sum by (nothing) (penstock_messages)",
        'penstock_messages{nothing="x"}',
        "rate(penstock_pushes_total)",
        "delta(penstock_pushes_total[5m])",
        "orders_total",
        "penstock_messages > 0 or",
        "penstock_messages > penstock_disk_free_bytes ]",
    ],
)
def test_a_query_with_a_mistake_is_refused(scrapes, query):
    with pytest.raises(AssertionError):
        Query(query, *scrapes).evaluate()


def test_every_metric_that_is_asked_for_is_described_in_the_reference():
    text = (MONITORING.parent / "docs" / "how-to" / "running.md").read_text()
    used = set(re.findall(r"penstock_\w+", " ".join([*alerts().values(), *panels().values()])))
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert {name for name in used if f"`{name}" not in text} == set()
    assert {name for name in alerts() if f"`{name}`" not in text} == set()
