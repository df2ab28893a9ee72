"""SIGHUP: new keys and certificates are used, and no connection ends."""

import shutil
import signal
import socket
import ssl
import subprocess
from base64 import b64encode
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from botocore.exceptions import ClientError

from tests.server.conftest import DaemonProcess, until
from tests.server.test_lines import Served, fields_of, served

OLD = ("AKIAOLD", "the-secret-that-was-before")
NEW = ("AKIANEW", "the-secret-that-comes-then")


def write_config(path, *keys, more=""):
    lines = "\n".join(f'{key} = "{secret}"' for key, secret in keys)
    path.write_text(f"{more}\n[keys]\n{lines}\n")


def as_key(key):
    return {"aws_access_key_id": key[0], "aws_secret_access_key": key[1]}


def hang_up(server, event, number=0):
    """Sends SIGHUP, and returns the fields of the line that answers it."""
    server.process.send_signal(signal.SIGHUP)
    return fields_of(server.line(event, number))


def test_keys_are_replaced_and_those_that_are_gone_are_refused(tmp_path):
    config = tmp_path / "penstock.toml"
    write_config(config, OLD)
    with served("--store", "memory:", "--config", str(config)) as (server, found):
        old, new = found.client(**as_key(OLD)), found.client(**as_key(NEW))
        old.create_queue(QueueName="orders")
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            new.list_queues()
        write_config(config, OLD, NEW)
        fields = hang_up(server, "reloaded")
        assert (fields["keys"], fields["keys_added"], fields["keys_removed"]) == ("2", "1", "0")
        assert len(old.list_queues()["QueueUrls"]) == len(new.list_queues()["QueueUrls"]) == 1
        write_config(config, NEW)
        assert hang_up(server, "reloaded", 1)["keys_removed"] == "1"
        assert len(new.list_queues()["QueueUrls"]) == 1
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            old.list_queues()


def test_every_account_of_a_server_for_tests_takes_the_new_keys(tmp_path):
    config = tmp_path / "penstock.toml"
    old = ("111122223333", OLD[1])
    write_config(config, old)
    with served("--clock", "manual", "--config", str(config)) as (server, found):

        def clock(key):
            asked = Request(f"{found.url}/_penstock/clock")
            asked.add_header("Authorization", f"Basic {b64encode(':'.join(key).encode()).decode()}")
            with urlopen(asked) as answer:
                return answer.status

        sqs = found.client(**as_key(old))
        sqs.create_queue(QueueName="orders")
        assert clock(old) == 200
        write_config(config, NEW)
        hang_up(server, "reloaded")
        with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
            sqs.list_queues()
        with pytest.raises(HTTPError, match="403") as refused:
            clock(old)
        refused.value.close()
        assert clock(NEW) == 200


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[keys", "is not TOML"),
        ("[keys]\nAKIANEW = 'short'\n", "has 5 characters"),
        ("", "the server cannot go on without signatures"),
        ("prot = 1\n", "unknown field `prot`"),
        (None, "cannot read"),
    ],
)
def test_a_bad_file_is_refused_with_a_line_and_the_old_keys_stay(tmp_path, content, complaint):
    config = tmp_path / "penstock.toml"
    write_config(config, OLD)
    with served("--store", "memory:", "--config", str(config)) as (server, found):
        old = found.client(**as_key(OLD))
        if content is None:
            config.unlink()
        else:
            config.write_text(content)
        reason = hang_up(server, "reload-refused")["reason"]
        assert complaint in reason
        assert "short" not in reason
        old.list_queues()


def test_settings_that_need_a_restart_are_named(tmp_path):
    config = tmp_path / "penstock.toml"
    write_config(config, OLD)
    with served("--store", "memory:", "--config", str(config)) as (server, found):
        write_config(config, OLD, more='region = "eu-central-1"\nstrict_receipts = true')
        fields = hang_up(server, "reloaded")
        assert fields["needs_restart"] == "region,strict_receipts"
        found.client(**as_key(OLD)).list_queues()


def make_certificate(directory, name):
    """A certificate for this machine and its key."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    words += ["-nodes", "-days", "2", "-subj", f"/CN={name}"]
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run(
        ["openssl", *words, "-addext", names, "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    return cert, key


def name_shown(port):
    """The name in the certificate that a listener shows."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port)) as link,
        context.wrap_socket(link) as tls,
    ):
        return tls.getpeercert(binary_form=True)


@pytest.fixture
def files(tmp_path):
    """A certificate and a key in use, and one to come: each as its two paths."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    used = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path, source in zip(used, make_certificate(tmp_path, "old"), strict=True):
        shutil.copy(source, path)
    return used, make_certificate(tmp_path, "new")


def test_a_new_certificate_is_shown_and_open_connections_go_on(files):
    (cert, key), (new_cert, new_key) = files
    server = Served("--store", "memory:", "--tls-cert", str(cert), "--tls-key", str(key))
    try:
        port = int(fields_of(server.line("started"))["url"].rpartition(":")[2])
        before = name_shown(port)
        context = ssl.create_default_context(cafile=str(cert))
        with (
            socket.create_connection(("127.0.0.1", port)) as link,
            context.wrap_socket(link, server_hostname="localhost") as connection,
        ):
            request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.sendall(request)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            # The key of another certificate: half of a rotation.
            shutil.copy(new_cert, cert)
            reason = hang_up(server, "reload-refused")["reason"]
            assert "tls: cannot use" in reason
            assert name_shown(port) == before
            shutil.copy(new_key, key)
            assert hang_up(server, "reloaded")["tls_cert"] == str(cert)
            assert name_shown(port) == ssl.PEM_cert_to_DER_cert(new_cert.read_text())
            assert name_shown(port) != before
            connection.sendall(request)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
    finally:
        server.stop()


def test_a_daemon_reads_its_certificate_again(files, tmp_path):
    (cert, key), (new_cert, new_key) = files
    daemon = DaemonProcess(
        *(tmp_path / "store", "--listen", "127.0.0.1:0"),
        *("--tls-cert", str(cert), "--tls-key", str(key)),
    )
    try:
        before = name_shown(daemon.port)
        shutil.copy(new_cert, cert)
        shutil.copy(new_key, key)
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: name_shown(daemon.port) != before)
        key.write_text("no key")
        daemon.process.send_signal(signal.SIGHUP)
        assert name_shown(daemon.port) == ssl.PEM_cert_to_DER_cert(new_cert.read_text())
    finally:
        text = daemon.stop()
    assert "the certificate was read again" in text
    assert "the certificate stays as it was: tls: cannot use" in text


def test_a_message_is_delivered_while_keys_are_reloaded_again_and_again(tmp_path):
    config = tmp_path / "penstock.toml"
    write_config(config, OLD)
    with served("--store", "memory:", "--config", str(config)) as (server, found):
        sqs = found.client(**as_key(OLD))
        url = sqs.create_queue(QueueName="orders")["QueueUrl"]
        # The client repeats no request: each of these is answered at once.
        for number in range(100):
            server.process.send_signal(signal.SIGHUP)
            sqs.send_message(QueueUrl=url, MessageBody=str(number))
        count = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert int(count["ApproximateNumberOfMessages"]) == 100
