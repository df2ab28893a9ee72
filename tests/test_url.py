"""URLs of backends: what is refused, and that no error shows a password."""

import asyncio

import pytest

import penstock
from penstock.errors import InvalidField
from penstock.url import read_url, why_not_connected, without_password


@pytest.mark.parametrize(
    "url",
    [
        "penstock://user:secret@host:1",
        "penstock://user:secret@host:port",
        "penstock://user:secret@[host",
        "penstock://user:secret@host:1?tls=x",
        "penstock://user:secret/secret@host:1",
        "penstock://user:a?secret@host:1",
        "penstock://user:a&b=secret@host:1",
        "cluster:nats://user:secret@localhost:1?shards=x",
        "cluster:nats://user:secret,secret@localhost:1",
        "cluster:nats://user:secret@localhost:1,localhost",
        "sqs://user:secret@eu-west-1",
        "sqs://eu-west-1?endpoint=user://name:secret@host",
        "sqs://eu-west-1?timeout=x&endpoint=http://user:secret@host",
        "memory://user:secret@host",
        "file://user:secret@host/path",
        "redis://user:secret@host?timeout=x",
        "redis://user:secret@host:port",
        "redis://:secret/word@host",
        "redis://user:secret?word@host",
        "redis://user:12?secret=word@host",
        "redis://user:12/secret@host",
        "amqp://user:12/secret@host",
        "penstock://user:12/secret@host:1",
        "rediss://user:secret/word@host/1",
        "redis+cluster://:secret/word@one:1,two:2",
        "redis+sentinel://:secret/word@one:1/master",
        "amqp://user:secret/word@host",
        "amqp://user:secret?a=word@host",
        "sqs://user:secret/word@eu-west-1",
        "sqs://eu-west-1?endpoint=http://user:secret/word@host",
        "penstock://:secret/word@host:1",
        "cluster:nats://:secret/word@localhost:1",
        "mirror:?primary=file:x&mirror=redis://:secret/word@host",
        "amqp://user:secret@host?timeout=x",
        "mirror:?primary=file:x&mirror=redis%3A%2F%2Fuser%3Asecret%40host&moved=x",
        "mirror:?primary=file:x&mirror=redis://user:secret@host&moved=x",
        "user:secret@host",
        "other://user:secret@host",
    ],
)
def test_no_error_about_a_url_shows_its_password(url):
    """Row 23."""
    with pytest.raises(InvalidField) as caught:
        penstock.connect(url)
    assert "secret" not in str(caught.value)


def test_a_url_is_shown_without_user_and_password():
    shown = {
        "redis://user:word@host/1": "redis://…@host/1",
        "cluster:tls://user:word@one:1,two:2": "cluster:tls://…@one:1,two:2",
        "mirror:?primary=file:///a&mirror=redis://u:w@h": (
            "mirror:?primary=file:///a&mirror=redis://…@h"
        ),
        "file:/home/a@b/store": "file:/home/a@b/store",
        "penstock://host:1": "penstock://host:1",
    }
    assert {url: without_password(url) for url in shown} == shown
    assert read_url("redis://user:word@host/1").shown == "redis://…@host/1"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("file:x?embedded", "the option 'embedded' has no value; write embedded=VALUE"),
        ("file:x?embedded=", "the option 'embedded' has no value"),
        ("file:x?embedded=1&embedded=0", "the option 'embedded' is given twice"),
        ("file:x?", "has a '?' and no options behind it"),
        ("file:x?durability=os#embedded=1", "durability"),
        ("file:x?#embedded=1", "has no option '#embedded'"),
        ("penstock://127.0.0.1:1#?tls=1", "is not of the form penstock://HOST:PORT"),
        ("cluster:nats://127.0.0.1:1#?shards=1", "is not HOST:PORT"),
        ("sqs://eu-west-1#?account=111122223333", "has no valid region"),
    ],
)
def test_an_option_of_a_url_is_honoured_or_refused_and_never_ignored(url, complaint):
    with pytest.raises(InvalidField) as caught:
        penstock.connect(url)
    assert complaint in str(caught.value)


def test_a_number_sign_in_a_path_is_a_part_of_it():
    url = read_url("file:a#b?embedded=1")
    assert (url.path, url.options) == ("a#b", {"embedded": "1"})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_where_nothing_listens_is_named_by_its_reason_and_not_by_itself(host):
    """A name with several addresses fails with one text for all of them."""
    with pytest.raises(OSError) as failed:  # noqa: PT011
        asyncio.run(asyncio.open_connection(host, 1))
    assert why_not_connected(failed.value) == "Connection refused"
