"""The SQS actions that send and receive messages."""

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.backends.loop import Single, Steps
from penstock.errors import AttemptLapsed, InFlightLimit, PenstockError, QueueDeleted
from penstock.server.sqs.batches import ENTRIES_MAX, check_entries, failure
from penstock.server.sqs.lookup import Caller, QueueLookup
from penstock.server.sqs.receipts import VISIBILITY_S_MAX, ReceiptActions, hidden_ms
from penstock.service import (
    DEDUP_WINDOW_MS,
    PUSHER,
    Batch,
    BatchItem,
    Claim,
    ConfigureQueue,
    Pull,
    Push,
    PushReply,
    QueueInfo,
)
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs import model as model
from penstock.wire.sqs.attributes import KNOWN as KNOWN_QUEUE_ATTRIBUTES
from penstock.wire.sqs.attributes import SCOPE, scope_asked
from penstock.wire.sqs.errors import Refusal, invalid_value, missing
from penstock.wire.sqs.message import (
    SENDER,
    TRACE,
    attributes_digest,
    body_bytes,
    body_text,
    check_identifier,
    digest,
    read_attributes,
    read_trace,
    sequence_number,
    show_attributes,
    system_attributes,
)

BATCH_BYTES_MAX: Final = 1_048_576
# A receive of several messages ends before the one that brings it above this: encoding ten
# messages of 1 MiB would keep the event loop from other requests for up to 290 ms.
RECEIVE_BYTES_MAX: Final = 2 * 1_048_576
DELAY_S_MAX: Final = 900
WAIT_S_MAX: Final = 20
ATTEMPTS_MAX: Final = 100_000
_SYSTEM_ATTRIBUTES: Final = frozenset(
    {
        "All",
        "SenderId",
        "SentTimestamp",
        "ApproximateReceiveCount",
        "ApproximateFirstReceiveTimestamp",
        "SequenceNumber",
        "MessageDeduplicationId",
        "MessageGroupId",
        "AWSTraceHeader",
        "DeadLetterQueueSourceArn",
    }
)


_NO_NAMES: Final[frozenset[str]] = frozenset()


