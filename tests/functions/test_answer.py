"""What an answer means for a batch; each case has its sentence in AWS's documentation.

The sentences are those of "Handling errors for an SQS event source in Lambda".
"""

import pytest

from penstock.functions.answer import failed_ids, with_later_ones

IDS = ["a", "b", "c"]

# "Lambda treats a batch as a complete success if your function returns any of the following"
SUCCESS = [
    ("An empty batchItemFailures list", {"batchItemFailures": []}),
    ("A null batchItemFailures list", {"batchItemFailures": None}),
    ("An empty EventResponse", {}),
    ("A null EventResponse", None),
]
# "Lambda treats a batch as a complete failure if your function returns any of the following"
FAILURE = [
    ("An invalid JSON response", "done"),
    ("An empty string itemIdentifier", {"batchItemFailures": [{"itemIdentifier": ""}]}),
    ("A null itemIdentifier", {"batchItemFailures": [{"itemIdentifier": None}]}),
    ("An itemIdentifier with a bad key name", {"batchItemFailures": [{"identifier": "a"}]}),
    (
        "an itemIdentifier value with a message ID that doesn't exist",
        {"batchItemFailures": [{"itemIdentifier": "a"}, {"itemIdentifier": "x"}]},
    ),
    ("a list that is none", {"batchItemFailures": "a"}),
    ("an item that is none", {"batchItemFailures": ["a"]}),
]


@pytest.mark.parametrize(("sentence", "answer"), SUCCESS)
def test_a_batch_is_a_complete_success_for(sentence, answer):
    assert failed_ids(answer, IDS) == set()


@pytest.mark.parametrize(("sentence", "answer"), FAILURE)
def test_a_batch_is_a_complete_failure_for(sentence, answer):
    assert failed_ids(answer, IDS) == set(IDS)


def test_only_the_messages_that_are_named_have_failed():
    answer = {"batchItemFailures": [{"itemIdentifier": "b"}, {"itemIdentifier": "b"}]}
    assert failed_ids(answer, IDS) == {"b"}


def test_what_is_behind_a_failed_message_of_its_group_comes_again_and_other_groups_do_not():
    groups: dict[str, str | None] = {"a": "g", "b": "h", "c": "g", "d": "h"}
    assert with_later_ones({"a"}, groups) == {"a", "c"}
    assert with_later_ones(set(), groups) == set()
