"""Receives that wait, with every store: answered, ended by the server, ended by the client."""

import socket
import threading

import pytest

from penstock.service import ConfigureQueue, Stats
from tests.server.conftest import until
from tests.server.sqs.asking import bodies, make, receive, send


@pytest.fixture
def waiting(local):
    """How many receives wait on a queue, as the store counts them."""
    return lambda: local.execute(Stats("q")).waiting_pulls


def in_thread(function):
    """Run it in a thread; returns the thread, and the list that will have its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def test_a_waiting_receive_gets_the_next_message(local, waiting):
    client = local.client()
    url = make(client)
    thread, results = in_thread(lambda: bodies(local.client(), url, WaitTimeSeconds=20))
    until(lambda: waiting() == 1)
    send(client, url, "x")
    thread.join(60)
    assert results == [["x"]]


def test_a_waiting_receive_gets_an_empty_answer_when_its_wait_time_ends(local, waiting):
    url = make(local.client())
    thread, results = in_thread(lambda: bodies(local.client(), url, WaitTimeSeconds=20))
    until(lambda: waiting() == 1)
    local.clock.advance(seconds=21)
    thread.join(60)
    assert results == [[]]


def test_a_waiting_receive_gets_an_empty_answer_when_the_server_stops(local, waiting):
    url = make(local.client())
    thread, results = in_thread(lambda: bodies(local.client(), url, WaitTimeSeconds=20))
    until(lambda: waiting() == 1)
    local.call(local.running._endpoint.end_waits)
    thread.join(60)
    assert results == [[]]
    until(lambda: waiting() == 0)


def test_a_waiting_receive_gets_an_empty_answer_when_its_queue_is_deleted(local, waiting):
    client = local.client()
    url = make(client)
    thread, results = in_thread(lambda: bodies(local.client(), url, WaitTimeSeconds=20))
    until(lambda: waiting() == 1)
    client.delete_queue(QueueUrl=url)
    thread.join(60)
    assert results == [[]]


def test_a_client_that_disconnects_leaves_no_wait_and_no_claim(local, waiting):
    client = local.client()
    url = make(client)
    body = b'{"QueueUrl": "q", "WaitTimeSeconds": 20}'
    request = (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
        b"Content-Type: application/x-amz-json-1.0\r\nContent-Length: %d\r\n\r\n%s"
    )
    with socket.create_connection(("127.0.0.1", local.running.port)) as link:
        link.sendall(request % (len(body), body))
        until(lambda: waiting() == 1)
    until(lambda: waiting() == 0)
    send(client, url, "x")
    assert bodies(client, url) == ["x"]


def test_a_receive_with_a_wait_time_waits_for_room_below_the_in_flight_limit(local, waiting):
    client = local.client()
    url = make(client)
    local.execute(ConfigureQueue("q", {"in_flight_max": 1}))
    send(client, url, "1")
    send(client, url, "2")
    (first,) = receive(client, url)
    thread, results = in_thread(lambda: bodies(local.client(), url, WaitTimeSeconds=20))
    until(lambda: waiting() == 1)
    client.delete_message(QueueUrl=url, ReceiptHandle=first["ReceiptHandle"])
    thread.join(60)
    assert results == [["2"]]
