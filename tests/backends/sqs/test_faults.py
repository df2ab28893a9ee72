"""The SQS adapter with a failing network or endpoint."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

import penstock
from penstock.errors import (
    BackendLost,
    BatchRefused,
    Overloaded,
    PenstockError,
    RequestError,
    UnavailableError,
)
from penstock.service import PushReply
from tests.ports import lasting_port, refusing_port
from tests.server.sqs.conftest import serve

KEYS = ("AKIDSHOP", "a-long-enough-secret")


@pytest.fixture(scope="module")
def server():
    with serve("--store", "memory:") as running:
        yield running


class FaultyProxy(ThreadingHTTPServer):
    """A proxy between a client and the endpoint that fails as the test says.

    `fault` gets each action and its body, and returns what to do: None to forward the request and
    its answer, "lose" to forward the request and drop its answer, "hang" not to answer, or a status
    and a text to answer instead of the endpoint.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, endpoint):
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.upstream = urlsplit(endpoint).netloc
        self.fault = lambda action, body: None
        self.released = threading.Event()
        self.asked = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """Ignores connections that the client has closed."""

    def end(self):
        self.released.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        action = self.headers["X-Amz-Target"].rpartition(".")[2]
        self.server.asked.append(action)
        fault = self.server.fault(action, body)
        if fault == "hang":
            self.server.released.wait()
            self.close_connection = True
        elif fault == "lose":
            self._forward(body)
            self.close_connection = True
        elif fault is not None:
            status, text = fault
            self._answer(status, "application/x-amz-json-1.0", text.encode())
        else:
            answer, content = self._forward(body)
            self._answer(answer.status, answer.headers["Content-Type"], content, answer.headers)

    def _forward(self, body):
        link = http.client.HTTPConnection(self.server.upstream, timeout=30)
        link.request("POST", self.path, body, dict(self.headers))
        answer = link.getresponse()
        content = answer.read()
        link.close()
        return answer, content

    def _answer(self, status, kind, content, headers=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if headers and "x-amzn-query-error" in headers:
            self.send_header("x-amzn-query-error", headers["x-amzn-query-error"])
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Prints nothing."""


@pytest.fixture
def proxy(server):
    proxy = FaultyProxy(server.url)
    yield proxy
    proxy.end()


@pytest.fixture
def queues(proxy):
    with penstock.connect(f"sqs://us-east-1?endpoint={proxy.url}&timeout=15") as queues:
        yield queues


def once(action, how):
    """A fault of the first request of this action, and of no other."""
    hows = iter([how])

    def fault(asked, body):
        return next(hows, None) if asked == action else None

    return fault


def test_a_push_whose_answer_is_lost_gives_two_messages_on_a_standard_queue_and_one_on_fifo(
    queues, proxy
):
    queues.create("lossy")
    queues.create("lossy.fifo")
    for queue, copies in (("lossy", 2), ("lossy.fifo", 1)):
        proxy.fault = once("SendMessage", "lose")
        queues.push(queue, "a", group="g")
        assert queues.stats(queue).visible == copies


def test_a_pull_whose_answer_is_lost_gets_the_same_messages_of_a_fifo_queue(queues, proxy):
    queues.create("again.fifo", visibility_timeout=600)
    queues.push("again.fifo", "a", group="g")
    proxy.fault = once("ReceiveMessage", "lose")
    claim = queues.pull("again.fifo")
    assert (claim.body, claim.receives) == (b"a", 1)
    assert proxy.asked.count("ReceiveMessage") == 2
    assert queues.delete(claim) is True


def test_an_endpoint_that_does_not_answer_is_an_error_after_the_timeout(proxy):
    with penstock.connect(f"sqs://us-east-1?endpoint={proxy.url}&timeout=1") as queues:
        proxy.fault = lambda action, body: "hang"
        began_s = time.monotonic()
        with pytest.raises(BackendLost, match="no answer within 1 s"):
            queues.list()
        assert time.monotonic() - began_s < 25


def test_an_endpoint_that_cannot_be_reached_is_an_error_of_one_sentence():
    with refusing_port() as port:
        url = f"http://127.0.0.1:{port}"
        with (
            penstock.connect(f"sqs://us-east-1?endpoint={url}&timeout=10") as queues,
            pytest.raises(BackendLost, match=url) as caught,
        ):
            queues.list()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((503, ""), Overloaded),
        ((500, '{"__type": "InternalFailure", "message": "oh"}'), BackendLost),
        ((400, '{"__type": "ThrottlingException", "message": "slow"}'), Overloaded),
        ((403, '{"__type": "AccessDeniedException", "message": "no"}'), RequestError),
        ((200, "<html>hello</html>"), BackendLost),
        ((404, "<html>not found</html>"), PenstockError),
        ((200, '{"QueueUrl": "http://127.0.0.1/q"}'), BackendLost),
        ((200, "[]"), PenstockError),
    ],
    ids=str,
)
def test_an_unexpected_answer_of_an_endpoint_is_a_penstock_error_of_one_line(
    queues, proxy, answer, kind
):
    proxy.fault = lambda action, body: answer
    with pytest.raises(kind) as caught:
        queues.push("orders", "a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("stats", '{"Attributes": {"ApproximateNumberOfMessages": "few"}}'),
        ("describe", '{"Attributes": {"VisibilityTimeout": "soon"}}'),
        ("describe", '{"Attributes": ["VisibilityTimeout"]}'),
        ("pull", '{"Messages": [{"MessageId": "1"}]}'),
        ("pull", '{"Messages": [{"Body": 7, "MessageId": "1", "ReceiptHandle": "r"}]}'),
    ],
)
def test_a_malformed_answer_is_reported_as_the_endpoints_fault(queues, proxy, verb, answer):
    queues.create("malformed")
    proxy.fault = lambda action, body: (200, answer)
    with pytest.raises(BackendLost, match="the answer is not that of an SQS endpoint"):
        getattr(queues, verb)("malformed")


def test_a_request_that_was_throttled_is_repeated(queues, proxy):
    queues.create("busy")
    slow = (400, '{"__type": "com.amazonaws.sqs#RequestThrottled", "message": "slow"}')
    proxy.fault = once("SendMessage", slow)
    queues.push("busy", "a")
    assert queues.stats("busy").visible == 1
    assert queues.stats("busy").stored_bytes is None


def test_a_batch_of_which_a_part_fails_has_a_result_for_each_item(queues, proxy):
    queues.create("cut")
    sent = []

    def fault(action, body):
        if action == "SendMessageBatch":
            sent.append(body)
            return None if len(sent) == 1 else (503, "")
        return None

    proxy.fault = fault
    with pytest.raises(BatchRefused) as refused:
        queues.push_many("cut", map(str, range(25)))
    replies = refused.value.results
    assert [type(reply) for reply in replies[:10]] == [PushReply] * 10
    assert all(isinstance(reply, UnavailableError) for reply in replies[10:])
    assert queues.stats("cut").visible == 10


def test_an_endpoint_with_a_lower_limit_is_sent_smaller_requests(queues, proxy):
    queues.create("small")
    too_long = {"__type": "com.amazonaws.sqs#BatchRequestTooLong", "message": "262144 bytes"}

    def fault(action, body):
        if action == "SendMessageBatch" and len(body) > 262_144:
            return (400, json.dumps(too_long))
        return None

    proxy.fault = fault
    replies = queues.push_many("small", ["x" * 60_000] * 10)
    assert [type(reply) for reply in replies] == [PushReply] * 10
    assert queues.stats("small").visible == 10


def test_claims_are_valid_after_the_endpoint_was_killed_and_started_again(tmp_path):
    store = ("--data", str(tmp_path / "store"), "--port", str(lasting_port()))
    with serve(*store) as first:
        queues = penstock.connect(f"sqs://us-east-1?endpoint={first.url}&timeout=5")
        queues.create("orders", visibility_timeout=600)
        queues.push_many("orders", ["a", "b"])
        (claim,) = queues.pull_many("orders", 1)
        first.stop(signal.SIGKILL)
        with pytest.raises(UnavailableError):
            queues.push("orders", "c")
    with queues, serve(*store):
        assert queues.delete(claim) is True
        assert [each.body for each in queues.pull_many("orders")] == [b"b"]
        assert queues.stats("orders").messages == 1


def test_keys_are_taken_from_the_environment_and_checked(monkeypatch):
    with serve("--store", "memory:", "--key", ":".join(KEYS)) as server:
        url = f"sqs://us-east-1?endpoint={server.url}"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
        with penstock.connect(url) as queues:
            queues.create("orders")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        with (
            penstock.connect(url) as queues,
            pytest.raises(RequestError, match="credentials: Amazon SQS denies this request"),
        ):
            queues.push("orders", "a")


def test_without_credentials_no_request_is_sent_to_amazon(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(RequestError, match="credentials: none were found; set AWS_ACCESS_KEY_ID"):
        penstock.connect("sqs://eu-west-1")
    with pytest.raises(RequestError, match="no region is named"):
        penstock.connect("sqs:")


def test_without_the_extra_one_sentence_says_what_to_install():
    program = (
        "import sys; sys.modules['aiobotocore'] = None; "
        "from penstock.cli import main; sys.exit(main(['list', '--url', 'sqs://eu-west-1']))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 3
    assert ran.stderr == (
        "penstock: url: sqs: needs the package 'aiobotocore'; "
        "install it with pip install 'PATH-OF-THE-CLONE[sqs]'\n"
    )
