"""The event source mapping, each rule with the sentence of AWS's documentation that it is from."""

import json
import os
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    process_partial_response,
)
from aws_lambda_powertools.utilities.data_classes import SQSEvent

import penstock
from penstock.errors import InvalidField, QueueNotFound, UnavailableError
from penstock.functions.filters import FilterCriteria
from penstock.functions.invoke import FunctionError, HttpFunction, PythonFunction
from penstock.functions.mapping import EventSourceMapping, MappingOptions
from penstock.testing import chaos


class Function:
    """A function in this process: what it was given, and what it answers or raises."""

    timeout_s = 3.0

    def __init__(self, answer=lambda event: None):
        self.events = []
        self._answer = answer

    def invoke(self, event):
        # As over the wire.
        self.events.append(json.loads(json.dumps(event)))
        return self._answer(event)

    def close(self):
        pass

    @property
    def bodies(self):
        return [[each["body"] for each in event["Records"]] for event in self.events]


def fails(event):
    raise FunctionError("it raised")


@pytest.fixture
def queues(penstock_queues):
    penstock_queues.create("orders", visibility_timeout=30)
    return penstock_queues


def mapping(queues, function, queue="orders", **options):
    return EventSourceMapping(queues, queue, function, MappingOptions(**options))


def test_the_event_is_that_of_lambda(queues):
    queues.push("orders", "hello", attributes={"kind": "test", "raw": b"\x00\xff"})
    function = Function()
    mapping(queues, function).poll()
    (entry,) = function.events[0]["Records"]
    assert set(entry) == {
        *("messageId", "receiptHandle", "body", "attributes", "messageAttributes", "md5OfBody"),
        *("eventSource", "eventSourceARN", "awsRegion"),
    }
    assert entry["md5OfBody"] == "5d41402abc4b2a76b9719d911017c592"
    assert entry["eventSource"] == "aws:sqs"
    assert entry["eventSourceARN"] == "arn:aws:sqs:us-east-1:000000000000:orders"
    assert entry["attributes"]["ApproximateReceiveCount"] == "1"
    assert entry["messageAttributes"]["raw"] == {
        "binaryValue": "AP8=",
        "stringListValues": [],
        "binaryListValues": [],
        "dataType": "Binary",
    }
    (parsed,) = SQSEvent(function.events[0]).records
    assert (parsed.body, parsed.attributes.sent_timestamp) == (
        "hello",
        entry["attributes"]["SentTimestamp"],
    )
    kind = parsed.message_attributes["kind"]
    assert kind is not None
    assert kind.string_value == "test"


def test_the_event_of_a_fifo_queue_has_group_sequence_and_dedup_id(queues):
    queues.create("orders.fifo", visibility_timeout=30)
    queues.push("orders.fifo", "a", group="g", dedup_id="1")
    function = Function()
    mapping(queues, function, "orders.fifo").poll()
    attributes = function.events[0]["Records"][0]["attributes"]
    assert attributes["MessageGroupId"] == "g"
    assert attributes["MessageDeduplicationId"] == "1"
    assert len(attributes["SequenceNumber"]) == 20


def test_a_batch_that_was_processed_is_deleted(queues):
    # "When your function successfully processes a batch, Lambda deletes its messages."
    queues.push_many("orders", ["a", "b"])
    batch = mapping(queues, Function()).poll()
    assert (batch.messages, batch.failed) == (2, 0)
    assert queues.stats("orders").messages == 0


def test_a_batch_whose_function_raises_becomes_visible_after_the_visibility_timeout(queues):
    # "If an invocation fails ... messages become visible in the queue again."
    queues.push_many("orders", ["a", "b"])
    batch = mapping(queues, Function(fails)).poll()
    assert (batch.failed, batch.error) == (2, "it raised")
    assert queues.stats("orders").in_flight == 2
    queues.advance(timedelta(seconds=30))
    assert queues.stats("orders").visible == 2


