"""Batches: of sends, deletes and changes of visibility; each entry succeeds or fails by itself."""

from typing import Any

from penstock.testing.sqs.checks import check, expect, require
from penstock.testing.sqs.target import CheckedServer, entries, plain_code

BATCHES = "batches"
BATCH_ID = (
    "A batch entry id can only contain alphanumeric characters, hyphens and underscores. "
    "It can be at most 80 letters long."
)


def _failed(answer: Any) -> list[tuple[str, str, bool]]:
    """Of each failed entry its id, code, and whether it is the sender's fault."""
    return [
        (entry["Id"], plain_code(entry.get("Code", "")), bool(entry.get("SenderFault")))
        for entry in answer.get("Failed", [])
    ]


@check(BATCHES)
def a_batch_of_ten_is_sent(target: CheckedServer) -> None:
    """SendMessageBatch: up to ten messages in one request, each with an answer of its own."""
    url = target.queue()
    answer = target.client.send_message_batch(QueueUrl=url, Entries=entries(10))
    sent = {each["Id"]: each for each in answer["Successful"]}
    expect(sorted(sent), sorted(f"e{number}" for number in range(10)), "the ids")
    require(all(each.get("MD5OfMessageBody") for each in sent.values()), "digests are missing")
    expect(target.all_bodies(url, 10), sorted(f"x{number}" for number in range(10)), "the bodies")


@check(BATCHES)
def an_empty_batch_is_refused(target: CheckedServer) -> None:
    """SendMessageBatch: EmptyBatchRequest."""
    target.refuses(
        target.client.send_message_batch,
        "EmptyBatchRequest",
        "There should be at least one SendMessageBatchRequestEntry in the request.",
        QueueUrl=target.queue(),
        Entries=[],
    )


@check(BATCHES)
def a_batch_of_eleven_is_refused(target: CheckedServer) -> None:
    """SendMessageBatch: TooManyEntriesInBatchRequest."""
    target.refuses(
        target.client.send_message_batch,
        "TooManyEntriesInBatchRequest",
        "Maximum number of entries per request are 10. You have sent 11.",
        QueueUrl=target.queue(),
        Entries=entries(11),
    )


@check(BATCHES)
def the_ids_of_a_batch_are_different(target: CheckedServer) -> None:
    """SendMessageBatch: BatchEntryIdsNotDistinct."""
    target.refuses(
        target.client.send_message_batch,
        "BatchEntryIdsNotDistinct",
        "Id e0 repeated.",
        QueueUrl=target.queue(),
        Entries=entries(1) * 2,
    )


@check(BATCHES)
def the_id_of_an_entry_has_up_to_80_plain_characters(target: CheckedServer) -> None:
    """SendMessageBatch: InvalidBatchEntryId; alphanumeric, hyphens and underscores."""
    url = target.queue()
    good = [{"Id": "aZ0-_".ljust(80, "x"), "MessageBody": "x"}]
    answer = target.client.send_message_batch(QueueUrl=url, Entries=good)
    expect(len(answer.get("Successful", [])), 1, "the number of sent messages")
    for bad in ("", "a" * 81, "a:b", "ü"):
        target.refuses(
            target.client.send_message_batch,
            "InvalidBatchEntryId",
            BATCH_ID,
            QueueUrl=url,
            Entries=[{"Id": bad, "MessageBody": "x"}],
        )


@check(BATCHES)
def batches_of_deletes_and_changes_have_the_same_rules(target: CheckedServer) -> None:
    """DeleteMessageBatch, ChangeMessageVisibilityBatch: the four errors of a whole batch."""
    url = target.queue()
    for call, more in (
        (target.client.delete_message_batch, {}),
        (target.client.change_message_visibility_batch, {"VisibilityTimeout": 1}),
    ):
        entry = {"ReceiptHandle": "x", **more}
        for given, code in (
            ([], "EmptyBatchRequest"),
            ([{"Id": str(n), **entry} for n in range(11)], "TooManyEntriesInBatchRequest"),
            ([{"Id": "a", **entry}] * 2, "BatchEntryIdsNotDistinct"),
            ([{"Id": "a:b", **entry}], "InvalidBatchEntryId"),
        ):
            target.refuses(call, code, QueueUrl=url, Entries=given)


