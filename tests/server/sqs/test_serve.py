"""`penstock serve` as a user starts it: what it prints, what it refuses, how it stops."""

import json
import random
import signal
import socket
import ssl
import subprocess
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

import penstock
from penstock.backends.engine.store import open_engine
from tests.conftest import FULL
from tests.measure import SLACK
from tests.ports import lasting_port
from tests.server.conftest import DaemonProcess, end_daemon, until, without_event_lines
from tests.server.sqs.awscli import aws_program
from tests.server.sqs.conftest import PENSTOCK, TIMEOUT_S, clean_environment, serve

SECRET, OTHER_SECRET = "a very long secret", "another long secret"
KEYS = {"PENSTOCK_KEYS": f"AKIDEXAMPLE:{SECRET},111122223333:{OTHER_SECRET}"}


def run(*arguments, **environment):
    """Runs a server that must refuse to start, on any free port if the arguments have none.

    The default port may be in use by another program, and would then be the error.
    """
    return subprocess.run(
        [PENSTOCK, "serve", "--port", "0", *arguments],
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_serve_prints_its_address_and_commands_to_try(tmp_path):
    with serve("--data", str(tmp_path / "data")) as server:
        lines = server.output.splitlines()
        assert lines[0] == f"penstock: Amazon SQS at {server.url}"
        assert lines[1] == f"  messages    in {tmp_path / 'data'}"
        assert lines[2].startswith("  signatures  not checked")
        assert lines[3] == f"  console     {server.url}/console, in a browser"
        assert lines[4].startswith("  docs        ")
        assert Path(lines[4].split()[1]).read_text().startswith("# ")
        assert lines[-1] == "stop it with Ctrl-C"
        with urlopen(f"{server.url}/health") as answer:
            assert json.loads(answer.read()) == {"status": "ok"}
        with urlopen(f"{server.url}/metrics") as answer:
            assert b"penstock_requests" in answer.read()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--host", "0.0.0.0"), "needs keys"),
        (("--host", "0.0.0.0", "--key", f"a:{SECRET}"), "needs --tls-cert"),
        (("--host", "0.0.0.0", "--insecure-without-keys"), "needs --tls-cert"),
        (("--tls-cert", "none.pem", "--tls-key", "none.pem"), "cannot use 'none.pem'"),
        (("--tls-cert", "none.pem"), "go together"),
        (("--store", "unknown:"), "unknown URL scheme 'unknown'"),
        (("--config", "none.toml"), "cannot read"),
        (("--port", "99999"), "port: 99999 is outside"),
        (("--data", "/proc/none"), "cannot be used"),
        (("--durability", "maybe"), "durability: 'maybe' is none of"),
        (("--data", f"{__file__}/x"), "test_serve.py: is a file; a store is a directory"),
        (("--region", ""), "region: '' is not a region's name"),
        (("--region", "../x y"), "region: '../x y' is not a region's name"),
        (("--allow-host", "a b"), "allow_hosts: 'a b' is not a host's name"),
        (("--allow-host", "a:80"), "allow_hosts: 'a:80' is not a host's name"),
    ],
)
def test_serve_refuses_wrong_settings_in_one_line(arguments, complaint):
    done = run(*arguments)
    assert done.returncode in (3, 6)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert complaint in done.stderr


def test_the_error_of_a_port_in_use_names_the_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--store", "memory:", "--port", str(port))
    assert done.returncode == 7
    assert f"another program listens on 127.0.0.1:{port}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_address_of_another_machine_is_a_wrong_setting():
    done = run(
        *("--store", "memory:", "--host", "192.0.2.1"),
        *("--insecure-without-keys", "--insecure-without-tls"),
    )
    assert done.returncode == 3
    assert "host: cannot listen on 192.0.2.1:0" in done.stderr


def test_serve_says_that_it_is_for_tests_and_where_its_clock_is():
    with serve("--clock", "auto", "--chaos", "7") as server:
        assert "  messages    in memory, and lost when this ends" in server.output
        told = "  for tests   the clock is auto; faults of seed 7; see "
        assert f"{told}{server.url}/_penstock/clock" in server.output


def typed_lines(output):
    """The printed lines that a user is to type."""
    lines = output.splitlines()
    start = lines.index("try it:") + 1
    return [line.strip() for line in lines[start:] if line.startswith("  ")]


