"""A configuration file of ElasticMQ means the same to Penstock, or is refused with its line."""

import pytest

from penstock.elasticmq import read_elasticmq
from penstock.errors import InvalidField
from penstock.settings import read_settings

DOCUMENTED = """
# the include should be done only once, at the beginning of the file
include classpath("application.conf")

// What is the outside visible address of this ElasticMQ node
node-address {
    protocol = http
    host = localhost
    port = 9324
    context-path = ""
}

rest-sqs {
    enabled = true
    bind-port = 9999
    bind-hostname = "127.0.0.1"
    // Possible values: relaxed, strict
    sqs-limits = strict
}

rest-stats {
    enabled = true
    bind-port = 9325
    bind-hostname = "0.0.0.0"
}

generate-node-address = false

queues {
    queue1 {
        defaultVisibilityTimeout = 10 seconds
        delay = 5 seconds
        receiveMessageWait = 0 seconds
        deadLettersQueue {
            name = "queue1-dead-letters"
            maxReceiveCount = 3 // from 1 to 1000
        }
        fifo = false
        contentBasedDeduplication = false
        tags {
            tag1 = "tagged1"
            tag2 = "tagged2"
        }
    }
    queue1-dead-letters { }
}

queues-storage { enabled = false }
messages-storage {
    enabled = false
    uri = "jdbc:h2:/data/elasticmq"
}

aws {
    region = us-west-2
    accountId = 000000000000
}
"""


def read(text):
    return read_elasticmq(text, "elasticmq.conf")


def test_the_documented_file_declares_its_queues_and_where_to_listen():
    assert read(DOCUMENTED) == {
        "queues": {
            "queue1": {
                "visibility_timeout": 10,
                "delay": 5,
                "wait": 0,
                "dedup_by_content": False,
                "dead_letter": "queue1-dead-letters",
                "max_receives": 3,
                "annotations": {"Tags": '{"tag1": "tagged1", "tag2": "tagged2"}'},
            },
            "queue1-dead-letters": {},
        },
        "host": "127.0.0.1",
        "port": 9999,
        "region": "us-west-2",
        "account": "000000000000",
    }


@pytest.mark.parametrize(
    ("text", "queues"),
    [
        ("queues.a.delay = 500ms", {"a": {"delay": 0.5}}),
        ("queues { a { delay = 1500 } }", {"a": {"delay": 1.5}}),
        ("queues { a { delay = 1.5 minutes }, b {} }", {"a": {"delay": 90}, "b": {}}),
        ('{ "queues": { "a": { "delay": "2 s" } } }', {"a": {"delay": 2}}),
        ("queues { a { delay = 1s } }\nqueues { a { delay = 2s } }", {"a": {"delay": 2}}),
        ("queues {\r\n  a { }\r\n}\r\n", {"a": {}}),
        ('queues { "events.fifo" { fifo = true } }', {"events.fifo": {}}),
        ("queues { events { fifo = yes } }", {"events.fifo": {}}),
        (
            "queues { d {}, a { fifo = on, deadLettersQueue { name = d, maxReceiveCount = 2 } } }",
            {"d": {}, "a.fifo": {"dead_letter": "d", "max_receives": 2}},
        ),
        (
            "queues { a { fifo = true, deadLettersQueue { name = d, maxReceiveCount = 2 } } }\n\
queues.d.fifo = true",
            {"a.fifo": {"dead_letter": "d.fifo", "max_receives": 2}, "d.fifo": {}},
        ),
    ],
)
def test_each_form_of_the_language_that_these_files_use_is_read(text, queues):
    assert read(text)["queues"] == queues


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('\nqueues { a { copyTo = "b" } }', "line 2: queues.a.copyTo: Penstock does not copy"),
        ('queues { a {\nmoveTo = "b" } }', "line 2: queues.a.moveTo: Penstock does not redirect"),
        ('include "other.conf"', "line 1: include: only classpath"),
        ("a = 1\nb = ${?HOME}", "line 2: ${…}: substitutions are not supported"),
        ("queues { a { dely = 5 s } }", "queues.a.dely: Penstock has no such setting; did you"),
        ("\n\npekko { loglevel = INFO }", "line 3: pekko: Penstock has no such setting"),
        ("queues { a { delay = soon } }", "queues.a.delay: expected a duration"),
        ("queues { a { delay = 5 fortnights } }", "queues.a.delay: expected a duration"),
        ("queues { a { fifo = maybe } }", "queues.a.fifo: expected true or false"),
        ("rest-sqs { bind-port = http }", "rest-sqs.bind-port: expected a whole number"),
        ("rest-sqs { sqs-limits = relaxed }", "rest-sqs.sqs-limits: expected only 'strict'"),
        ("rest-sqs { enabled = false }", "rest-sqs.enabled: expected only 'true'"),
        ("messages-storage { enabled = true }", "messages-storage.enabled: expected only 'false'"),
        ("node-address { context-path = x }", "node-address.context-path: expected only ''"),
        ("queues { a { deadLettersQueue { name = b } } }", "name and maxReceiveCount are both"),
        ("queues { a { tags = [1] } }", "line 1: unexpected '[': lists are not supported"),
        ("queues = 3", "line 1: queues: expected { … }"),
        ("queues { a { delay { } } }", "queues.a.delay: expected a value, got { … }"),
        ("a += 1", "line 1: += is not supported"),
        ('a = """x"""', 'texts in """ are not supported'),
        ("queues {\n", "line 2: unexpected the end of the file"),
        ("queues { } }", "line 1: unexpected '}'"),
        ("{ queues { } } x", "unexpected 'x'"),
        ("queues { a {} b {} }", "unexpected 'b' after }"),
        ("queues a {}", "unexpected 'a' after a name"),
        ("a = ", "unexpected the end of the file: expected a value"),
        ("a = `x`", "unexpected '`'"),
        ('a = "\\x"', "is not a text as in JSON"),
        ("..a = 1", "line 1: unexpected '..a'"),
        ("a {" * 100, "nested deeper than 20"),
        ("a." * 100 + "b = 1", "unexpected"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_line(text, complaint):
    with pytest.raises(InvalidField) as caught:
        read(text)
    assert str(caught.value).startswith("config: 'elasticmq.conf', line ")
    assert complaint in str(caught.value)


def test_a_file_of_this_ending_is_read_as_one_of_elasticmq(tmp_path):
    path = tmp_path / "elasticmq.conf"
    path.write_text(DOCUMENTED)
    settings = read_settings({"port": 0}, {}, str(path))
    assert (settings.port, settings.host, settings.region) == (0, "127.0.0.1", "us-west-2")
    assert list(settings.queues) == ["queue1", "queue1-dead-letters"]
    path.write_bytes(b"queues { \xff }")
    with pytest.raises(InvalidField, match="is not UTF-8"):
        read_settings({}, {}, str(path))
    path.write_text('rest-sqs { bind-hostname = "0.0.0.0" }')
    with pytest.raises(InvalidField, match=r"host: 0\.0\.0\.0 can be reached by others"):
        read_settings({}, {}, str(path))
