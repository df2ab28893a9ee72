"""URLs of backends: what is refused, and that no error shows a password."""

import pytest

import penstock
from penstock.errors import InvalidField
from penstock.url import read_url, without_password


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