@check(BATCHES)
def a_batch_may_have_one_mebibyte_in_all(target: CheckedServer) -> None:
    """SendMessageBatch: BatchRequestTooLong if all messages together are over 1 MiB."""
    url = target.queue()
    half = "x" * 524_288
    pair = [{"Id": "1", "MessageBody": half}, {"Id": "2", "MessageBody": half}]
    answer = target.client.send_message_batch(QueueUrl=url, Entries=pair)
    expect(len(answer.get("Successful", [])), 2, "the number of sent messages")
    pair[1]["MessageBody"] += "x"
    target.refuses(
        target.client.send_message_batch,
        "BatchRequestTooLong",
        "Batch requests cannot be longer than 1048576 bytes. You have sent 1048577 bytes.",
        QueueUrl=url,
        Entries=pair,
    )
    expect(target.count(url), 2, "the count")


@check(BATCHES)
def bad_entries_fail_and_good_ones_are_sent(target: CheckedServer) -> None:
    """SendMessageBatch: successes and failures are reported entry by entry."""
    url = target.queue(MaximumMessageSize="1024")
    given = [
        {"Id": "good", "MessageBody": "x"},
        {"Id": "large", "MessageBody": "x" * 1_025},
        {"Id": "late", "MessageBody": "x", "DelaySeconds": 901},
        {"Id": "bytes", "MessageBody": "\x00"},
    ]
    answer = target.client.send_message_batch(QueueUrl=url, Entries=given)
    expect([each["Id"] for each in answer.get("Successful", [])], ["good"], "what was sent")
    wanted = [
        ("bytes", "InvalidMessageContents", True),
        ("large", "InvalidParameterValue", True),
        ("late", "InvalidParameterValue", True),
    ]
    expect(sorted(_failed(answer)), wanted, "what failed")
    expect(target.bodies(url), ["x"], "what is received")


@check(BATCHES)
def a_forged_receipt_fails_alone_in_a_batch_of_deletes(target: CheckedServer) -> None:
    """DeleteMessageBatch: the entries with valid receipts are deleted."""
    url = target.queue()
    target.send(url)
    good = {"Id": "good", "ReceiptHandle": target.receive_one(url)["ReceiptHandle"]}
    answer = target.client.delete_message_batch(
        QueueUrl=url, Entries=[{"Id": "forged", "ReceiptHandle": "nonsense"}, good]
    )
    expect([each["Id"] for each in answer.get("Successful", [])], ["good"], "what was deleted")
    expect(_failed(answer), [("forged", "ReceiptHandleIsInvalid", True)], "what failed")
    expect(target.count(url, "NotVisible"), 0, "what is in flight")


@check(BATCHES)
def a_bad_entry_fails_alone_in_a_batch_of_changes(target: CheckedServer) -> None:
    """ChangeMessageVisibilityBatch: the other entries take effect."""
    url = target.queue()
    target.send(url)
    receipt = target.receive_one(url)["ReceiptHandle"]
    answer = target.client.change_message_visibility_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "forged", "ReceiptHandle": "nonsense", "VisibilityTimeout": 1},
            {"Id": "long", "ReceiptHandle": receipt, "VisibilityTimeout": 43_201},
            {"Id": "good", "ReceiptHandle": receipt, "VisibilityTimeout": 0},
        ],
    )
    expect([each["Id"] for each in answer.get("Successful", [])], ["good"], "what was changed")
    wanted = [
        ("forged", "ReceiptHandleIsInvalid", True),
        ("long", "InvalidParameterValue", True),
    ]
    expect(sorted(_failed(answer)), wanted, "what failed")
    target.receive_one(url)
