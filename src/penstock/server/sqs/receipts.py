"""The SQS actions that end or prolong a receive: delete and change visibility, alone or by ten."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock.core.queue import QueueState
from penstock.errors import MessageGone, PenstockError, StaleReceipt
from penstock.server.sqs.batches import check_entries, failure
from penstock.server.sqs.store import Caller, Store, refusal_of
from penstock.service import Batch, BatchItem, Claim, Delete, Extend, Release
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs import model as model
from penstock.wire.sqs.errors import Refusal, invalid_value, missing

VISIBILITY_S_MAX: Final = 43_200
RECEIVES_NOTED_MAX: Final = 100_000


class ReceiptActions:
    """The actions on what was received."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engine = store.engine
        self._locate = store.locate
        # When messages were last received that had been received before; in memory only.
        self._received_again_at_ms: dict[tuple[int, int], int] = {}

    def note_receive(self, claim: Claim) -> None:
        """The first receive is kept with the message; of later ones only this process knows."""
        if len(self._received_again_at_ms) >= RECEIVES_NOTED_MAX:
            self._received_again_at_ms.clear()
        self._received_again_at_ms[claim.proof.queue, claim.proof.number] = self._store.now_ms()

    def delete(self, asked: model.DeleteMessageRequest, caller: Caller) -> None:
        """DeleteMessage."""
        queue = self._locate(asked.queue_url or "", caller)
        receipt = _given(asked.receipt)
        try:
            self._engine.submit(Delete(queue.name, receipt, late=True))
        except PenstockError as error:
            refusal = _refused_delete(error, receipt, queue.settings.fifo)
            if refusal is not None:
                raise refusal from None

    def delete_batch(
        self, asked: model.DeleteMessageBatchRequest, caller: Caller
    ) -> model.BatchResult:
        """DeleteMessageBatch."""
        queue = self._locate(asked.queue_url or "", caller)
        entries = check_entries(asked.entries, "DeleteMessageBatchRequestEntry")
        items: list[BatchItem | Refusal] = []
        for entry in entries:
            try:
                items.append(Delete(queue.name, _given(entry.receipt), late=True))
            except Refusal as refusal:
                items.append(refusal)
        fifo = queue.settings.fifo
        return self._batch(
            entries, items, lambda error, receipt: _refused_delete(error, receipt, fifo)
        )

    def change(self, asked: model.ChangeMessageVisibilityRequest, caller: Caller) -> None:
        """ChangeMessageVisibility."""
        queue = self._locate(asked.queue_url or "", caller)
        receipt = _given(asked.receipt)
        try:
            self._engine.submit(self._changed(queue, receipt, asked.visibility_timeout))
        except PenstockError as error:
            raise _refused_change(error, receipt, queue.settings.fifo) from None

    def change_batch(
        self, asked: model.ChangeMessageVisibilityBatchRequest, caller: Caller
    ) -> model.BatchResult:
        """ChangeMessageVisibilityBatch."""
        queue = self._locate(asked.queue_url or "", caller)
        entries = check_entries(asked.entries, "ChangeMessageVisibilityBatchRequestEntry")
        items: list[BatchItem | Refusal] = []
        for place, entry in enumerate(entries, 1):
            try:
                if entry.visibility_timeout is None:
                    raise missing(
                        f"ChangeMessageVisibilityBatchRequestEntry.{place}.VisibilityTimeout"
                    )
                items.append(
                    self._changed(queue, _given(entry.receipt), entry.visibility_timeout, place)
                )
            except Refusal as refusal:
                items.append(refusal)
        fifo = queue.settings.fifo
        return self._batch(
            entries, items, lambda error, receipt: _refused_change(error, receipt, fifo)
        )

    def _changed(
        self, queue: QueueState, receipt: str, visibility_s: int | None, place: int = 0
    ) -> Extend | Release:
        """The command that changes how long a message stays hidden. Raises Refusal."""
        reason = f"Must be between 0 and {VISIBILITY_S_MAX}."
        if place:
            reason = f"VisibilityTimeout must be an integer between 0 and {VISIBILITY_S_MAX}."
        visibility_ms = hidden_ms(visibility_s or 0, reason)
        if visibility_ms == 0:
            return Release(queue.name, receipt, late=True)
        self._check_total(queue, receipt, visibility_ms)
        return Extend(queue.name, receipt, visibility_ms, late=True)

    def _check_total(self, queue: QueueState, receipt: str, visibility_ms: int) -> None:
        """A message is hidden for twelve hours at most, counted from its receive."""
        try:
            delivery = self._engine.held(queue.name, receipt)
        except PenstockError:
            return
        if delivery is None:
            return
        received_at_ms = delivery.first_claimed_at_ms
        if delivery.epoch > 1:
            key = (queue.number, delivery.number)
            received_at_ms = self._received_again_at_ms.get(key, self._store.now_ms())
        total_ms = self._store.now_ms() + visibility_ms - received_at_ms
        if total_ms > VISIBILITY_S_MAX * 1_000:
            raise invalid_value(
                visibility_ms // 1_000,
                "VisibilityTimeout",
                "Total VisibilityTimeout for the message is beyond the limit "
                f"[{VISIBILITY_S_MAX} seconds].",
            )

    def _batch(
        self,
        entries: Sequence[Any],
        items: Sequence[BatchItem | Refusal],
        refused: Callable[[PenstockError, str], Refusal | None],
    ) -> model.BatchResult:
        sound = [item for item in items if not isinstance(item, Refusal)]
        replies = iter(self._store.submit(Batch(sound)))
        result = model.BatchResult([], [])
        for entry, item in zip(entries, items, strict=True):
            reply = item if type(item) is Refusal else next(replies)
            # Most replies are plain values: True, a deadline, nothing.
            if isinstance(reply, Exception):
                if isinstance(reply, PenstockError):
                    reply = refused(reply, entry.receipt or "")
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


def _refused_delete(error: PenstockError, receipt: str, fifo: bool) -> Refusal | None:
    """An old receipt deletes nothing: a standard queue does not say so, a FIFO queue does."""
    if isinstance(error, StaleReceipt):
        if not fifo:
            return None
        return invalid_value(receipt, "ReceiptHandle", "The receipt handle has expired.")
    return _refused_receipt(error, receipt)


def _refused_change(error: PenstockError, receipt: str, fifo: bool) -> Refusal:
    """A receipt is too old once the message is gone or was received again."""
    if isinstance(error, MessageGone) or (isinstance(error, StaleReceipt) and not fifo):
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
    if refusal.fault is faults.RECEIPT_IS_INVALID:
        refusal.message = f'The input receipt handle "{receipt}" is not a valid receipt handle.'
    return refusal
