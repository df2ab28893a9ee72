"""The public names of the package: a change of them must be made in this list, too."""

import re
from pathlib import Path

import penstock
import penstock.aio
from penstock import errors

ROOT = Path(__file__).parents[1]


def test_the_public_names_are_these_and_no_others():
    assert sorted(penstock.__all__) == [
        "AddressInUse",
        "AttemptLapsed",
        "BackendLost",
        "BatchRefused",
        "Claim",
        "EngineClosed",
        "InFlightLimit",
        "InvalidField",
        "InvalidReceipt",
        "JournalError",
        "ManualClock",
        "Message",
        "MessageGone",
        "MessageNotFound",
        "MessageTooLarge",
        "MissingExtra",
        "Overloaded",
        "PenstockError",
        "PersistedQueue",
        "ProtocolError",
        "PushReply",
        "QueueDeleted",
        "QueueExists",
        "QueueFull",
        "QueueInUse",
        "QueueInfo",
        "QueueNotFound",
        "QueueStats",
        "Queues",
        "RequestError",
        "SharedQueue",
        "StaleReceipt",
        "StoreFull",
        "StoreInUse",
        "StoreUnusable",
        "UnavailableError",
        "UnsupportedOperation",
        "connect",
    ]


def test_every_public_name_exists_and_has_a_docstring():
    for name in penstock.__all__:
        assert getattr(penstock, name).__doc__, f"{name} has no docstring"


def test_every_public_error_is_a_penstock_error():
    errors = [getattr(penstock, name) for name in penstock.__all__]
    kinds = [each for each in errors if isinstance(each, type) and issubclass(each, Exception)]
    assert len(kinds) == 28
    assert all(issubclass(kind, penstock.PenstockError) for kind in kinds)


def test_every_error_that_a_page_names_can_be_imported_from_the_package():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = set(re.findall(r"\b[A-Z][A-Za-z]+\b", " ".join(page.read_text() for page in pages)))
    kinds = {name for name in vars(errors) if isinstance(getattr(errors, name), type)}
    missing = named & kinds - set(penstock.__all__) - {"Any", "Sequence"}
    assert {"StoreFull", "BackendLost", "UnsupportedOperation"} <= named
    assert missing == set()
