"""The SQS actions on a received message: delete it, or change how long it stays hidden."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock.backends.loop import Single, Steps
from penstock.errors import ClaimTooLong, MessageGone, PenstockError, StaleReceipt
from penstock.server.sqs.batches import check_entries, failure
from penstock.server.sqs.lookup import Caller, QueueLookup, refusal_of
from penstock.service import Batch, BatchItem, Delete, Extend, QueueInfo, Release
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs import model as model
from penstock.wire.sqs.errors import Refusal, invalid_value, missing

VISIBILITY_S_MAX: Final = 43_200
# The annotation of a standard queue that refuses late receipts, as a FIFO queue does.
STRICT_RECEIPTS: Final = "strict-receipts"
RECEIVES_NOTED_MAX: Final = 100_000
_VISIBILITY_MS_MAX: Final = VISIBILITY_S_MAX * 1_000


class ReceiptActions:
    """DeleteMessage, ChangeMessageVisibility, and both of them in batches."""

    def __init__(self, lookup: QueueLookup) -> None:
        self._known = lookup.known
        self._locate = lookup.locate
        self._now_ms = lookup.now_ms
        self._all_strict = lookup.strict_receipts
        # When messages that had been received before were received, by receipt; in memory only.
        self._received_again_at_ms: dict[str, int] = {}

    def note_receive(self, receipt: str) -> None:
        """Stores the time of a later receive; the service stores that of the first."""
        if len(self._received_again_at_ms) >= RECEIVES_NOTED_MAX:
            self._received_again_at_ms.clear()
        self._received_again_at_ms[receipt] = self._now_ms()

    def delete(self, asked: model.DeleteMessageRequest, caller: Caller) -> Single | Steps[None]:
        """DeleteMessage."""
        queue = self._known(asked.queue_url or "", caller)
        if queue is None:
            return self._delete_by_steps(asked, caller)
        receipt = _given(asked.receipt)
        strict = self._is_strict(queue)
        return Delete(queue.queue, receipt, not strict), _deleted, (receipt, strict)

    def _delete_by_steps(self, asked: model.DeleteMessageRequest, caller: Caller) -> Steps[None]:
        """DeleteMessage from a queue that must be looked up."""
        queue = yield from self._locate(asked.queue_url or "", caller)
        receipt = _given(asked.receipt)
        strict = self._is_strict(queue)
        context = (receipt, strict)
        try:
            deleted = yield Delete(queue.queue, receipt, not strict)
        except PenstockError as error:
            _deleted(context, None, error)
        else:
            _deleted(context, deleted, None)

    def delete_batch(
        self, asked: model.DeleteMessageBatchRequest, caller: Caller
    ) -> Steps[model.BatchResult]:
        """DeleteMessageBatch."""
        url = asked.queue_url or ""
        queue = self._known(url, caller)
        if queue is None:
            queue = yield from self._locate(url, caller)
        entries = check_entries(asked.entries, "DeleteMessageBatchRequestEntry")
        strict = self._is_strict(queue)
        items: list[BatchItem | Refusal] = []
        for entry in entries:
            try:
                items.append(Delete(queue.queue, _given(entry.receipt), not strict))
            except Refusal as refusal:
                items.append(refusal)
        return (
            yield from _batch(
                entries,
                items,
                lambda error, entry: _refused_delete(error, entry.receipt or "", strict),
            )
        )

    def change(self, asked: model.ChangeMessageVisibilityRequest, caller: Caller) -> Steps[None]:
        """ChangeMessageVisibility."""
        url = asked.queue_url or ""
        queue = self._known(url, caller)
        if queue is None:
            queue = yield from self._locate(url, caller)
        receipt = _given(asked.receipt)
        command = self._change(queue, receipt, asked.visibility_timeout)
        try:
            yield command
        except PenstockError as error:
            raise _refused_change(error, asked, self._is_strict(queue)) from None

    def change_batch(
        self, asked: model.ChangeMessageVisibilityBatchRequest, caller: Caller
    ) -> Steps[model.BatchResult]:
        """ChangeMessageVisibilityBatch."""
        url = asked.queue_url or ""
        queue = self._known(url, caller)
        if queue is None:
            queue = yield from self._locate(url, caller)
        entries = check_entries(asked.entries, "ChangeMessageVisibilityBatchRequestEntry")
        items: list[BatchItem | Refusal] = []
        for place, entry in enumerate(entries, 1):
            try:
                if entry.visibility_timeout is None:
                    raise missing(
                        f"ChangeMessageVisibilityBatchRequestEntry.{place}.VisibilityTimeout"
                    )
                items.append(
                    self._change(queue, _given(entry.receipt), entry.visibility_timeout, place)
                )
            except Refusal as refusal:
                items.append(refusal)
        strict = self._is_strict(queue)
        return (
            yield from _batch(
                entries, items, lambda error, entry: _refused_change(error, entry, strict)
            )
        )

    def _is_strict(self, queue: QueueInfo) -> bool:
        """Whether a receipt is refused once its claim has ended, also if nobody has a new one."""
        settings = queue.settings
        if settings.fifo or self._all_strict:
            return True
        notes = settings.annotations
        return STRICT_RECEIPTS in notes and notes[STRICT_RECEIPTS] != "0"

    def _change(
        self, queue: QueueInfo, receipt: str, visibility_s: int | None, place: int = 0
    ) -> Extend | Release:
        """The command that changes how long a message stays hidden. Raises Refusal.

        It is hidden for twelve hours at most, counted from its receive.
        """
        reason = f"Must be between 0 and {VISIBILITY_S_MAX}."
        if place:
            reason = f"VisibilityTimeout must be an integer between 0 and {VISIBILITY_S_MAX}."
        visibility_ms = hidden_ms(visibility_s or 0, reason)
        if visibility_ms == 0:
            return Release(queue.queue, receipt, late=not self._is_strict(queue))
        received_at_ms = self._received_again_at_ms.get(receipt)
        if received_at_ms is not None:
            held_ms = self._now_ms() + visibility_ms - received_at_ms
            if held_ms > _VISIBILITY_MS_MAX:
                raise _hidden_too_long(visibility_s or 0)
        late = not self._is_strict(queue)
        return Extend(queue.queue, receipt, visibility_ms, late, _VISIBILITY_MS_MAX)


def _batch(
    entries: Sequence[Any],
    items: Sequence[BatchItem | Refusal],
    refused: Callable[[PenstockError, Any], Refusal | None],
) -> Steps[model.BatchResult]:
    """Runs the items that were not refused already; `refused` translates an entry's error."""
    accepted = [item for item in items if not isinstance(item, Refusal)]
    replies = iter((yield Batch(accepted)) if accepted else ())
    result = model.BatchResult([], [])
    for entry, item in zip(entries, items, strict=True):
        reply = item if type(item) is Refusal else next(replies)
        # Most replies are plain values: True, a deadline, None.
        if isinstance(reply, Exception):
            if isinstance(reply, PenstockError):
                reply = refused(reply, entry)
            if reply is not None:
                result.failed.append(failure(entry.id, reply))
                continue
        result.successful.append(model.ResultEntry(entry.id))
    return result


