"""The load of `benchmarks.sqs`: one wrk script and one boto3 script, both held to a ledger."""

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Void, check_ledger
from benchmarks.sqs_servers import Depth, Kind, Server

SCRIPT = Path(__file__).with_name("sqs_wrk.lua")
BODY_BYTES = 256


class Work(NamedTuple):
    """What a client asks for again and again."""

    verb: str
    batch: int

    def __str__(self) -> str:
        done = "SendMessage" if self.verb == "send" else "Receive + Delete"
        return done if self.batch == 1 else f"{done}, {self.batch} a call"


class Cell(NamedTuple):
    """What one second of one work came to. A latency is that of a request."""

    per_s: float
    p50_ms: float
    p99_ms: float


class RanDry(Exception):
    """A queue had nothing left to receive, so that what was measured is something else."""


def run_wrk(server: Server, queue_url: str, work: Work, connections: int, seconds: int) -> Cell:
    """Loads a server and judges what came of it. Raises Void, or RanDry."""
    before = server.depth(queue_url)
    said = ask_wrk(server, queue_url, work, connections, seconds)
    after = server.settled_depth(queue_url)
    try:
        return judged(server.kind, work, connections, said, before, after)
    except Void as void:
        raise Void(f"{server.name}, {work}, {connections} connections: {void}") from None


def judged(
    kind: Kind,
    work: Work,
    connections: int,
    said: Mapping[str, int],
    before: Depth,
    after: Depth,
) -> Cell:
    """Holds a server's count of messages to what wrk asked for and was answered.

    A server that finished nothing is credited with one message. Raises Void, or RanDry if there
    was not enough to receive.
    """
    if work.verb == "receive" and kind.keeps_messages and not after.visible:
        raise RanDry
    for fault in ("broken", "status", "doubled", "refused"):
        if said[fault]:
            raise Void(f"wrk says {fault}={said[fault]}")
    # What wrk has asked for and not waited for to the end may have happened or not.
    unheard = connections * work.batch
    if work.verb == "send":
        messages = said["requests"] * work.batch
        changes = [(after.total - before.total, messages, unheard)]
    else:
        # A receive is answered with messages; whatever else is answered is a delete of as many.
        each = said["received"] / max(1, said["receives"])
        messages = round((said["requests"] - said["receives"]) * each)
        changes = [(before.visible - after.visible, said["received"], unheard)]
        if not kind.counts_deleted:
            changes.append((before.total - after.total, messages, said["asked"] - messages))
    for changed, answered, unanswered in changes if kind.keeps_messages else []:
        if not answered <= changed <= answered + unanswered:
            raise Void(
                f"the queue changed by {changed} messages, but {answered} were answered for, and "
                f"at most {unanswered} more asked for"
            )
    took_s = said["took_us"] / 1e6
    return Cell(max(1, messages) / took_s, said["p50_us"] / 1_000, said["p99_us"] / 1_000)


def ask_wrk(
    server: Server, queue_url: str, work: Work, connections: int, seconds: int
) -> dict[str, int]:
    """Runs wrk with the script; what the script said in the end."""
    command = [shutil.which("wrk") or "wrk", "-t1", f"-c{connections}", f"-d{seconds}s"]
    command += ["--timeout", "20s", "-s", str(SCRIPT), server.url, "--"]
    command += [server.kind.protocol, work.verb, str(work.batch), queue_url, str(BODY_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        raise Void(f"{server.name}: wrk failed: {(done.stderr or done.stdout).strip()[-300:]}")
    said: dict[str, int] = json.loads(lines[0])
    return said


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
    """Sends, receives and deletes through boto3 for so long; lifecycles a second. Raises Void.

    Runs in a process of its own, whose boto3 is one that speaks the server's protocol. With
    `by_queue` it asks the queue's own URL: not every server finds a queue from its first page.
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