def test_with_reported_failures_only_the_failed_messages_come_back(queues):
    # "ReportBatchItemFailures ... only the failed messages become visible again."
    queues.push_many("orders", ["a", "b", "c"])

    def answer(event):
        failed = [each["messageId"] for each in event["Records"] if each["body"] == "b"]
        return {"batchItemFailures": [{"itemIdentifier": each} for each in failed]}

    function = Function(answer)
    mapping(queues, function, reports_failures=True).poll()
    queues.advance(timedelta(seconds=30))
    assert [each.body for each in queues.peek("orders", 10)] == [b"b"]


def test_without_the_setting_a_report_of_failures_has_no_effect(queues):
    queues.push("orders", "a")
    report = {"batchItemFailures": [{"itemIdentifier": ""}]}
    mapping(queues, Function(lambda event: report)).poll()
    assert queues.stats("orders").messages == 0


def test_powertools_batch_processor_reports_what_failed_unchanged(queues):
    processor = BatchProcessor(event_type=EventType.SQS)

    def handle(record):
        if record.body == "bad":
            raise ValueError(record.body)

    def handler(event):
        return process_partial_response(
            event=event, record_handler=handle, processor=processor, context=None
        )

    queues.push_many("orders", ["good", "bad"])
    batch = mapping(queues, Function(handler), reports_failures=True).poll()
    assert batch.failed == 1
    queues.advance(timedelta(seconds=30))
    assert [each.body for each in queues.peek("orders", 10)] == [b"bad"]


def test_a_message_that_keeps_failing_becomes_a_dead_letter(queues):
    queues.create("work", visibility_timeout=30, dead_letter="dead", max_receives=3)
    queues.push("work", "poison")
    working = mapping(queues, Function(fails), "work")
    for _ in range(3):
        assert working.poll() is not None
        queues.advance(timedelta(seconds=30))
    assert queues.stats("dead").messages == 1


def test_messages_that_no_filter_matches_are_deleted_and_never_given(queues):
    # "If a message doesn't satisfy your filter criteria, Lambda automatically removes it."
    queues.push_many("orders", ['{"kind": "order"}', '{"kind": "test"}', "plain"])
    function = Function()
    criteria = FilterCriteria([{"body": {"kind": ["order"]}}])
    batch = mapping(queues, function, filters=criteria).poll()
    assert function.bodies == [['{"kind": "order"}']]
    assert (batch.filtered, queues.stats("orders").messages) == (2, 0)


def test_a_batch_of_which_nothing_is_left_invokes_nothing(queues):
    queues.push("orders", "plain")
    function = Function()
    mapping(queues, function, filters=FilterCriteria([{"body": {"a": [1]}}])).poll()
    assert (function.events, queues.stats("orders").messages) == ([], 0)


def test_a_batch_is_no_larger_than_its_size(queues):
    queues.push_many("orders", [str(number) for number in range(7)])
    function = Function()
    working = mapping(queues, function, batch_size=3)
    while working.poll() is not None:
        pass
    assert [len(each) for each in function.bodies] == [3, 3, 1]


@pytest.mark.penstock(clock="auto")
def test_a_window_gathers_messages_that_come_within_it(queues):
    # "Lambda polls ... for up to the batch window, until the window expires".
    queues.push("orders", "now")
    queues.push("orders", "soon", delay=4)
    queues.push("orders", "late", delay=20)
    function = Function()
    mapping(queues, function, window_s=5).poll()
    assert function.bodies == [["now", "soon"]]


@pytest.mark.penstock(clock="auto")
@pytest.mark.penstock(clock="auto")
def test_a_window_ends_before_the_claims_of_its_batch_do(queues):
    queues.push("orders", "a")
    function = Function()
    began = queues.now
    batch = mapping(queues, function, window_s=300).poll()
    assert (batch.messages, function.bodies) == (1, [["a"]])
    # The function has its timeout left.
    assert queues.now - began == timedelta(seconds=30 - function.timeout_s)
    assert queues.stats("orders").messages == 0


def test_a_batch_above_ten_messages_is_gathered_within_its_window(queues):
    queues.push_many("orders", [str(number) for number in range(25)])
    function = Function()
    mapping(queues, function, batch_size=20, window_s=1).poll()
    assert [len(each) for each in function.bodies] == [20]