@pytest.mark.parametrize(
    ("version", "arguments"),
    [
        ("1", ()),
        ("1", ("--region", "eu-central-1", "--account", "111122223333")),
        # Only once, because each command of version 2 takes seconds to start.
        ("2", ("--region", "eu-central-1", "--account", "111122223333")),
    ],
    ids=str,
)
@pytest.mark.timeout(400)
def test_the_commands_that_serve_prints_work_in_a_shell_unchanged(tmp_path, arguments, version):
    program = aws_program(version)
    with serve("--store", "memory:", *arguments) as server:
        lines = typed_lines(server.output)
        assert [line.split()[0] for line in lines] == ["export"] * 2 + ["aws"] * 3
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
            env={"PATH": f"{program.parent}:/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert '"Body": "hello"' in done.stdout


def test_by_default_a_queue_can_be_deleted_made_and_purged_again_at_once(sqs, queue_name):
    for _ in range(2):
        url = sqs.create_queue(QueueName=queue_name)["QueueUrl"]
        sqs.purge_queue(QueueUrl=url)
        sqs.purge_queue(QueueUrl=url)
        sqs.delete_queue(QueueUrl=url)


def test_row_23_a_store_is_not_served_as_another_region_or_account(tmp_path):
    """Row 23: in another region or account, the same bare names would be other queues."""
    data = ("--data", str(tmp_path / "data"))
    with serve(*data, "--region", "eu-west-1") as server:
        server.client(region_name="eu-west-1").create_queue(QueueName="q")
        server.stop()
    done = run(*data, "--region", "us-east-1")
    assert done.returncode == 3
    assert "region eu-west-1" in done.stderr
    assert "cannot be served as us-east-1" in done.stderr
    done = run(*data, "--region", "eu-west-1", "--account", "111122223333")
    assert done.returncode == 3
    assert "--account 000000000000" in done.stderr
    with serve(*data, "--region", "eu-west-1") as server:
        assert "QueueUrls" in server.client(region_name="eu-west-1").list_queues()
        assert "QueueUrls" not in server.client(region_name="us-east-1").list_queues()


def test_a_server_raises_its_limit_of_open_files(tmp_path):
    """Row 23."""
    limited = ["bash", "-c", 'ulimit -S -n 128 && exec "$@"', "bash"]
    with serve("--store", "memory:", before=limited) as server:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        (line,) = [each for each in limits.splitlines() if each.startswith("Max open files")]
        soft, hard = map(int, line.split()[3:5])
        assert soft == min(hard, 65_536) > 128


def test_queues_of_the_config_file_are_created_and_reconfigured(tmp_path):
    config = tmp_path / "penstock.toml"
    text = f"""
        data = "{tmp_path / "data"}"
        port = 0
        [queues.orders]
        visibility_timeout = 45
        dead_letter = "orders-dead"
        max_receives = 3
        [queues."events.fifo"]
        dedup_by_content = true
    """
    config.write_text(text)
    for timeout in ("45", "60"):
        config.write_text(text.replace("45", timeout))
        with serve("--config", str(config)) as server:
            client = server.client()
            names = [url.rsplit("/", 1)[1] for url in client.list_queues()["QueueUrls"]]
            assert names == ["events.fifo", "orders", "orders-dead"]
            url = client.get_queue_url(QueueName="orders")["QueueUrl"]
            shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
            assert shown["VisibilityTimeout"] == timeout
            assert json.loads(shown["RedrivePolicy"])["maxReceiveCount"] == 3
            url = client.get_queue_url(QueueName="events.fifo")["QueueUrl"]
            client.send_message(QueueUrl=url, MessageBody="x", MessageGroupId="g")
            client.close()
            assert server.stop() == 0
    config.write_text(text.replace("visibility_timeout", "colour"))
    complaint = run("--config", str(config)).stderr
    assert "queues.orders: settings: there is no setting 'colour'" in complaint


def test_stopping_answers_long_polls_and_loses_nothing(tmp_path):
    with serve("--data", str(tmp_path / "data")) as server:
        client, poller = server.client(), server.client()
        url = client.create_queue(QueueName="q")["QueueUrl"]
        answers = []
        waiting = threading.Thread(
            target=lambda: answers.append(poller.receive_message(QueueUrl=url, WaitTimeSeconds=20))
        )
        waiting.start()
        until(lambda: b'waiting_pulls{queue="q"} 1.0' in read_metrics(server))
        other = client.create_queue(QueueName="other")["QueueUrl"]
        client.send_message(QueueUrl=other, MessageBody="kept")
        started_s = time.monotonic()
        assert server.stop() == 0
        waiting.join(TIMEOUT_S)
        # Without the stop, the poll would have waited for 20 s.
        assert time.monotonic() - started_s < 18
        assert "Messages" not in answers[0]
        client.close()
        poller.close()


def read_metrics(server):
    with urlopen(f"{server.url}/metrics") as answer:
        return answer.read()


class Users:
    """Clients that send, receive and delete messages, and note what was answered."""

    def __init__(self):
        self.sent = set()
        self.received: dict[str, set[str]] = {}
        self.deleting = set()
        self.deleted = set()

    def use(self, server, worker):
        """Until the server is killed: every second message is received and deleted."""
        client = server.client()
        with suppress(ClientError, BotoCoreError):
            for number in range(100_000):
                body = f"{server.process.pid}-{worker}-{number}"
                client.send_message(QueueUrl="q", MessageBody=body)
                self.sent.add(body)
                if number % 2:
                    self.finish_one(client)
        client.close()

    def finish_one(self, client):
        for message in client.receive_message(QueueUrl="q").get("Messages", []):
            body = message["Body"]
            assert body not in self.deleted, "an answered delete came back"
            self.received.setdefault(body, set()).add(message["ReceiptHandle"])
            self.deleting.add(body)
            client.delete_message(QueueUrl="q", ReceiptHandle=message["ReceiptHandle"])
            self.deleted.add(body)

    def kill_under_load(self, server, answers):
        """Kills the server once it has given so many answers."""
        before = len(self.sent)
        workers = [threading.Thread(target=self.use, args=(server, each)) for each in range(4)]
        for worker in workers:
            worker.start()
        until(lambda: len(self.sent) >= before + answers)
        server.stop(signal.SIGKILL)
        for worker in workers:
            worker.join(TIMEOUT_S)


def test_every_answer_of_a_killed_server_holds_and_it_is_ready_again_soon(
    tmp_path, record_property
):
    """Row 1: SIGKILL of the server under load; a message comes twice only if it was in flight."""
    users = Users()
    data = tmp_path / "data"
    kills = 50 if FULL else 2
    rng = random.Random(kills)
    ready_s = 0.0
    for number in range(kills):
        began_s = time.monotonic()
        with serve("--data", str(data)) as server:
            if number:
                ready_s = max(ready_s, time.monotonic() - began_s)
            else:
                attributes = {"VisibilityTimeout": "3600"}
                server.client().create_queue(QueueName="q", Attributes=attributes)
            users.kill_under_load(server, rng.randrange(50, 250))
    record_property("figure", f"{kills} kills of a server, ready again in {ready_s:.2f} s")
    with closing(open_engine(data)) as engine:
        (queue,) = engine.shard.queues.values()
        places = [each.content for each in queue.deliveries.values()]
        left = {engine.journal.load(each).body.decode() for each in places if type(each) is int}
        assert len(left) == len(places)
    assert users.sent - users.deleting <= left, "an answered push was lost"
    assert not users.deleted & left, "an answered delete came back"
    # A claim is for an hour: a message that was received once stays in flight, or is deleted.
    assert users.received
    assert all(len(receipts) == 1 for receipts in users.received.values())
    assert ready_s <= 2 * SLACK


@pytest.mark.service("strace")
def test_a_failed_sync_stops_the_server_and_every_answered_message_survives(tmp_path):
    """Row 5: of a server process."""
    answered = []
    fault = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync,fsync"]
    with serve(
        "--data",
        str(tmp_path / "data"),
        before=[*fault, "-e", "inject=fdatasync,fsync:error=EIO:when=40+"],
    ) as server:
        client = server.client()
        url = client.create_queue(QueueName="q")["QueueUrl"]
        for number in range(10_000):
            try:
                client.send_message(QueueUrl=url, MessageBody=str(number))
            except (ClientError, HTTPClientError):
                break
            answered.append(str(number))
        client.close()
        assert server.process.wait(TIMEOUT_S) == 6
        assert without_event_lines(server.process.stdout.read().decode()).count("\n") == 1
    assert answered
    with serve("--data", str(tmp_path / "data")) as server:
        client = server.client()
        url = client.get_queue_url(QueueName="q")["QueueUrl"]
        found = []
        while messages := client.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get(
            "Messages"
        ):
            found += [message["Body"] for message in messages]
        client.close()
    assert found[: len(answered)] == answered


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server that checks signatures."""
    with serve("--store", "memory:", environment=KEYS) as server:
        assert "checked against 2 keys" in server.output
        yield server


def client_with_key(server, **options):
    given = {"aws_access_key_id": "AKIDEXAMPLE", "aws_secret_access_key": SECRET}
    return server.client(**{**given, **options})


def code_of(client):
    with pytest.raises(ClientError) as caught:
        client.list_queues()
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    return caught.value.response["Error"]["Code"]


def test_with_keys_only_signed_requests_are_accepted(guarded):
    client = client_with_key(guarded)
    url = client.create_queue(QueueName="q")["QueueUrl"]
    client.send_message(QueueUrl=url, MessageBody="grüße" * 1_000)
    (message,) = client.receive_message(QueueUrl=url)["Messages"]
    assert message["Body"] == "grüße" * 1_000
    for wrong in (
        {"aws_secret_access_key": "wrong"},
        {"aws_access_key_id": "unknown"},
        {"aws_access_key_id": "111122223333"},
    ):
        assert code_of(client_with_key(guarded, **wrong)) == "SignatureDoesNotMatch"
    other = client_with_key(
        guarded, aws_access_key_id="111122223333", aws_secret_access_key=OTHER_SECRET
    )
    assert "QueueUrls" not in other.list_queues()
    with pytest.raises(ClientError, match="does not exist"):
        other.receive_message(QueueUrl=url)


def get(url):
    from urllib.error import HTTPError
    from urllib.request import Request

    try:
        with urlopen(Request(url)) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_presigned_url_works_until_it_is_changed(guarded):
    url = client_with_key(guarded).create_queue(QueueName="presigned")["QueueUrl"]
    request = AWSRequest("GET", f"{url}?Action=SendMessage&MessageBody=a%20b")
    credentials = Credentials("AKIDEXAMPLE", SECRET)
    SigV4QueryAuth(credentials, "sqs", "us-east-1", expires=60).add_auth(request)
    status, text = get(request.url)
    assert status == 200
    assert "<MD5OfMessageBody>" in text
    status, text = get(request.url.replace("a%20b", "a%20c"))
    assert status == 403
    assert "<Code>SignatureDoesNotMatch</Code>" in text
    status, text = get(f"{url}?Action=PurgeQueue")
    assert status == 403
    assert "<Code>MissingAuthenticationToken</Code>" in text
    status, text = get(f"{url}?Action=PurgeQueue&SignatureVersion=2&AWSAccessKeyId=AKIDEXAMPLE")
    assert status == 403
    assert "<Code>InvalidSecurity</Code>" in text


def test_with_tls_and_keys_serve_listens_on_all_addresses(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    with serve(
        *("--host", "0.0.0.0", "--store", "memory:"),
        *("--tls-cert", str(cert), "--tls-key", str(key)),
        environment=KEYS,
    ) as server:
        assert server.url.startswith("https://localhost:")
        client = client_with_key(server, verify=str(cert))
        url = client.create_queue(QueueName="q")["QueueUrl"]
        assert url.startswith("https://localhost:")
        client.send_message(QueueUrl=url, MessageBody="x" * 200_000)
        (message,) = client.receive_message(QueueUrl=url)["Messages"]
        assert len(message["Body"]) == 200_000
        client.close()
        context = ssl.create_default_context(cafile=str(cert))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection(("localhost", server.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as wire,
        ):
            assert wire.version() == "TLSv1.2"


def test_serve_accepts_a_loss_with_the_option_and_prints_what_is_lost(tmp_path):
    """Row 3: a missing segment file."""
    data = tmp_path / "data"
    with serve("--data", str(data)) as server:
        client = server.client()
        url = client.create_queue(QueueName="q")["QueueUrl"]
        # More than one segment file holds.
        for _ in range(20):
            client.send_message(QueueUrl=url, MessageBody="x" * 1_000_000)
        server.stop(signal.SIGKILL)
    lost = data / "journal" / "000000000000.seg"
    lost.unlink()
    done = run("--data", str(data))
    assert done.returncode == 6
    assert "--accept-loss" in done.stderr
    with serve("--data", str(data), "--accept-loss") as server:
        assert f"the loss of files was accepted: {lost.name} (offsets 0 to " in server.output
        assert "entries are lost" in server.output
        server.stop()
    with serve("--data", str(data)) as server:
        assert "the loss" not in server.output
    done = run("--store", "memory:", "--accept-loss")
    assert done.returncode == 3
    assert "accept_loss: 'memory:' is not a data directory" in done.stderr


def test_serve_reports_damage_that_opening_found(tmp_path):
    """Row 4: a flipped bit in a synced entry."""
    data = tmp_path / "data"
    with serve("--data", str(data)) as server:
        client = server.client()
        url = client.create_queue(QueueName="q")["QueueUrl"]
        client.send_message(QueueUrl=url, MessageBody="some body")
        client.send_message(QueueUrl=url, MessageBody="another")
        server.stop(signal.SIGKILL)
    path = data / "journal" / "000000000000.seg"
    content = bytearray(path.read_bytes())
    content[content.index(b"some body")] ^= 1
    path.write_bytes(content)
    with serve("--data", str(data)) as server:
        assert "data: the journal is damaged: data does not match its checksum" in server.output
        server.stop()


def test_row_23_queues_of_a_remote_service_are_not_served_as_another_region_or_account(tmp_path):
    """Row 23: the note of each queue has its region and account, in every service."""
    daemon = DaemonProcess(tmp_path / "store", "--listen", "127.0.0.1:0")
    stores = [f"penstock://127.0.0.1:{daemon.port}", f"file:{tmp_path / 'store'}?daemon=1"]
    try:
        with serve("--store", stores[0], "--region", "eu-west-1") as server:
            url = server.client(region_name="eu-west-1").create_queue(QueueName="q")["QueueUrl"]
            server.client(region_name="eu-west-2").create_queue(QueueName="q")
            server.stop()
        for store in stores:
            done = run("--store", store, "--region", "us-east-1")
            assert done.returncode == 3
            assert "region: the store was created for region eu-west-1" in done.stderr
            account = ("--account", "111122223333")
            done = run("--store", store, "--region", "eu-west-1", *account)
            assert done.returncode == 3
            assert "account: the store was created for account 000000000000" in done.stderr
            with serve("--store", store, "--region", "eu-west-1") as server:
                listed = server.client(region_name="eu-west-1").list_queues()["QueueUrls"]
                assert [each.rpartition("/")[2] for each in listed] == [url.rpartition("/")[2]]
                server.stop()
    finally:
        daemon.stop()
    # As a data directory of the server it has no file with its region and account yet.
    done = run("--data", str(tmp_path / "store"))
    assert done.returncode == 3
    assert "eu-west-1" in done.stderr
    with serve("--data", str(tmp_path / "store"), "--region", "eu-west-1") as server:
        server.stop()


def test_row_23_a_daemons_store_is_not_served_as_another_region_or_account(tmp_path):
    """Row 23: a queue that the library created has no note; the file `sqs` has its region."""
    path = tmp_path / "store"
    with serve("--data", str(path)) as server:
        with penstock.connect(f"file:{path}") as queues:
            queues.create("orders")
        server.stop()
    mirror = f"mirror:?primary=file:{path}&mirror=penstock://127.0.0.1:1"
    try:
        for store in (f"file:{path}?daemon=1", mirror, f"file:{path}?embedded=1"):
            done = run("--store", store, "--region", "eu-west-1")
            assert done.returncode == 3, done.stderr
            assert "was created for region us-east-1" in done.stderr
            end_daemon(path)
        with serve("--store", f"file:{path}?daemon=1") as server:
            assert len(server.client().list_queues()["QueueUrls"]) == 1
    finally:
        end_daemon(path)


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_a_server_without_its_standard_files_serves_and_stops(tmp_path, closed):
    """With a socket whose number is 0, 1 or 2, uvloop ended the process by a failed assertion."""
    redirected = " ".join(f"{number}>&-" for number in closed.split())
    port = lasting_port()
    command = f"exec {PENSTOCK} serve --port {port} --store memory: {redirected}"
    process = subprocess.Popen(
        ["sh", "-c", command],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        until(lambda: answers(port) or process.poll() is not None)
        for _ in range(3):
            assert answers(port)
        process.terminate()
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, printed
    assert b"ssertion" not in printed


def answers(port):
    try:
        with urlopen(f"http://127.0.0.1:{port}/health") as answer:
            return answer.status == 200
    except OSError:
        return False
