"""The load of `benchmarks.sqs`: one wrk script and one boto3 script, both checked by a ledger."""

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Void, check_ledger
from benchmarks.sqs_servers import Depth, Kind, PeerServer

SCRIPT = Path(__file__).with_name("sqs_wrk.lua")
BODY_BYTES = 256


class Work(NamedTuple):
    """The requests that a client repeats."""

    verb: str
    batch: int

    def __str__(self) -> str:
        done = "SendMessage" if self.verb == "send" else "Receive + Delete"
        return done if self.batch == 1 else f"{done}, {self.batch} a call"


class Cell(NamedTuple):
    """The figures of one run of one kind of work. A latency is that of a request."""

    per_s: float
    p50_ms: float
    p99_ms: float


class QueueEmptied(Exception):
    """A queue became empty, so the figures are invalid."""


def run_wrk(server: PeerServer, queue_url: str, work: Work, connections: int, seconds: int) -> Cell:
    """Loads a server and checks the result. Raises Void, or QueueEmptied."""
    before = server.depth(queue_url)
    report = ask_wrk(server, queue_url, work, connections, seconds)
    after = server.settled_depth(queue_url)
    try:
        return checked_cell(server.kind, work, connections, report, before, after)
    except Void as void:
        raise Void(f"{server.name}, {work}, {connections} connections: {void}") from None


def checked_cell(
    kind: Kind,
    work: Work,
    connections: int,
    report: Mapping[str, int],
    before: Depth,
    after: Depth,
) -> Cell:
    """Compares a server's count of messages with wrk's requests and answers; the figures.

    A server that finished nothing counts as one message. Raises Void, or QueueEmptied if there were
    not enough messages to receive.
    """
    if work.verb == "receive" and kind.keeps_messages and not after.visible:
        raise QueueEmptied
    for fault in ("broken", "status", "doubled", "refused"):
        if report[fault]:
            raise Void(f"wrk reports {fault}={report[fault]}")
    # Requests whose answers wrk did not wait for may or may not have been executed.
    pending = connections * work.batch
    if work.verb == "send":
        messages = report["requests"] * work.batch
        changes = [(after.total - before.total, messages, pending)]
    else:
        # All answers but those of receives are of deletes, each of as many messages.
        each = report["received"] / max(1, report["receives"])
        messages = round((report["requests"] - report["receives"]) * each)
        changes = [(before.visible - after.visible, report["received"], pending)]
        if not kind.counts_deleted:
            changes.append((before.total - after.total, messages, report["asked"] - messages))
    for changed, answered, unanswered in changes if kind.keeps_messages else []:
        if not answered <= changed <= answered + unanswered:
            raise Void(
                f"the queue changed by {changed} messages, but {answered} were answered for, and "
                f"at most {unanswered} more were requested"
            )
    took_s = report["took_us"] / 1e6
    return Cell(max(1, messages) / took_s, report["p50_us"] / 1_000, report["p99_us"] / 1_000)


def ask_wrk(
    server: PeerServer, queue_url: str, work: Work, connections: int, seconds: int
) -> dict[str, int]:
    """Runs wrk with the script; returns the figures that the script prints."""
    command = [shutil.which("wrk") or "wrk", "-t1", f"-c{connections}", f"-d{seconds}s"]
    command += ["--timeout", "20s", "-s", str(SCRIPT), server.url, "--"]
    command += [server.kind.protocol, work.verb, str(work.batch), queue_url, str(BODY_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        raise Void(f"{server.name}: wrk failed: {(done.stderr or done.stdout).strip()[-300:]}")
    report: dict[str, int] = json.loads(lines[0])
    return report


_clients: dict[str, Any] = {}


def _client(endpoint: str) -> Any:
    if endpoint not in _clients:
        import boto3  # type: ignore[import-untyped, unused-ignore]

        _clients[endpoint] = boto3.client(
            "sqs",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
        )
    return _clients[endpoint]


def boto3_lifecycles(endpoint: str, queue: str, seconds: float, by_queue: bool) -> float:
    """Sends, receives and deletes through boto3 for `seconds`; lifecycles a second. Raises Void.

    Runs in a process of its own, whose boto3 uses the server's protocol. With `by_queue`
    it sends to the URL of the queue, because not every server accepts requests at its root.
    """
    url = _client(endpoint).create_queue(QueueName=queue)["QueueUrl"]
    sqs = _client(url if by_queue else endpoint)
    body = "x" * BODY_BYTES
    sent: list[str] = []
    received: list[str] = []
    start_s = time.perf_counter()
    while (took_s := time.perf_counter() - start_s) < seconds:
        sent.append(sqs.send_message(QueueUrl=url, MessageBody=body)["MessageId"])
        (message,) = sqs.receive_message(QueueUrl=url)["Messages"]
        received.append(message["MessageId"])
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    check_ledger(sent, received)
    if sqs.receive_message(QueueUrl=url).get("Messages"):
        raise Void(f"{endpoint}: a message was left")
    sqs.delete_queue(QueueUrl=url)
    return len(sent) / took_s