class MessageActions:
    """SendMessage, SendMessageBatch and ReceiveMessage."""

    def __init__(self, lookup: QueueLookup, receipts: ReceiptActions) -> None:
        self._lookup = lookup
        self._known = lookup.known
        self._locate = lookup.locate
        self._now_ms = lookup.now_ms
        self._note_receive = receipts.note_receive
        self._default_account = lookup.directory.default.account
        self._names_pushers = "history" not in lookup.service.LACKS
        # When each attempt id was first used, by queue; in memory only.
        self._attempted_at_ms: dict[tuple[str, int, str], int] = {}

    # Sending.

    def send(
        self, asked: model.SendMessageRequest, caller: Caller
    ) -> Single | Steps[model.SendResult]:
        """SendMessage."""
        queue = self._known(asked.queue_url or "", caller)
        if queue is None or SCOPE in queue.settings.annotations:
            return self._send_by_steps(asked, caller)
        push = self._push(queue, asked, caller)
        return push, self._sent, (asked, push, queue.settings.fifo)

    def _send_by_steps(
        self, asked: model.SendMessageRequest, caller: Caller
    ) -> Steps[model.SendResult]:
        """SendMessage to a queue that must be looked up, or whose scope may change first."""
        queue = yield from self._locate(asked.queue_url or "", caller)
        if SCOPE in queue.settings.annotations:
            queue = yield from self._apply_scope(queue)
        push = self._push(queue, asked, caller)
        reply = yield push
        return self._sent((asked, push, queue.settings.fifo), reply, None)

    def _sent(
        self,
        context: tuple[model.SendMessageRequest, Push, bool],
        reply: PushReply,
        error: PenstockError | None,
    ) -> model.SendResult:
        if error is not None:
            raise error
        asked, push, fifo = context
        result = model.SendResult(digest(push.body), reply.id)
        if push.attributes or push.context:
            result.md5_of_message_attributes, result.md5_of_message_system_attributes = _digests(
                asked
            )
        if fifo:
            result.sequence_number = sequence_number(reply.sequence)
        return result

    def _push(
        self,
        queue: QueueInfo,
        asked: model.SendMessageRequest | model.SendEntry,
        caller: Caller,
        place: int = 0,
    ) -> Push:
        """The command; `place` is that of the entry in its batch, counted from 1."""
        settings = queue.settings
        if place and not asked.message_body:
            raise missing(f"SendMessageBatchRequestEntry.{place}.MessageBody")
        body = body_bytes(asked.message_body)
        size_bytes = len(body)
        attributes = context = None
        if asked.message_attributes:
            attributes, context, extra_bytes = read_attributes(asked.message_attributes)
            size_bytes += extra_bytes
        if size_bytes > settings.body_bytes_max:
            raise Refusal(
                faults.INVALID_PARAMETER_VALUE,
                f"One or more parameters {'cannot be validated' if place else 'are invalid'}. "
                f"Reason: Message must be shorter than {settings.body_bytes_max} bytes.",
            )
        if asked.message_system_attributes:
            context = {**(context or {}), TRACE: read_trace(asked.message_system_attributes)}
        elif caller.trace is not None:
            context = {**(context or {}), TRACE: caller.trace}
        if caller.owner.account != self._default_account:
            context = {**(context or {}), SENDER: caller.owner.account}
        # A message without attributes is stored in less time: its sender is kept with it only where
        # the sender is known by a key.
        if (attributes is not None or caller.confined) and self._names_pushers:
            context = {**(context or {}), PUSHER: caller.holder}
        group = asked.message_group_id
        if group is not None:
            check_identifier(group, "MessageGroupId")
        dedup_id = asked.message_deduplication_id
        if dedup_id is not None:
            check_identifier(dedup_id, "MessageDeduplicationId")
        delay_ms = None if asked.delay_seconds is None else _delay_ms(asked.delay_seconds)
        if settings.fifo:
            _check_fifo(settings.dedup_by_content, group, dedup_id, delay_ms)
            delay_ms = None
        elif dedup_id is not None:
            raise invalid_value(
                dedup_id,
                "MessageDeduplicationId",
                "The request include parameter that is not valid for this queue type.",
            )
        return Push(queue.queue, body, delay_ms, 0, None, dedup_id, group, attributes, context)

    def _apply_scope(self, queue: QueueInfo) -> Steps[QueueInfo]:
        """Applies a scope of deduplication that was set earlier, if its time has come."""
        per_group, from_ms = scope_asked(queue.settings)
        if from_ms > self._now_ms():
            return queue
        annotations = dict(queue.settings.annotations)
        del annotations[SCOPE]
        changes = {"dedup_per_group": per_group, "annotations": annotations}
        changed: QueueInfo = yield ConfigureQueue(queue.queue, changes)
        return changed

    def send_batch(
        self, asked: model.SendMessageBatchRequest, caller: Caller
    ) -> Steps[model.BatchResult]:
        """SendMessageBatch."""
        url = asked.queue_url or ""
        queue = self._known(url, caller)
        if queue is None:
            queue = yield from self._locate(url, caller)
        entries = check_entries(asked.entries, "SendMessageBatchRequestEntry")
        fifo = queue.settings.fifo
        if fifo:
            _check_fifo_entries(entries, queue.settings.dedup_by_content)
        _check_batch_bytes(entries)
        if fifo and SCOPE in queue.settings.annotations:
            queue = yield from self._apply_scope(queue)
        pushes: list[Push | Refusal] = []
        for place, entry in enumerate(entries, 1):
            try:
                pushes.append(self._push(queue, entry, caller, place))
            except Refusal as refusal:
                pushes.append(refusal)
        items: list[BatchItem] = [each for each in pushes if isinstance(each, Push)]
        replies = iter((yield Batch(items)) if items else ())
        result = model.BatchResult([], [])
        for entry, push in zip(entries, pushes, strict=True):
            if isinstance(push, Refusal):
                result.failed.append(failure(entry.id or "", push))
                continue
            reply = next(replies)
            if type(reply) is not PushReply:
                result.failed.append(failure(entry.id or "", reply))
                continue
            sent = model.SendResultEntry(entry.id, reply.id, digest(push.body))
            if push.attributes or push.context:
                (
                    sent.md5_of_message_attributes,
                    sent.md5_of_message_system_attributes,
                ) = _digests(entry)
            if fifo:
                sent.sequence_number = sequence_number(reply.sequence)
            result.successful.append(sent)
        return result

    # Receiving.

    def receive(
        self, asked: model.ReceiveMessageRequest, caller: Caller
    ) -> Single | Steps[model.ReceiveResult]:
        """ReceiveMessage."""
        queue = self._known(asked.queue_url or "", caller)
        if queue is None or asked.receive_request_attempt_id is not None:
            return self._receive_by_steps(asked, caller)
        pull = self._pull(queue, asked, caller.holder)
        return pull, self._received, (asked, pull, _names_wanted(asked), queue.settings.fifo)

    def _receive_by_steps(
        self, asked: model.ReceiveMessageRequest, caller: Caller
    ) -> Steps[model.ReceiveResult]:
        """ReceiveMessage from a queue that must be looked up, or with an attempt id."""
        queue = yield from self._locate(asked.queue_url or "", caller)
        pull = self._pull(queue, asked, caller.holder)
        context = (asked, pull, _names_wanted(asked), queue.settings.fifo)
        try:
            if pull.attempt_id is None:
                claims = yield pull
            else:
                claims = yield from self._pull_attempt(queue, pull)
        except PenstockError as error:
            return self._received(context, [], error)
        return self._received(context, claims, None)

    def _received(
        self,
        context: tuple[model.ReceiveMessageRequest, Pull, frozenset[str], bool],
        claims: list[Claim],
        error: PenstockError | None,
    ) -> model.ReceiveResult:
        asked, pull, names, fifo = context
        if error is not None:
            # As on Amazon SQS: only a short poll of a standard queue gets the error of the
            # in-flight limit, and a queue that was deleted during the wait gives no error.
            is_silent = isinstance(error, InFlightLimit) and (pull.wait_ms or fifo)
            if not is_silent and not isinstance(error, QueueDeleted):
                raise error
            claims = []
        wanted = asked.message_attribute_names
        return model.ReceiveResult([self._shown(claim, names, wanted, fifo) for claim in claims])

    def _pull(self, queue: QueueInfo, asked: model.ReceiveMessageRequest, holder: str) -> Pull:
        limit = asked.max_number_of_messages
        if limit is None:
            limit = 1
        elif not 1 <= limit <= ENTRIES_MAX:
            raise invalid_value(
                limit, "MaxNumberOfMessages", "Must be between 1 and 10, if provided."
            )
        visibility_ms = None
        if asked.visibility_timeout is not None:
            reason = f"Must be >= 0 and <= {VISIBILITY_S_MAX}, if provided."
            visibility_ms = hidden_ms(asked.visibility_timeout, reason)
        wait_s = asked.wait_time_seconds
        if wait_s is None:
            wait_ms = queue.settings.wait_ms
        elif 0 <= wait_s <= WAIT_S_MAX:
            wait_ms = wait_s * 1_000
        else:
            raise invalid_value(wait_s, "WaitTimeSeconds", "Must be >= 0 and <= 20, if provided.")
        attempt_id = asked.receive_request_attempt_id
        if attempt_id is not None:
            check_identifier(attempt_id, "ReceiveRequestAttemptId")
            if not queue.settings.fifo:
                raise invalid_value(
                    attempt_id,
                    "ReceiveRequestAttemptId",
                    "The request include parameter that is not valid for this queue type.",
                )
        bytes_max = None if limit == 1 else RECEIVE_BYTES_MAX
        return Pull(queue.queue, limit, visibility_ms, wait_ms, attempt_id, holder, bytes_max)

    def _pull_attempt(self, queue: QueueInfo, pull: Pull) -> Steps[list[Claim]]:
        """The claims of an attempt; repeating it restarts their visibility timeout."""
        now_ms = self._now_ms()
        key = (queue.queue, queue.created_at_ms, pull.attempt_id or "")
        first_ms = self._attempted_at_ms.get(key, now_ms - DEDUP_WINDOW_MS)
        within_window = now_ms - first_ms < DEDUP_WINDOW_MS
        try:
            claims: list[Claim] = yield msgspec.structs.replace(pull, renew=True)
        except AttemptLapsed:
            if within_window:
                raise invalid_value(
                    pull.attempt_id,
                    "ReceiveRequestAttemptId",
                    "The receiveRequestAttemptId is not valid anymore since the receive call is "
                    "not retryable.",
                ) from None
            # After five minutes the id has no effect: this is a receive without one.
            claims = yield msgspec.structs.replace(pull, attempt_id=None)
            return claims
        if claims and not within_window:
            if len(self._attempted_at_ms) >= ATTEMPTS_MAX:
                self._attempted_at_ms.clear()
            self._attempted_at_ms[key] = now_ms
        return claims

    def _shown(
        self, claim: Claim, names: frozenset[str], wanted: list[str] | None, fifo: bool
    ) -> model.Received:
        body = claim.body
        try:
            text = body.decode()
        except UnicodeDecodeError:
            text = body_text(body)
            body = text.encode()
        receipt = str(claim.proof)
        if claim.epoch > 1:
            self._note_receive(receipt)
        received = model.Received(claim.id, receipt, digest(body), text)
        if names:
            received.attributes = self._system_attributes(claim, names, fifo) or None
        if wanted and claim.attributes:
            shown = show_attributes(claim.attributes, claim.context, wanted)
            if shown:
                received.message_attributes = shown
                received.md5_of_message_attributes = attributes_digest(shown)
        return received

    def _system_attributes(self, claim: Claim, names: frozenset[str], fifo: bool) -> dict[str, str]:
        source_arn = None if claim.source is None else self._lookup.arn(claim.source)
        everything = system_attributes(claim, fifo, self._default_account, source_arn)
        if "All" in names:
            return everything
        return {name: value for name, value in everything.items() if name in names}


