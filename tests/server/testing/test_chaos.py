"""Faults over the SQS API: an account's requests meet those of a seed, others meet none."""

from contextlib import suppress

from botocore.exceptions import ClientError

ONE = "111122223333"


def consume(sqs, url, rounds=200):
    """The bodies that were received and deleted, by a consumer that tries again."""
    handled = []
    for _ in range(rounds):
        try:
            for each in sqs.receive_message(QueueUrl=url, WaitTimeSeconds=20).get("Messages", []):
                handled.append(each["Body"])
                sqs.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
        except ClientError as error:
            if error.response["Error"]["Code"] not in ALLOWED:
                raise
    return handled


ALLOWED = {"RequestThrottled", "ServiceUnavailable", "InvalidParameterValue"}


def begin(server, account="any"):
    sqs = server.client(account)
    url = sqs.create_queue(QueueName="orders", Attributes={"VisibilityTimeout": "30"})["QueueUrl"]
    for number in range(10):
        sqs.send_message(QueueUrl=url, MessageBody=str(number))
    return sqs, url


def test_an_account_meets_the_faults_of_its_seed_and_the_audit_holds(serve_controlled):
    server = serve_controlled(clock="auto")
    kinds = set()
    for seed in range(8):
        sqs, url = begin(server, ONE)
        server.ask("chaos", {"account": ONE, "seed": seed, "max": 25})
        handled = consume(sqs, url, 40)
        assert set(handled) == {str(number) for number in range(10)}
        kinds |= {each["kind"] for each in server.ask(f"chaos?account={ONE}")[1]["faults"]}
        assert server.ask(f"audit?account={ONE}") == (200, {"broken": []})
        server.ask("reset", {"account": ONE})
    assert {"throttled", "lost", "killed", "forgotten", "ran out", "slow", "reordered"} <= kinds


def test_other_accounts_meet_no_faults_and_one_ends_when_it_is_told_to(serve_controlled):
    server = serve_controlled(clock="auto")
    sqs, url = begin(server)
    server.ask("chaos", {"account": ONE, "seed": 3})
    assert consume(sqs, url, 12) == [str(number) for number in range(10)]
    server.ask("chaos", {"account": ONE, "seed": None})
    assert server.ask(f"chaos?account={ONE}")[1] == {"seed": None, "faults": []}


def test_a_server_with_a_seed_makes_its_faults_from_the_first_request(serve_controlled):
    first = serve_controlled(clock="auto", chaos=5)
    second = serve_controlled(clock="auto", chaos=5)
    found = []
    for server in (first, second):
        sqs = server.client()
        url = sqs.create_queue(QueueName="orders")["QueueUrl"]
        for number in range(40):
            with suppress(ClientError):
                sqs.send_message(QueueUrl=url, MessageBody=str(number))
        found.append(server.ask("chaos")[1]["faults"])
    assert found[0] == found[1] != []


def test_a_batch_fails_in_parts_as_amazons_may(serve_controlled):
    server = serve_controlled()
    sqs, url = begin(server)
    entries = [{"Id": str(number), "MessageBody": "a"} for number in range(10)]
    for seed in range(300):
        server.ask("chaos", {"seed": seed})
        try:
            answer = sqs.send_message_batch(QueueUrl=url, Entries=entries)
        except ClientError:
            continue
        failed = answer.get("Failed", [])
        if failed:
            assert {each["Code"] for each in failed} == {"RequestThrottled"}
            assert len(failed) + len(answer.get("Successful", [])) == 10
            return
    raise AssertionError("no seed refused some of the entries")
