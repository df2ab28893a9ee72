"""Queue URLs, ARNs and the internal names of queues."""

import pytest

from penstock.wire.sqs.address import Owner, QueueAddress, QueueDirectory, read_arn, read_url

HOME = Owner("000000000000", "us-east-1")
AWAY = Owner("111122223333", "eu-west-1")
DIRECTORY = QueueDirectory(HOME)

ADDRESSES = [
    (QueueAddress(HOME, "q"), "q", "arn:aws:sqs:us-east-1:000000000000:q"),
    (QueueAddress(HOME, "q.fifo"), "q.fifo", "arn:aws:sqs:us-east-1:000000000000:q.fifo"),
    (QueueAddress(AWAY, "q"), "q@eu-west-1.111122223333", "arn:aws:sqs:eu-west-1:111122223333:q"),
    (
        QueueAddress(Owner("000000000000", "cn-north-1"), "q"),
        "q@cn-north-1.000000000000",
        "arn:aws-cn:sqs:cn-north-1:000000000000:q",
    ),
    (
        QueueAddress(Owner("000000000000", "us-gov-west-1"), "q"),
        "q@us-gov-west-1.000000000000",
        "arn:aws-us-gov:sqs:us-gov-west-1:000000000000:q",
    ),
]


@pytest.mark.parametrize(("address", "internal", "arn"), ADDRESSES)
def test_an_address_is_converted_to_an_internal_name_and_back(address, internal, arn):
    assert DIRECTORY.internal_name(address) == internal
    assert DIRECTORY.address(internal) == address
    assert DIRECTORY.arn(internal) == arn
    assert read_arn(arn) == address


def test_a_queue_with_a_scope_of_another_kind_belongs_to_the_default_owner():
    assert DIRECTORY.address("q@something").owner == HOME


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:9324/000000000000/q",
        "https://sqs.us-east-1.amazonaws.com/000000000000/q",
        "http://h/queue/us-east-1/000000000000/q",
        "/000000000000/q",
    ],
)
def test_a_url_names_its_account_and_queue(url):
    assert read_url(url) == ("000000000000", "q")


@pytest.mark.parametrize(
    "url", ["q", "http://q", "http://h/queue/q", "http://h:1/queue/q", "http://h/a/queue/q"]
)
def test_a_queue_of_ones_own_needs_no_account(url):
    assert read_url(url) == (None, "q")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://h/q",
        "http://h/12/q",
        "http://h/000000000000/",
        "http://h/000000000000/a b",
        "http://h/000000000000/..",
        "http://h/000000000000/%2e%2e",
        "http://h/000000000000/q/",
        "http://h/٠٠٠٠٠٠٠٠٠٠٠٠/q",
        "http://[/000000000000/q",
        "http://h/000000000000/" + "q" * 81,
        # The standard library remembers the URLs that it was given to split, whatever their size.
        "http://h/" + "a/" * 3_000 + "000000000000/q",
    ],
)
def test_a_url_that_names_no_queue_is_not_read(url):
    assert read_url(url) is None


@pytest.mark.parametrize(
    "arn",
    [
        None,
        7,
        "",
        "q",
        "arn:aws:sns:us-east-1:000000000000:q",
        "arn:aws:sqs:us-east-1:1:q",
        "arn:aws:sqs:US:000000000000:q",
        "arn:aws:sqs:us-east-1:000000000000:q:r",
        "arn:aws:sqs:us-east-1:000000000000:a b",
    ],
)
def test_a_text_that_is_not_the_arn_of_a_queue_is_not_read(arn):
    assert read_arn(arn) is None
