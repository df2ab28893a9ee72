"""Frames over TCP: who may listen where, tokens, and TLS."""

import pytest

import penstock
from penstock.backends.portal import Portal
from penstock.errors import BackendLost, InvalidField, ProtocolError
from penstock.server.frames.tcp import (
    PORT,
    TcpAddress,
    check_exposure,
    is_loopback,
    read_address,
    read_token,
)
from penstock.server.tls import ServerTls

TOKEN = "correct horse battery staple"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", TcpAddress("127.0.0.1", 80)),
        ("localhost", TcpAddress("localhost", PORT)),
        ("[::1]:0", TcpAddress("::1", 0)),
        ("[::1]", TcpAddress("::1", PORT)),
        ("::1", TcpAddress("::1", PORT)),
    ],
)
def test_an_address_is_a_host_and_perhaps_a_port(text, address):
    assert read_address(text) == address


@pytest.mark.parametrize(
    "text", ["", ":80", "host:", "host:port", "host:70000", "[::1", "[::1]80", "host:-1", "h:١"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(InvalidField, match="address"):
        read_address(text)


def test_only_loopback_counts_as_this_machine():
    assert is_loopback("127.0.0.1")
    assert is_loopback("127.1.2.3")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    assert not is_loopback("10.0.0.1")
    with pytest.raises(InvalidField, match="cannot be found"):
        is_loopback("no.such.host.invalid")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_beyond_this_machine_it_takes_a_token_and_tls_or_a_flag_that_says_so(host):
    address = TcpAddress(host, 0)
    for token, tls, missing in [
        (False, False, "--token-file and --tls-cert with --tls-key"),
        (True, False, "give --tls-cert with --tls-key"),
        (False, True, "give --token-file"),
    ]:
        with pytest.raises(InvalidField) as caught:
            check_exposure(address, has_token=token, has_tls=tls)
        assert missing in str(caught.value)
        assert "--insecure-open-to-the-network" in str(caught.value)
    check_exposure(address, has_token=True, has_tls=True)
    check_exposure(address, has_token=False, has_tls=False, insecure=True)


def test_a_token_is_read_without_the_white_space_around_it(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    assert read_token(str(path)) == TOKEN
    path.write_text("short\n")
    with pytest.raises(InvalidField, match="holds 5 characters; at least 16"):
        read_token(str(path))
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(InvalidField, match="not text"):
        read_token(str(path))


def test_a_server_with_a_token_accepts_only_clients_that_send_it(serve, tmp_path, capfd):
    server = serve(token=TOKEN)
    known, wrong = tmp_path / "known", tmp_path / "wrong"
    known.write_text(TOKEN)
    wrong.write_text(TOKEN[:-1] + "x")
    url = f"penstock://127.0.0.1:{server.port}"
    with penstock.connect(f"{url}?token_file={known}") as queues:
        assert queues.list() == []
    for refused in (url, f"{url}?token_file={wrong}"):
        with pytest.raises(ProtocolError, match="missing or wrong"):
            penstock.connect(refused)
    shown = capfd.readouterr().err
    assert shown.count("token-refused protocol=frames peer=127.0.0.1:") == 2
    assert TOKEN[:-1] not in shown


def test_over_tls_everything_works_as_without(serve, certificate):
    server = serve(tls=ServerTls(*certificate))
    url = f"penstock://127.0.0.1:{server.port}?ca_file={certificate[0]}"
    with penstock.connect(url) as queues:
        # Threads may not share a TLS connection by reading for one another.
        assert isinstance(queues.service, Portal)
        queues.create("orders")
        queues.push("orders", b"x" * 300_000)
        claim = queues.pull("orders")
        assert claim is not None
        assert len(claim.body) == 300_000


def test_an_untrusted_certificate_is_refused(serve, certificate):
    server = serve(tls=ServerTls(*certificate))
    with pytest.raises(BackendLost, match="cannot be used"):
        penstock.connect(f"penstock://127.0.0.1:{server.port}?tls=1")


def test_a_plain_client_gets_nothing_from_a_tls_server(serve, certificate):
    server = serve(tls=ServerTls(*certificate))
    with pytest.raises((BackendLost, ProtocolError)):
        penstock.connect(f"penstock://127.0.0.1:{server.port}?timeout=5")


def test_a_file_that_is_not_a_certificate_is_an_error(tmp_path):
    (tmp_path / "cert").write_text("nothing")
    with pytest.raises(InvalidField, match="tls: cannot use"):
        ServerTls(str(tmp_path / "cert"), str(tmp_path / "nowhere"))
