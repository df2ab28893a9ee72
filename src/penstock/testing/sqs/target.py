"""The server that is checked, over one protocol, and the requests that many checks send."""

import functools
import itertools
import json
import re
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlencode, urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from penstock.testing.sqs.checks import Failed, expect, require
from penstock.testing.sqs.query import write_query_model

# What botocore raises if there is no answer, or one that it cannot read.
NO_ANSWER: Final = (BotoCoreError, ResponseParserError, OSError)
Protocol = Literal["json", "query"]
PROTOCOLS: Final[tuple[Protocol, ...]] = ("json", "query")
# How much later than promised a server without a movable clock may be.
_MARGIN_S: Final = 0.6
_READ_S: Final = 30


@functools.cache
def _session(protocol: Protocol) -> Any:
    """A botocore session, which reads a model only once."""
    session = botocore.session.Session()
    if protocol == "query":
        directory = tempfile.TemporaryDirectory(prefix="penstock-query-")
        write_query_model(Path(directory.name))
        # It lives as long as the session.
        session.penstock_directory = directory
        session.get_component("data_loader").search_paths.insert(0, directory.name)
    return session


_CREATING = threading.Lock()


# Codes of the Query protocol whose name in JSON is another one; the rest differ by the prefix only.
_JSON_NAMES: Final = {
    "NonExistentQueue": "QueueDoesNotExist",
    "QueueAlreadyExists": "QueueNameExists",
}


def plain_code(code: str) -> str:
    """One name for the code of an error, whichever of the two protocols it comes from."""
    name = code.rpartition("#")[2].removeprefix("AWS.SimpleQueueService.")
    return _JSON_NAMES.get(name, name)


