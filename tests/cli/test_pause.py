"""`penstock pause` and `resume`: pulls get nothing, and a paused queue stays so."""

import pytest

import penstock
from penstock.cli import main
from penstock.errors import UnsupportedOperation


@pytest.fixture
def url(tmp_path):
    found = f"file:{tmp_path / 'store'}?embedded=1"
    with penstock.connect(found) as queues:
        queues.create("orders")
        queues.push("orders", b"before")
    return found


def test_a_paused_queue_gives_nothing_until_it_is_resumed_also_after_a_restart(url, capsys):
    assert main(["pause", "orders", "--url", url]) == 0
    assert capsys.readouterr().out == (
        "paused orders: pulls get nothing until: penstock resume orders\n"
    )
    # Each command opens the store anew.
    assert main(["push", "orders", "after", "--url", url]) == 0
    assert main(["pull", "orders", "--url", url]) == 1
    capsys.readouterr()
    assert main(["stats", "--url", url]) == 0
    assert "orders (paused)        2" in capsys.readouterr().out
    assert main(["configure", "orders", "--url", url]) == 0
    assert "paused              yes" in capsys.readouterr().out
    assert main(["resume", "orders", "--url", url, "--json"]) == 0
    assert capsys.readouterr().out == '{"queue":"orders","paused":false}\n'
    with penstock.connect(url) as queues:
        assert [each.body for each in queues.pull_many("orders", 9)] == [b"before", b"after"]


def test_pausing_is_a_setting_of_the_queue(url, capsys):
    assert main(["configure", "orders", "--paused", "--url", url]) == 0
    assert main(["pull", "orders", "--url", url]) == 1
    assert main(["configure", "orders", "--no-paused", "--url", url]) == 0
    assert main(["pull", "orders", "--url", url]) == 0
    assert main(["create", "made-paused", "--paused", "--url", url]) == 0
    assert main(["push", "made-paused", "x", "--url", url]) == 0
    assert main(["pull", "made-paused", "--url", url]) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["absent"], 3, "there is no queue 'absent'"),
        (["../orders"], 3, "is not a queue name"),
        ([], 2, "QUEUE"),
    ],
)
def test_what_cannot_be_paused_is_one_error(url, capsys, words, status, complaint):
    for command in ("pause", "resume"):
        assert main([command, *words, "--url", url]) == status
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1


def test_a_value_that_is_not_true_or_false_is_refused_and_changes_nothing(url):
    with penstock.connect(url) as queues:
        for value in ("yes", 1, None):
            with pytest.raises(
                penstock.errors.InvalidField, match="paused: expected true or false"
            ):
                queues.configure("orders", paused=value)
        assert not queues.stats("orders").paused


def test_claiming_by_id_is_not_a_pull_of_a_consumer(url):
    from penstock.service import PullIds

    with penstock.connect(url) as queues:
        (message,) = queues.peek("orders")
        queues.pause("orders")
        (claim,) = queues.service.execute(PullIds("orders", [message.id]))
        assert claim.body == b"before"


def test_a_store_that_cannot_pause_says_so_by_name():
    from penstock.backends.rabbitmq.lacks import COMMON
    from penstock.backends.sqs.lacks import LACKS
    from penstock.backends.sqs.settings import check_settings
    from penstock.service import QueueSettings

    assert "pause" in COMMON
    with pytest.raises(UnsupportedOperation, match="paused: SQS delivers from every queue"):
        check_settings("q", QueueSettings(paused=True), {"paused": True}, LACKS)
    check_settings("q", QueueSettings(), {"paused": False}, LACKS)
