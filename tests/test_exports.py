"""The public surface: a name is added here on purpose, or not at all."""

import penstock
import penstock.aio


def test_the_public_names_are_these_and_no_others():
    assert sorted(penstock.__all__) == [
        "AttemptLapsed",
        "Claim",
        "InvalidField",
        "InvalidReceipt",
        "JournalError",
        "ManualClock",
        "Message",
        "MessageTooLarge",
        "PenstockError",
        "ProtocolError",
        "PushReply",
        "QueueFull",
        "QueueInfo",
        "QueueNotFound",
        "QueueStats",
        "Queues",
        "RequestError",
        "StaleReceipt",
        "UnavailableError",
        "connect",
    ]


def test_every_public_name_is_there_and_says_what_it_is():
    for name in penstock.__all__:
        assert getattr(penstock, name).__doc__, f"{name} has no docstring"


def test_every_public_error_is_a_penstock_error():
    errors = [getattr(penstock, name) for name in penstock.__all__]
    kinds = [each for each in errors if isinstance(each, type) and issubclass(each, Exception)]
    assert len(kinds) == 12
    assert all(issubclass(kind, penstock.PenstockError) for kind in kinds)
