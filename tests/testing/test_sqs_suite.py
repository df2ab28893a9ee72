"""The published checks of Amazon SQS's rules: what they say of a server that keeps them, or not."""

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.testing import server as penstock_account
from penstock.testing.sqs import CHECKS, CheckedServer, run_checks

NAME = "the_visibility_timeout_is_from_0_to_43200_seconds"


def program(*arguments):
    command = [sys.executable, "-m", "penstock.testing.sqs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_check_names_a_rule_and_belongs_to_a_feature():
    for each in CHECKS.values():
        assert each.rule.endswith("."), each.name
        assert each.feature
        assert each.wait_s >= 0


def test_the_program_prints_counts_and_writes_every_result(tmp_path):
    out = tmp_path / "found.json"
    with penstock_account() as account:
        done = program(
            "--endpoint-url",
            account.url,
            *("--access-key", account.account, "--only", "five minutes", "--json", str(out)),
        )
    # Five minutes of the account's clock; one of the two rules is not kept.
    assert "FIFO deduplication: 2 of 2" in done.stdout
    assert done.stdout.endswith("2 passed, 2 failed, 0 not run\n")
    assert done.returncode == 1
    found = {(each["name"], each["protocol"]): each for each in json.loads(out.read_text())}
    assert len(found) == 4
    failed = found["an_attempt_id_is_kept_for_five_minutes", "json"]
    assert failed["reason"] == "what is received later is ['a'], not ['b']"


def test_words_of_no_check_are_refused():
    done = program("--endpoint-url", "http://127.0.0.1:1", "--only", "no such rule")
    assert (done.returncode, "no check has the words" in done.stderr) == (2, True)


def test_a_server_that_does_not_answer_fails_with_the_reason():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        (result,) = run_checks(
            lambda protocol: CheckedServer(url, protocol), [CHECKS[NAME]], protocols=("json",)
        )
    assert (result.status, "no answer that can be read" in result.reason) == ("failed", True)


class Careless(BaseHTTPRequestHandler):
    """Answers every request of the JSON protocol with success."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"QueueUrl": f"http://{self.headers['Host']}/0/q"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *arguments):
        pass


@pytest.fixture
def careless():
    with ThreadingHTTPServer(("127.0.0.1", 0), Careless) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()
        thread.join()


def test_a_server_that_agrees_to_everything_passes_nothing_but_what_is_to_be_accepted(careless):
    checks = [
        each for each in CHECKS.values() if not each.wait_s and each.feature != "message move tasks"
    ]
    results = run_checks(
        lambda protocol: CheckedServer(careless, protocol), checks, protocols=("json",), threads=4
    )
    assert {each.name for each in results if each.status == "passed"} == {
        "a_queue_can_be_created_again_with_the_same_attributes",
        "a_receive_of_an_empty_queue_gives_none",
        "a_wait_time_of_zero_replaces_that_of_the_queue",
    }
