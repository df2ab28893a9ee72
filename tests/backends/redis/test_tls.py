"""`rediss://` with a real redis-server that uses TLS, with and without client certificates."""

import subprocess

import pytest

import penstock
from penstock.errors import InvalidField, RequestError
from tests.backends.redis.servers import RedisServer
from tests.rabbit import free_ports

pytestmark = [
    pytest.mark.service("redis-server"),
    pytest.mark.service("openssl"),
    pytest.mark.usefixtures("failed_handshakes_collected"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = ("-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")
# Python 3.13 requires this of an authority, and that a certificate names its authority.
AUTHORITY_USE = "keyUsage=critical,keyCertSign,cRLSign"


def openssl(*words):
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


class Certificates:
    """An authority with certificates that it signed for server and client, and another one."""

    def __init__(self, directory):
        self.directory = directory
        self.authority = self._authority("ca")
        self.other_authority = self._authority("other")
        self.server = self._signed("server", "subjectAltName=IP:127.0.0.1")
        self.client = self._signed("client", "basicConstraints=CA:FALSE")

    def key_of(self, certificate):
        return certificate.with_suffix(".key")

    def _authority(self, name):
        made = self.directory / f"{name}.pem"
        openssl(
            *("req", "-x509", *KEY, "-subj", f"/CN={name}", "-addext", AUTHORITY_USE),
            *("-keyout", self.key_of(made), "-out", made),
        )
        return made

    def _signed(self, name, extension):
        made, request = self.directory / f"{name}.pem", self.directory / f"{name}.csr"
        openssl(
            "req", *KEY[:5], "-subj", f"/CN={name}", "-keyout", self.key_of(made), "-out", request
        )
        (self.directory / f"{name}.ext").write_text(f"{extension}\nauthorityKeyIdentifier=keyid\n")
        openssl(
            *("x509", "-req", "-in", request, "-out", made, "-days", "2", "-CAcreateserial"),
            *("-CA", self.authority, "-CAkey", self.key_of(self.authority)),
            *("-extfile", self.directory / f"{name}.ext"),
        )
        return made


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


class TlsServer(RedisServer):
    """A server with a port for TLS beside its plain one."""

    def __init__(self, certificates, auth_clients):
        self.tls_port, port = free_ports(2)
        super().__init__(
            *("--tls-port", str(self.tls_port), "--tls-auth-clients", auth_clients),
            *("--tls-cert-file", str(certificates.server)),
            *("--tls-key-file", str(certificates.key_of(certificates.server))),
            *("--tls-ca-cert-file", str(certificates.authority)),
            port=port,
        )

    @property
    def url(self):
        return f"rediss://127.0.0.1:{self.tls_port}"


@pytest.fixture(scope="module")
def open_server(certificates):
    server = TlsServer(certificates, "no")
    yield server
    server.close()


@pytest.fixture(scope="module")
def closed_server(certificates):
    server = TlsServer(certificates, "yes")
    yield server
    server.close()


def round_trip(url):
    """Pushes a message, waits for it with a pull, and deletes it."""
    with penstock.connect(url) as queues:
        queues.create("orders")
        queues.push("orders", b"secret", delay=0.05)
        claim = queues.pull("orders", wait=20)
        assert claim is not None
        return claim.body == b"secret" and queues.delete(claim)


def test_queues_work_over_tls(open_server, certificates):
    assert round_trip(f"{open_server.url}?ca_file={certificates.authority}")


def test_a_client_sends_its_certificate_to_a_server_that_requires_one(closed_server, certificates):
    client = certificates.client
    assert round_trip(
        f"{closed_server.url}?ca_file={certificates.authority}"
        f"&cert_file={client}&key_file={certificates.key_of(client)}"
    )


def refusal_of(url):
    with pytest.raises(RequestError) as refused:
        penstock.connect(url)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_a_certificate_of_another_authority_is_refused_with_the_reason(open_server, certificates):
    for options in ("", f"?ca_file={certificates.other_authority}"):
        text = refusal_of(open_server.url + options)
        assert text.startswith(f"{open_server.url}: the server's certificate is not trusted: ")
        assert text.endswith("; give the certificate of its authority with ca_file=PATH")


def test_a_certificate_for_another_host_is_refused(open_server, certificates):
    url = open_server.url.replace("127.0.0.1", "localhost")
    assert "mismatch" in refusal_of(f"{url}?ca_file={certificates.authority}")


def test_the_error_of_a_client_without_a_required_certificate_names_the_options(
    closed_server, certificates
):
    text = refusal_of(f"{closed_server.url}?ca_file={certificates.authority}")
    assert "give cert_file=PATH and key_file=PATH" in text


def test_a_client_with_a_certificate_of_another_authority_is_refused(closed_server, certificates):
    other_authority = certificates.other_authority
    text = refusal_of(
        f"{closed_server.url}?ca_file={certificates.authority}"
        f"&cert_file={other_authority}&key_file={certificates.key_of(other_authority)}"
    )
    assert "does not trust the certificate in cert_file" in text


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("key_file={key}", "key_file: there is no cert_file"),
        ("cert_file=/nowhere", "cert_file: cannot use '/nowhere': No such file"),
        ("cert_file={cert}&key_file=/nowhere", "cert_file: cannot use"),
        ("cert_file={cert}&key_file={other}", "cert_file: cannot use"),
        ("ca_file={key}", "ca_file: cannot use"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_connecting(certificates, options, part):
    names = {
        "cert": certificates.client,
        "key": certificates.key_of(certificates.client),
        "other": certificates.key_of(certificates.server),
    }
    with pytest.raises(InvalidField, match=part) as refused:
        penstock.connect(f"rediss://127.0.0.1:1?{options.format(**names)}")
    assert "\n" not in str(refused.value)