def test_messages_of_a_fifo_group_are_given_in_order_and_come_again_in_order(queues):
    queues.create("orders.fifo", visibility_timeout=30)
    for number in range(4):
        queues.push("orders.fifo", str(number), group="g", dedup_id=str(number))

    def answer(event):
        failed = [each["messageId"] for each in event["Records"] if each["body"] == "1"]
        return {"batchItemFailures": [{"itemIdentifier": each} for each in failed]}

    function = Function(answer)
    working = mapping(queues, function, "orders.fifo", reports_failures=True)
    working.poll()
    queues.advance(timedelta(seconds=30))
    working.poll()
    assert function.bodies == [["0", "1", "2", "3"], ["1", "2", "3"]]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 0}, "batch-size: 0 is outside 1 to 10000"),
        ({"batch_size": 11}, "a batch size above 10 needs a window of 1 s or more"),
        ({"window_s": 301}, "window: 301 s is outside 0 to 300 s"),
        ({"concurrency": 0}, "concurrency: 0 is outside 1 to 1000"),
        ({"queue": "f.fifo", "batch_size": 11}, "outside 1 to 10 for a FIFO queue"),
        ({"queue": "f.fifo", "window_s": 1}, "a FIFO queue has none"),
    ],
)
def test_options_that_lambda_would_refuse_are_refused(queues, options, told):
    queues.create("f.fifo")
    with pytest.raises(InvalidField) as refused:
        mapping(queues, Function(), **options)
    assert told in str(refused.value)


def test_a_timeout_above_the_queues_visibility_timeout_is_refused(queues):
    # "Queue visibility timeout: 2 seconds is less than Function timeout: 3 seconds"
    queues.create("short", visibility_timeout=2)
    with pytest.raises(InvalidField, match="more than the queue's visibility timeout"):
        mapping(queues, Function(), "short")
    with pytest.raises(QueueNotFound):
        mapping(queues, Function(), "none")


def test_no_more_invocations_run_at_a_time_than_are_allowed(queues):
    # "Maximum concurrency ... the number of concurrent instances of the function".
    queues.push_many("orders", [str(number) for number in range(12)])
    running, most, all_three = 0, 0, threading.Event()
    lock = threading.Lock()

    def answer(event):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 3:
                all_three.set()
        all_three.wait(60)
        with lock:
            running -= 1
        if not queues.stats("orders").visible:
            working.end()

    working = mapping(queues, Function(answer), batch_size=1, concurrency=3)
    working.run()
    assert most == 3


def test_a_queue_that_is_deleted_ends_the_mapping(queues):
    queues.push("orders", "a")
    working = mapping(queues, Function(lambda event: queues.remove("orders")))
    with pytest.raises(QueueNotFound):
        working.run()


def test_an_error_that_ends_a_thread_ends_the_mapping_and_is_raised(queues):
    queues.push("orders", "a")

    def told(batch):
        raise BrokenPipeError

    function = Function()
    working = EventSourceMapping(
        queues, "orders", function, MappingOptions(concurrency=2), told=told
    )
    with pytest.raises(BrokenPipeError):
        working.run()
    assert function.bodies == [["a"]]


def test_a_mapping_follows_the_clock_and_the_faults_of_an_account_over_the_sqs_api(
    penstock_sqs, penstock_server, penstock_clock, penstock_endpoint
):
    url = penstock_sqs.create_queue(QueueName="orders")["QueueUrl"]
    penstock_sqs.send_message(QueueUrl=url, MessageBody="a")
    with penstock.connect(f"sqs://us-east-1?endpoint={penstock_endpoint}") as there:
        assert mapping(there, Function(fails)).poll().failed == 1
        function = Function()
        working = mapping(there, function)
        assert working.poll() is None
        penstock_clock.advance(seconds=30)
        penstock_server.done("chaos", {"seed": 5})
        for _ in range(20):
            with suppress(UnavailableError):
                working.poll()
            penstock_clock.advance(seconds=30)
        assert function.bodies[0] == ["a"]
        assert penstock_server.broken() == []


@chaos(seeds=100)
def test_a_function_that_remembers_its_work_holds_under_chaos(chaos):
    chaos.calm.create("orders", visibility_timeout=30)
    chaos.calm.push_many("orders", [str(number) for number in range(6)])
    done: set[str] = set()

    def answer(event):
        done.update(each["body"] for each in event["Records"])

    working = mapping(chaos.queues, Function(answer), batch_size=3)
    chaos.run(working.poll)
    assert done == {str(number) for number in range(6)}