def _names_wanted(asked: model.ReceiveMessageRequest) -> frozenset[str]:
    """The system attributes a receiver asks for. Raises Refusal."""
    if not asked.attribute_names and not asked.message_system_attribute_names:
        return _NO_NAMES
    names = frozenset((asked.attribute_names or []) + (asked.message_system_attribute_names or []))
    for name in names:
        if name not in _SYSTEM_ATTRIBUTES and name not in KNOWN_QUEUE_ATTRIBUTES:
            raise Refusal(faults.INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {name}.")
    return names


def _digests(asked: model.SendMessageRequest | model.SendEntry) -> tuple[str | None, str | None]:
    """The digests of a message's attributes and of its system attributes, where it has any."""
    given, system = asked.message_attributes, asked.message_system_attributes
    return (
        attributes_digest(given) if given else None,
        attributes_digest(system) if system else None,
    )


def _delay_ms(delay_s: int) -> int:
    if not 0 <= delay_s <= DELAY_S_MAX:
        raise invalid_value(
            delay_s, "DelaySeconds", f"DelaySeconds must be >= 0 and <= {DELAY_S_MAX}."
        )
    return delay_s * 1_000


def _check_fifo(
    by_content: bool, group: str | None, dedup_id: str | None, delay_ms: int | None
) -> None:
    """The requirements of a FIFO queue for a message; the delay is always the queue's own."""
    if not group:
        raise missing("MessageGroupId")
    if dedup_id is None and not by_content:
        raise _needs_dedup()
    if delay_ms:
        raise invalid_value(
            delay_ms // 1_000,
            "DelaySeconds",
            "The request include parameter that is not valid for this queue type.",
        )


def _check_fifo_entries(entries: Sequence[model.SendEntry], by_content: bool) -> None:
    """The requirements of a FIFO queue that are checked for all messages of a batch first."""
    for entry in entries:
        if entry.message_group_id is None:
            raise Refusal(
                faults.INVALID_PARAMETER_VALUE,
                "The request must contain the parameter MessageGroupId.",
            )
        if entry.message_deduplication_id is None and not by_content:
            raise _needs_dedup()


def _needs_dedup() -> Refusal:
    return Refusal(
        faults.INVALID_PARAMETER_VALUE,
        "The queue should either have ContentBasedDeduplication enabled or "
        "MessageDeduplicationId provided explicitly",
    )


def _check_batch_bytes(entries: Sequence[model.SendEntry]) -> None:
    total_bytes = 0
    for entry in entries:
        body = entry.message_body or ""
        # The length of ASCII is known without encoding it.
        total_bytes += len(body) if body.isascii() else len(body.encode())
        if not entry.message_attributes:
            continue
        for name, value in entry.message_attributes.items():
            content = value.string_value or ""
            total_bytes += len(name.encode()) + len((value.data_type or "").encode())
            total_bytes += len(content.encode()) + len(value.binary_value or b"")
    if total_bytes > BATCH_BYTES_MAX:
        raise Refusal(
            faults.BATCH_REQUEST_TOO_LONG,
            f"Batch requests cannot be longer than {BATCH_BYTES_MAX} bytes. "
            f"You have sent {total_bytes} bytes.",
        )