def _given(receipt: str | None) -> str:
    if not receipt:
        raise missing("ReceiptHandle")
    return receipt


def hidden_ms(visibility_s: int, reason: str) -> int:
    """How long a message is to be hidden. Raises Refusal."""
    if not 0 <= visibility_s <= VISIBILITY_S_MAX:
        raise invalid_value(visibility_s, "VisibilityTimeout", reason)
    return visibility_s * 1_000


def _hidden_too_long(visibility_s: int) -> Refusal:
    return invalid_value(
        visibility_s,
        "VisibilityTimeout",
        "Total VisibilityTimeout for the message is beyond the limit "
        f"[{VISIBILITY_S_MAX} seconds].",
    )


def _deleted(context: tuple[str, bool], _: bool | None, error: PenstockError | None) -> None:
    """The empty result of a delete. Raises Refusal."""
    if error is not None:
        refusal = _refused_delete(error, *context)
        if refusal is not None:
            raise refusal


def _refused_delete(error: PenstockError, receipt: str, strict: bool) -> Refusal | None:
    """The refusal, or None: a standard queue accepts an old receipt, and deletes nothing."""
    if isinstance(error, StaleReceipt):
        if not strict:
            return None
        return invalid_value(receipt, "ReceiptHandle", "The receipt handle has expired.")
    return _refused_receipt(error, receipt)


def _refused_change(
    error: PenstockError,
    asked: model.ChangeMessageVisibilityRequest | model.ChangeEntry,
    strict: bool,
) -> Refusal:
    """A receipt is too old once the message is gone or was received again."""
    receipt = asked.receipt or ""
    if isinstance(error, ClaimTooLong):
        return _hidden_too_long(asked.visibility_timeout or 0)
    if isinstance(error, MessageGone) or (isinstance(error, StaleReceipt) and not strict):
        return invalid_value(
            receipt,
            "ReceiptHandle",
            "Message does not exist or is not available for visibility timeout change.",
        )
    if isinstance(error, StaleReceipt):
        return Refusal(faults.MESSAGE_NOT_INFLIGHT, "The message referred to isn't in flight.")
    return _refused_receipt(error, receipt)


def _refused_receipt(error: PenstockError, receipt: str) -> Refusal:
    refusal = refusal_of(error)
    if refusal.fault is not faults.RECEIPT_IS_INVALID:
        return refusal
    return Refusal(
        faults.RECEIPT_IS_INVALID,
        f'The input receipt handle "{receipt}" is not a valid receipt handle.',
    )
