"""Settings: arguments before variables before the file, and every mistake named."""

import pytest

from penstock.errors import InvalidField
from penstock.settings import ServerSettings, read_keys, read_settings


def test_without_anything_said_the_defaults_hold():
    assert read_settings({}, {}) == ServerSettings()
    assert ServerSettings().where == "file:penstock-data"
    assert ServerSettings(durability="os").where == "file:penstock-data?durability=os"
    assert ServerSettings(store="memory:").where == "memory:"


def test_an_argument_beats_a_variable_and_a_variable_beats_the_file(tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_text('port = 1\nregion = "a"\naccount = "111122223333"\n[queues.q]\ndelay = 5\n')
    environment = {"PENSTOCK_PORT": "2", "PENSTOCK_REGION": "b", "PENSTOCK_CONFIG": str(path)}
    settings = read_settings({"port": 3, "region": None}, environment)
    assert (settings.port, settings.region, settings.account) == (3, "b", "111122223333")
    assert settings.queues == {"q": {"delay": 5}}
    assert read_settings({}, {}, str(path)).port == 1


def test_lists_and_keys_can_be_given_in_variables():
    environment = {"PENSTOCK_KEYS": "a:b:c, d:e", "PENSTOCK_ALLOW_HOSTS": "x.example, y.example"}
    settings = read_settings({}, environment)
    assert settings.keys == {"a": "b:c", "d": "e"}
    assert settings.allow_hosts == ["x.example", "y.example"]
    assert read_settings({}, {"PENSTOCK_INSECURE_WITHOUT_TLS": "true"}).insecure_without_tls


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("colour = 1", "unknown field `colour`"),
        ("port = 'x'", "got `str` - at `$.port`"),
        ("port = 70000", "port: 70000 is outside"),
        ("account = 'x'", "account: 'x' is not twelve digits"),
        ("tls_cert = 'x'", "tls_cert and tls_key go together"),
        ("deleted_window = -1", "deleted_window: expected 0 to 86400"),
        ("= x", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, complaint):
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    with pytest.raises(InvalidField) as caught:
        read_settings({}, {}, str(path))
    assert complaint in str(caught.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(InvalidField, match=r"cannot read 'nowhere\.toml'"):
        read_settings({}, {}, "nowhere.toml")
    for text in ("a", "a:", ":b", ""):
        with pytest.raises(InvalidField, match="ID:SECRET"):
            read_keys(text)


TLS = {"tls_cert": "c", "tls_key": "k"}
KEYS = {"keys": {"a": "b"}}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "needs keys"),
        (TLS, "needs keys"),
        (KEYS, "needs --tls-cert"),
        ({"insecure_without_keys": True}, "needs --tls-cert"),
        ({"insecure_without_tls": True}, "needs keys"),
        ({**KEYS, **TLS}, None),
        ({**KEYS, "insecure_without_tls": True}, None),
        ({**TLS, "insecure_without_keys": True}, None),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_off_loopback_a_server_needs_keys_and_tls(host, given, complaint):
    if complaint is None:
        assert read_settings({"host": host, **given}, {}).host == host
        return
    with pytest.raises(InvalidField, match=complaint):
        read_settings({"host": host, **given}, {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_loopback_it_needs_neither(host):
    assert read_settings({"host": host}, {}).on_loopback
