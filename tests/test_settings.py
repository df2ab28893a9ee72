"""Settings come from arguments, then variables, then the file; an error names the wrong one."""

import re

import pytest

from penstock.errors import InvalidField
from penstock.settings import ServerSettings, read_keys, read_settings, url_in


def test_settings_that_no_source_gives_have_their_defaults():
    assert read_settings({}, {}) == ServerSettings()
    assert ServerSettings().where == "file:penstock-data"
    assert ServerSettings(durability="os").where == "file:penstock-data?durability=os"
    assert ServerSettings(store="memory:").where == "memory:"


def test_an_argument_overrides_a_variable_and_a_variable_overrides_the_file(tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_text('port = 1\nregion = "a"\naccount = "111122223333"\n[queues.q]\ndelay = 5\n')
    environment = {"PENSTOCK_PORT": "2", "PENSTOCK_REGION": "b", "PENSTOCK_CONFIG": str(path)}
    settings = read_settings({"port": 3, "region": None}, environment)
    assert (settings.port, settings.region, settings.account) == (3, "b", "111122223333")
    assert settings.queues == {"q": {"delay": 5}}
    assert read_settings({}, {}, str(path)).port == 1


def test_the_location_of_the_store_comes_from_the_first_source_that_gives_one(tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_text('store = "file:in-the-file"')
    url = {"PENSTOCK_URL": "file:in-the-url"}
    assert read_settings({}, url).where == "file:in-the-url"
    assert read_settings({}, {"PENSTOCK_URL": ""}).where == "file:penstock-data"
    assert read_settings({}, {}, str(path)).where == "file:in-the-file"
    assert read_settings({}, url, str(path)).where == "file:in-the-url"
    data, store = {"PENSTOCK_DATA": "in-a-variable"}, {"PENSTOCK_STORE": "memory:"}
    assert read_settings({}, data, str(path)).where == "file:in-a-variable"
    assert read_settings({}, store, str(path)).where == "memory:"
    for environment in (url, data, store, {**url, **data}, {**url, **store}):
        assert read_settings({"data": "given"}, environment, str(path)).where == "file:given"
        assert read_settings({"store": "file:given"}, environment, None).where == "file:given"


@pytest.mark.parametrize(
    ("url", "environment", "where"),
    [
        ("memory:", {"PENSTOCK_DATA": "x"}, None),
        ("file:y", {"PENSTOCK_DATA": "x"}, None),
        ("file:x?daemon=1", {"PENSTOCK_DATA": "x"}, None),
        ("file:x", {"PENSTOCK_STORE": "memory:"}, None),
        ("redis://a:secret@h", {"PENSTOCK_STORE": "redis://b:secret@h"}, None),
        ("nonsense", {"PENSTOCK_DATA": "x"}, None),
        ("file:./x", {"PENSTOCK_DATA": "x"}, "file:x"),
        ("file:x", {"PENSTOCK_DATA": "x", "PENSTOCK_DURABILITY": "os"}, "file:x?durability=os"),
        ("file:x", {"PENSTOCK_STORE": "file:x?embedded=1"}, "file:x?embedded=1"),
        ("redis://h:6379/1", {"PENSTOCK_STORE": "redis://h:6379/1"}, "redis://h:6379/1"),
    ],
)
def test_a_url_in_the_environment_is_honoured_or_refused_and_never_ignored(url, environment, where):
    """Row 23: a server that took the other of two stores would look as if messages were lost."""
    environment = {**environment, "PENSTOCK_URL": url}
    if where is not None:
        assert read_settings({}, environment).where == where
        return
    with pytest.raises(InvalidField, match="PENSTOCK_URL") as caught:
        read_settings({}, environment)
    assert "secret" not in str(caught.value)


def test_a_store_that_is_named_twice_is_refused():
    with pytest.raises(InvalidField, match="in the environment: both say where the store is"):
        read_settings({}, {"PENSTOCK_DATA": "x", "PENSTOCK_STORE": "memory:"})
    with pytest.raises(InvalidField, match="in the arguments: both"):
        read_settings({"data": "x", "store": "memory:"}, {})


def test_a_durability_together_with_a_store_is_refused():
    with pytest.raises(InvalidField, match=r"in its URL: file:PATH\?durability=os"):
        read_settings({"store": "file:x", "durability": "os"}, {})


def test_a_data_directory_with_a_question_mark_is_refused():
    """The server would write to the directory whose name ends there."""
    for given, environment in (({"data": "what?"}, {}), ({}, {"PENSTOCK_DATA": "x?durability=os"})):
        with pytest.raises(InvalidField, match=r"data: '.*' has a '\?'"):
            read_settings(given, environment)


def test_lists_and_keys_can_be_given_in_variables():
    one, two = "one:secret:of-many-characters", "two-secret-of-many-characters"
    environment = {
        "PENSTOCK_KEYS": f"a:{one}, d:{two}",
        "PENSTOCK_ALLOW_HOSTS": "x.example, y.example",
    }
    settings = read_settings({}, environment)
    assert settings.keys == {"a": one, "d": two}
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
        ("port = " + "9" * 5_000, "is not TOML"),
        ("x = " + "[" * 100_000, "has values that are nested too deeply"),
        ("#" * 5_000_000, "is larger than 4194304 bytes"),
        ('keys = { a = "" }', "the secret of 'a' has 0 characters; at least 16"),
        ('keys = { a = "fifteen chars.." }', "the secret of 'a' has 15 characters"),
        ('keys = { a = "                    " }', "the secret of 'a' has 0 characters"),
        ('keys = { "" = "a-secret-of-many-characters" }', "'' is not an access key"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, complaint):
    """Row 23: an unknown name, an empty or short secret and the rest."""
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    with pytest.raises(InvalidField) as caught:
        read_settings({}, {}, str(path))
    assert complaint in str(caught.value)


def test_a_missing_config_file_and_a_malformed_key_are_refused():
    with pytest.raises(InvalidField, match=r"cannot read 'nowhere\.toml'"):
        read_settings({}, {}, "nowhere.toml")
    for text in ("a", "a:", ":b", ""):
        with pytest.raises(InvalidField, match="ID:SECRET"):
            read_keys(text)


TLS = {"tls_cert": "c", "tls_key": "k"}
KEYS = {"keys": {"a": "a-secret-of-many-characters"}}


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
def test_on_loopback_a_server_needs_neither_keys_nor_tls(host):
    assert read_settings({"host": host}, {}).on_loopback


@pytest.mark.parametrize(
    ("variable", "complaint"),
    [
        ("PENSTOCK_KEY", "did you mean PENSTOCK_KEYS?"),
        ("PENSTOCK_INSECURE_WITHOUT_TSL", "did you mean PENSTOCK_INSECURE_WITHOUT_TLS?"),
        ("PENSTOCK_PORT_", "did you mean PENSTOCK_PORT?"),
        ("PENSTOCK_port", "there is no such setting"),
        ("PENSTOCK_COLOUR", "there are PENSTOCK_ACCOUNT, ALLOW_HOSTS, "),
        ("PENSTOCK_QUEUES", "declare them in a config file"),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_it(variable, complaint):
    """Row 23: a server whose keys were misspelt would check no signatures."""
    with pytest.raises(InvalidField, match=f"^{variable}: ") as caught:
        read_settings({}, {variable: "AKID:a-secret-of-many-characters"})
    assert complaint in str(caught.value)


def test_variables_that_other_programs_read_are_ignored():
    others = {"PENSTOCK_FULL": "1", "PENSTOCK_SCORE": "1", "PENSTOCK_SERVICES": "x", "PEN": "x"}
    assert read_settings({}, others) == ServerSettings()


def test_a_short_secret_is_refused_in_the_environment_and_in_the_arguments(tmp_path):
    """Row 23: as it is in the file."""
    for given, environment in (({"keys": {"a": "short"}}, {}), ({}, {"PENSTOCK_KEYS": "a:short"})):
        with pytest.raises(InvalidField, match="the secret of 'a' has 5 characters"):
            read_settings(given, environment)


def test_the_deleted_and_purged_windows_are_60_s_only_with_aws_limits():
    plain, limited = read_settings({}, {}), read_settings({}, {"PENSTOCK_AWS_LIMITS": "true"})
    assert (plain.deleted_window_ms, plain.purged_window_ms) == (0, 0)
    assert (limited.deleted_window_ms, limited.purged_window_ms) == (60_000, 60_000)
    mixed = read_settings({"aws_limits": True, "purged_window": 0}, {})
    assert (mixed.deleted_window_ms, mixed.purged_window_ms) == (60_000, 0)


def test_a_loss_can_be_accepted_by_an_argument_only(tmp_path):
    assert read_settings({"accept_loss": True}, {}).accept_loss
    path = tmp_path / "penstock.toml"
    path.write_text("accept_loss = true")
    for environment, config in (({"PENSTOCK_ACCEPT_LOSS": "1"}, None), ({}, str(path))):
        with pytest.raises(InvalidField, match="give it by hand to the one start"):
            read_settings({}, environment, config)


@pytest.mark.parametrize(
    "url",
    [
        "file:x?accept_loss=1",
        "file:x?embedded=1&accept_loss=1",
        "mirror:?primary=file:x%3Faccept_loss=1&mirror=memory:",
    ],
)
def test_a_loss_is_not_accepted_by_the_url_of_a_lasting_setting(tmp_path, url):
    """Row 23: such a server would accept the next loss at its next start, and report it to none."""
    path = tmp_path / "penstock.toml"
    path.write_text(f'store = "{url}"')
    for environment, config, source in (
        ({"PENSTOCK_STORE": url}, None, "the environment"),
        ({"PENSTOCK_URL": url}, None, "PENSTOCK_URL"),
        ({}, str(path), str(path)),
    ):
        with pytest.raises(InvalidField, match="give it by hand to the one start") as caught:
            read_settings({}, environment, config)
        assert f"accept_loss, in {source}: " in str(caught.value)
    with pytest.raises(InvalidField, match="PENSTOCK_URL: "):
        url_in({"PENSTOCK_URL": url})
    assert read_settings({"store": url}, {}).where == url


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"clock": "fast"}, "clock: 'fast' is none of manual, auto, system"),
        ({"clock": "manual", "host": "0.0.0.0", "keys": {"a": "x" * 16}}, "listen on 127.0.0.1"),
        ({"clock": "manual", "data": "orders"}, "'file:orders' is not: leave out the store"),
        ({"chaos": 7, "store": "redis://127.0.0.1"}, "chaos: is for a store in memory"),
        ({"clock": "auto", "carrot": "0"}, "a Carrot broker has only real time"),
        ({"chaos": -1}, "chaos: -1 is outside 0 to"),
    ],
)
def test_a_clock_or_chaos_that_could_harm_more_than_a_test_is_refused(given, told):
    given = {"insecure_without_tls": True, **given}
    with pytest.raises(InvalidField, match=re.escape(told)):
        read_settings(given, {})


def test_a_server_for_tests_has_its_store_in_memory_however_it_is_made_one():
    assert read_settings({"clock": "manual"}, {}).where == "memory:"
    assert read_settings({}, {"PENSTOCK_CHAOS": "7"}).where == "memory:"
    assert read_settings({}, {}).where == "file:penstock-data"
    assert not read_settings({}, {}).is_for_tests