class CheckedServer:
    """A server; `advance` moves its clock by seconds, where it has one that can be moved.

    With `texts` the texts of errors are compared, too, with those that Amazon SQS was seen to give.
    """

    def __init__(
        self,
        endpoint_url: str,
        protocol: Protocol = "json",
        *,
        region: str = "us-east-1",
        access_key: str = "any",
        secret_key: str = "any",
        advance: Callable[[float], None] | None = None,
        texts: bool = False,
    ) -> None:
        self.endpoint_url = endpoint_url.rstrip("/")
        self.protocol: Protocol = protocol
        self.texts = texts
        self.region = region
        self._keys = (access_key, secret_key)
        self._advance = advance
        self._numbers = itertools.count()
        self._prefix = f"check-{uuid.uuid4().hex[:8]}"
        self._clients: list[Any] = []
        self._made: list[str] = []
        self.client = self.another_client()

    def another_client(self, region: str = "") -> Any:
        """One more client, that never repeats a request."""
        with _CREATING:
            client = _session(self.protocol).create_client(
                "sqs",
                endpoint_url=self.endpoint_url,
                region_name=region or self.region,
                aws_access_key_id=self._keys[0],
                aws_secret_access_key=self._keys[1],
                config=Config(retries={"max_attempts": 0}, read_timeout=_READ_S, connect_timeout=5),
            )
        self._clients.append(client)
        return client

    def close(self) -> None:
        """Deletes the queues that were made, as far as the server does it, and disconnects."""
        for url in self._made:
            try:
                self.client.delete_queue(QueueUrl=url)
            except (ClientError, *NO_ANSWER):
                # A server that cannot even delete has failed its check before.
                continue
        for client in self._clients:
            client.close()

    # Queues

    def name(self, suffix: str = "") -> str:
        """The name of a queue that no other check uses."""
        return f"{self._prefix}-{next(self._numbers)}{suffix}"

    def queue(self, name: str = "", **attributes: str) -> str:
        """The URL of a new standard queue."""
        return self._create(name or self.name(), attributes)

    def fifo(self, name: str = "", **attributes: str) -> str:
        """The URL of a new FIFO queue."""
        return self._create(name or self.name(".fifo"), {"FifoQueue": "true", **attributes})

    def _create(self, name: str, attributes: Mapping[str, str]) -> str:
        url: str = self.client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
        self._made.append(url)
        return url

    def attributes(self, url: str, *names: str) -> dict[str, str]:
        """These attributes of a queue, or all."""
        answer = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=[*names] or ["All"])
        return dict(answer.get("Attributes", {}))

    def arn(self, url: str) -> str:
        """The ARN of a queue."""
        return self.attributes(url, "QueueArn")["QueueArn"]

    def count(self, url: str, state: str = "") -> int:
        """How many messages a queue has that are visible, or NotVisible, or Delayed."""
        name = f"ApproximateNumberOfMessages{state}"
        return int(self.attributes(url, name)[name])

    def set(self, url: str, **attributes: str) -> None:
        """Changes attributes of a queue."""
        self.client.set_queue_attributes(QueueUrl=url, Attributes=attributes)

    def pair(self, receives: int = 1, suffix: str = "", **attributes: str) -> tuple[str, str]:
        """A new queue, and the one for its dead letters."""
        dead = self._create(self.name(suffix), attributes)
        policy = redrive(self.arn(dead), receives)
        source = self._create(self.name(suffix), {"RedrivePolicy": policy, **attributes})
        return source, dead

    # Messages

    def send(self, url: str, body: str = "x", **options: Any) -> dict[str, Any]:
        """Sends a message; returns the answer."""
        answer: dict[str, Any] = self.client.send_message(QueueUrl=url, MessageBody=body, **options)
        return answer

    def push(self, url: str, body: str, group: str = "g", **options: Any) -> dict[str, Any]:
        """Sends a message to a FIFO queue; without another its body is the deduplication id."""
        options.setdefault("MessageDeduplicationId", body)
        return self.send(url, body, MessageGroupId=group, **options)

    def receive(self, url: str, **options: Any) -> list[dict[str, Any]]:
        """Receives messages."""
        return list(self.client.receive_message(QueueUrl=url, **options).get("Messages") or [])

    def receive_one(self, url: str, **options: Any) -> dict[str, Any]:
        """Receives the one message that there is. Raises Failed if there is none."""
        messages = self.receive(url, **options)
        expect(len(messages), 1, "the number of received messages")
        return messages[0]

    def bodies(self, url: str, **options: Any) -> list[str]:
        """The bodies of up to ten messages."""
        options.setdefault("MaxNumberOfMessages", 10)
        return [message["Body"] for message in self.receive(url, **options)]

    def all_bodies(self, url: str, count: int) -> list[str]:
        """The sorted bodies of so many messages of a standard queue, whose receives give some."""
        found: list[str] = []
        for _ in range(5):
            found += self.bodies(url)
            if len(found) >= count:
                break
        return sorted(found)

    def delete(self, url: str, message: Mapping[str, Any]) -> None:
        """Deletes a received message."""
        self.client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])

    def hide(self, url: str, message: Mapping[str, Any], seconds: int) -> None:
        """Changes the visibility timeout of a received message."""
        self.client.change_message_visibility(
            QueueUrl=url, ReceiptHandle=message["ReceiptHandle"], VisibilityTimeout=seconds
        )

    # Errors

    def refuses(self, call: Callable[..., Any], code: str, text: str = "", **asked: Any) -> str:
        """Raises Failed unless the call is refused with this code; returns the text.

        The code is one of the JSON protocol or of the Query protocol, which mean the same.
        """
        try:
            call(**asked)
        except ClientError as error:
            found = error.response["Error"]
        else:
            raise Failed(f"{_words(call.__name__)} was not refused with {code}")
        what = f"the code of the refused {_words(call.__name__)}"
        expect(plain_code(found.get("Code", "")), plain_code(code), what)
        message = str(found.get("Message", ""))
        if self.texts and text:
            expect(message, text, "the text of the error")
        return message

    # Time

    def wait(self, seconds: float) -> None:
        """Lets so many seconds pass for the server."""
        if self._advance is not None:
            self._advance(seconds)
        else:
            time.sleep(seconds + _MARGIN_S)

    def span(self, seconds: float) -> "TimeSpan":
        """A time that begins now."""
        return TimeSpan(seconds, self._advance)

    def while_waiting(self, call: Callable[[], Any]) -> Any:
        """What a call returns that waits on the server, while time passes there."""
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(call())
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        until_s = time.monotonic() + _READ_S
        while thread.is_alive() and time.monotonic() < until_s:
            thread.join(0.03)
            if thread.is_alive() and self._advance is not None:
                self._advance(0.5)
        thread.join(_READ_S)
        require(result, "the request was not answered")
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    # Requests of our own, for what an SDK hides

    def raw(
        self, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, Any, str]:
        """Status, headers and body of the answer to one request."""
        key = self._keys[0]
        signed = {
            "Authorization": (
                f"AWS4-HMAC-SHA256 Credential={key}/20260101/{self.region}/sqs/aws4_request, "
                f"SignedHeaders=host;x-amz-date, Signature={'0' * 64}"
            ),
            "X-Amz-Date": "20260101T000000Z",
        }
        request = urllib.request.Request(self.endpoint_url + path, content, {**signed, **headers})
        try:
            with urllib.request.urlopen(request, timeout=_READ_S) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read().decode()

    def raw_json(self, action: str, body: Mapping[str, Any] | bytes) -> tuple[int, Any, str]:
        """The same for a request of the JSON protocol."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {
            "Content-Type": "application/x-amz-json-1.0",
            "X-Amz-Target": f"AmazonSQS.{action}",
        }
        return self.raw("/", content, headers)

    def raw_query(self, path: str = "/", **parameters: str) -> tuple[int, Any, str]:
        """The same for a request of the Query protocol."""
        content = urlencode({"Version": "2012-11-05", **parameters}).encode()
        return self.raw(path, content, {"Content-Type": "application/x-www-form-urlencoded"})


class TimeSpan:
    """A time with a known end: `nearly` is shortly before it, `over` at it."""

    def __init__(self, seconds: float, advance: Callable[[float], None] | None) -> None:
        self._seconds = seconds
        self._advance = advance
        self._passed = 0.0
        self._began_s = time.monotonic()

    def nearly(self) -> None:
        """Lets all but a second pass; more is left if the clock cannot be moved."""
        if self._advance is not None:
            self._step(self._seconds - 1)
        else:
            self._sleep_until(self._seconds - max(1.0, min(8.0, self._seconds / 2)))

    def over(self) -> None:
        """Lets the rest pass."""
        if self._advance is not None:
            self._step(self._seconds)
        else:
            self._sleep_until(self._seconds + _MARGIN_S)

    def _step(self, seconds: float) -> None:
        assert self._advance is not None
        self._advance(seconds - self._passed)
        self._passed = seconds

    def _sleep_until(self, seconds: float) -> None:
        time.sleep(max(0.0, self._began_s + seconds - time.monotonic()))


def movable_clock(endpoint_url: str, account: str) -> Callable[[float], None] | None:
    """Moves the clock of a Penstock that was started with `--clock manual`; None for others.

    Without an account it is the clock of the server's own one.
    """
    address = f"{endpoint_url.rstrip('/')}/_penstock/clock"
    of_account = {"account": account} if account else {}
    try:
        asked = f"{address}?{urlencode(of_account)}"
        with urllib.request.urlopen(asked, timeout=5) as answer:
            if json.load(answer).get("mode") != "manual":
                return None
    except (OSError, ValueError, AttributeError):
        return None

    def advance(seconds: float) -> None:
        content = json.dumps({**of_account, "advance": seconds}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, content, headers), timeout=30):
            pass

    return advance


def redrive(target_arn: str, count: object = 1) -> str:
    """A redrive policy."""
    return json.dumps({"deadLetterTargetArn": target_arn, "maxReceiveCount": count})


def entries(count: int, **more: Any) -> list[dict[str, Any]]:
    """Entries of a SendMessageBatch."""
    return [{"Id": f"e{number}", "MessageBody": f"x{number}", **more} for number in range(count)]


def path_of(url: str) -> str:
    """The path of a queue's URL."""
    return urlsplit(url).path


def _words(name: str) -> str:
    """`send_message` as the documentation writes it."""
    return re.sub(r"(?:^|_)(\w)", lambda found: found[1].upper(), name)
