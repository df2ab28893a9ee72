"""The benchmark of SQS servers gives all the same load; a server that loses a message voids it."""

import json
import socket
import threading
from hashlib import md5

import pytest

sqs = pytest.importorskip("benchmarks.sqs", reason="the source archive has no benchmarks")
from benchmarks import harness, sqs_bare, sqs_load, sqs_servers  # noqa: E402

SEND, RECEIVE = sqs.Work("send", 1), sqs.Work("receive", 10)
KIND = sqs_servers.KINDS[sqs_servers.MEMORY]
WELL = {
    **dict.fromkeys(("broken", "status", "doubled", "refused"), 0),
    "requests": 100,
    "took_us": 500_000,
    "p50_us": 1_500,
    "p99_us": 4_000,
    # 60 receives and 40 deletes were answered; 15 more deletes were sent.
    "receives": 60,
    "received": 600,
    "asked": 550,
}
FULL = sqs_servers.Depth(2_000, 2_000)


def judge(work, before, after, kind=KIND, **changes):
    return sqs_load.checked_cell(kind, work, 32, WELL | changes, before, after)


@pytest.mark.parametrize("more", [100, 132])
def test_sends_are_accepted_if_the_queue_grew_by_as_many(more):
    cell = judge(SEND, FULL, sqs_servers.Depth(2_000 + more, 2_000 + more))
    assert cell == sqs_load.Cell(200, 1.5, 4)


@pytest.mark.parametrize("more", [99, 133, 0])
def test_a_send_that_was_lost_or_stored_twice_voids_the_run(more):
    with pytest.raises(harness.Void, match="100 were answered for"):
        judge(SEND, FULL, sqs_servers.Depth(2_000 + more, 2_000 + more))


def test_receives_and_deletes_are_accepted_if_the_queue_shrank_by_as_many():
    cell = judge(RECEIVE, FULL, sqs_servers.Depth(1_400, 1_500))
    assert cell.per_s == 800


@pytest.mark.parametrize(("visible", "total"), [(1_401, 1_500), (1_079, 1_500), (1_400, 1_601)])
def test_a_queue_whose_depth_does_not_match_the_answers_voids_the_run(visible, total):
    with pytest.raises(harness.Void):
        judge(RECEIVE, FULL, sqs_servers.Depth(visible, total))


@pytest.mark.parametrize("fault", ["broken", "status", "doubled", "refused"])
def test_an_error_or_a_message_received_twice_voids_the_run(fault):
    with pytest.raises(harness.Void, match=fault):
        judge(SEND, FULL, sqs_servers.Depth(2_100, 2_100), **{fault: 1})


def test_a_run_whose_queue_became_empty_is_refused():
    with pytest.raises(sqs_load.QueueEmptied):
        judge(RECEIVE, sqs_servers.Depth(600, 600), sqs_servers.Depth(0, 200))


def test_a_run_without_an_answer_counts_as_one_request():
    none = {"requests": 0, "receives": 0, "received": 0, "asked": 0}
    assert judge(RECEIVE, FULL, FULL, **none).per_s == 2


def test_the_bare_loop_answers_like_an_sqs_server():
    answers = sqs_bare.BareAnswers()

    def ask(action, **parameters):
        body = json.dumps({"QueueUrl": "http://localhost/0/q", **parameters}).encode()
        response = answers.answer(f"AmazonSQS.{action}".encode(), body)
        return json.loads(response.partition(b"\r\n\r\n")[2])

    assert ask("SendMessage", MessageBody="a")["MD5OfMessageBody"] == md5(b"a").hexdigest()
    entries = [{"Id": str(n), "MessageBody": "a"} for n in range(10)]
    assert len(ask("SendMessageBatch", Entries=entries)["Successful"]) == 10
    received = ask("ReceiveMessage", MaxNumberOfMessages=10)["Messages"]
    assert len({message["MessageId"] for message in received}) == 10
    assert {message["MD5OfBody"] for message in received} == {
        md5(sqs_bare.BODY.encode()).hexdigest()
    }


def test_a_server_that_cannot_be_installed_is_listed_as_absent_with_the_reason(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(harness, "PEERS", tmp_path / "peers")
    with sqs.ExitStack() as stack:
        contestants, absent = sqs.contest(stack, tmp_path, [sqs.ServerRow("fauxqs")])
    assert contestants == {}
    assert absent == {"fauxqs": "cannot install fauxqs: there is no npm"}


def test_every_target_is_computed_and_an_absent_peer_is_replaced_by_the_fastest_present():
    rows = [*map(sqs.ServerRow, sqs_servers.KINDS), sqs.ServerRow(sqs_servers.MEMORY, sqs.BACKLOG)]
    rows.remove(sqs.ServerRow("ElasticMQ"))
    rates = dict.fromkeys(rows, 1.0) | {sqs.ServerRow("ministack"): 2.0}
    cells = {row: [sqs_load.Cell(rate, 1, 1)] for row, rate in rates.items()}
    figures = {sqs.ServerRace(work, sqs.MANY): cells for work in sqs.WORKS}
    found = {target.name: target.value for target in sqs.targets(figures)}
    assert len(found) == 16
    assert found["SendMessage: memory / ministack"] == 0.5
    assert found["SendMessage: penstock, memory, 1,000,000 waiting / empty"] == 1


@pytest.mark.service("wrk")
@pytest.mark.parametrize("name", [sqs_servers.MEMORY, sqs_servers.BARE])
def test_a_second_of_each_kind_of_work_is_measured_and_loses_nothing(tmp_path, name):
    with sqs.ExitStack() as stack:
        contestants, _ = sqs.contest(stack, tmp_path, [sqs.ServerRow(name)])
        (contestant,) = contestants.values()
        for work in (sqs.Work("send", 10), sqs.Work("receive", 1)):
            cell = contestant.run(sqs.ServerRace(work, 2), 1)
            assert cell.per_s > 0
            assert 0 < cell.p50_ms <= cell.p99_ms


def test_after_a_server_closed_an_idle_connection_a_request_opens_a_new_one():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    def serve(listener, closing):
        # Each connection is answered once and then closed, without `Connection: close`.
        for _ in range(3):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)
            closing.release()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        closing = threading.Semaphore(0)
        thread = threading.Thread(target=serve, args=(listener, closing))
        thread.start()
        link = sqs_servers.ServerLink(listener.getsockname()[1])
        for _ in range(3):
            assert link.post("/", "x", {}) == (200, "ok")
            closing.acquire(timeout=30)
        link.close()
        thread.join(30)
    with pytest.raises(OSError, match="refused"):
        link.post("/", "", {})