HANDLER = """
import os, time

def handle(event, context):
    print("invoked", flush=True)
    body = event["Records"][0]["body"]
    if body == "raise":
        raise ValueError("no")
    if body == "slow":
        time.sleep(60)
    if body == "die":
        os._exit(3)
    if body == "unserializable":
        return object()
    assert 0 < context.get_remaining_time_in_millis() <= 20_000
    return {"pid": os.getpid(), "name": context.function_name, "version": VERSION}
"""


@pytest.fixture
def python_function(tmp_path):
    source = tmp_path / "shop.py"
    source.write_text(f"VERSION = 1\n{HANDLER}")
    function = PythonFunction("shop:handle", 20, directory=tmp_path)
    yield function
    function.close()


def event_of(body):
    return {"Records": [{"body": body}]}


def test_a_python_handler_is_kept_for_the_next_invocation(python_function):
    first = python_function.invoke(event_of("a"))
    assert (first["name"], first["version"]) == ("shop", 1)
    with pytest.raises(FunctionError, match="ValueError: no"):
        python_function.invoke(event_of("raise"))
    with pytest.raises(FunctionError, match="not JSON serializable"):
        python_function.invoke(event_of("unserializable"))
    assert python_function.invoke(event_of("a")) == first


def test_a_python_handler_is_killed_at_its_deadline_or_replaced_when_it_dies(python_function):
    first = python_function.invoke(event_of("a"))
    python_function.timeout_s = 0.2
    with pytest.raises(FunctionError, match=r"timed out after 0\.2 s"):
        python_function.invoke(event_of("slow"))
    assert not os.path.exists(f"/proc/{first['pid']}")
    python_function.timeout_s = 20
    with pytest.raises(FunctionError, match="its process ended with status 3"):
        python_function.invoke(event_of("die"))
    assert python_function.invoke(event_of("a"))["version"] == 1


def test_a_python_handler_is_loaded_again_when_a_file_has_changed(python_function, tmp_path):
    source = tmp_path / "shop.py"
    assert python_function.invoke(event_of("a"))["version"] == 1
    source.write_text(f"VERSION = 2\n{HANDLER}")
    os.utime(source, (2_000_000_000, 2_000_000_000))
    assert python_function.invoke(event_of("a"))["version"] == 2


@pytest.mark.parametrize(
    "name", ["shop:none", "none:handle", "shop:VERSION", "", ":handle", "shop:"]
)
def test_a_handler_that_cannot_be_loaded_is_refused(tmp_path, name):
    (tmp_path / "shop.py").write_text("VERSION = 1\n")
    with pytest.raises(InvalidField, match="cannot load"):
        PythonFunction(name, 3, directory=tmp_path)


@pytest.fixture
def address():
    class LanguageHandler(BaseHTTPRequestHandler):
        def do_POST(self):
            event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = event["Records"][0]["body"]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), LanguageHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_function_of_another_language_answers_over_http(address):
    function = HttpFunction(address, 20)
    assert function.invoke(event_of([200, '{"batchItemFailures": []}'])) == {
        "batchItemFailures": []
    }
    assert function.invoke(event_of([200, ""])) is None
    for body, told in [([500, ""], "answered 500"), ([200, "ok"], "no JSON")]:
        with pytest.raises(FunctionError, match=told):
            function.invoke(event_of(body))
    with pytest.raises(FunctionError, match="refused"):
        HttpFunction("http://127.0.0.1:1/", 3).invoke(event_of([200, ""]))


def test_what_speaks_no_http_is_a_failure_of_the_function():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"garbage\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        function = HttpFunction(f"http://127.0.0.1:{listener.getsockname()[1]}/", 20)
        with pytest.raises(FunctionError, match="garbage"):
            function.invoke(event_of([200, ""]))
        thread.join()


@pytest.mark.parametrize("url", ["http://", "http://[x", "http://a b/", "https:///path"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(InvalidField, match="use http://HOST:PORT/PATH"):
        HttpFunction(url, 3)
