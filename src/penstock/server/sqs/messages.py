"""The SQS actions by which messages come and are lent: send, alone or by ten, and receive."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from penstock.core.queue import QueueState
from penstock.errors import AttemptLapsed, InFlightLimit, PenstockError
from penstock.server.sqs.batches import ENTRIES_MAX, check_entries, failure
from penstock.server.sqs.receipts import VISIBILITY_S_MAX, ReceiptActions, hidden_ms
from penstock.server.sqs.store import Caller, Store, refusal_of
from penstock.service import (
    DEDUP_WINDOW_MS,
    Batch,
    BatchItem,
    Claim,
    ConfigureQueue,
    Extend,
    Pull,
    Push,
    PushReply,
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
    show_attributes,
)

BATCH_BYTES_MAX: Final = 1_048_576
DELAY_S_MAX: Final = 900
WAIT_S_MAX: Final = 20
ATTEMPTS_MAX: Final = 100_000
# Twenty digits whatever is added, and no run of zeros that could be taken for an account's number.
_SEQUENCE_BEGINNING: Final = 3 * 2**62
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


class PendingReceive(NamedTuple):
    """A receive that found nothing and may wait; `finish` makes its result of what it gets."""

    pull: Pull
    finish: Callable[[list[Claim]], model.ReceiveResult]


class MessageActions:
    """The actions on messages."""

    def __init__(self, store: Store, receipts: ReceiptActions) -> None:
        self._store = store
        self._engine = store.engine
        self._locate = store.locate
        self._note_receive = receipts.note_receive
        self._default_account = store.directory.default.account
        # When each attempt id was first used; in memory only.
        self._attempted_at_ms: dict[tuple[int, str], int] = {}

    # Sending.

    def send(self, asked: model.SendMessageRequest, caller: Caller) -> model.SendResult:
        """SendMessage."""
        queue = self._locate(asked.queue_url or "", caller)
        push = self._push(queue, asked, caller)
        try:
            reply = self._engine.submit(push)
        except PenstockError as error:
            raise refusal_of(error) from None
        result = model.SendResult(digest(push.body), reply.id)
        if push.attributes or push.context:
            result.md5_of_message_attributes, result.md5_of_message_system_attributes = _digests(
                asked
            )
        if queue.settings.fifo:
            result.sequence_number = _sequence_number(reply.sequence)
        return result

    def _push(
        self,
        queue: QueueState,
        asked: model.SendMessageRequest | model.SendEntry,
        caller: Caller,
        place: int = 0,
    ) -> Push:
        """What is to be pushed; `place` is the entry's in its batch, counted from 1."""
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
            if SCOPE in settings.annotations:
                self._heed_scope(queue)
        elif dedup_id is not None:
            raise invalid_value(
                dedup_id,
                "MessageDeduplicationId",
                "The request include parameter that is not valid for this queue type.",
            )
        return Push(queue.name, body, delay_ms, 0, None, dedup_id, group, attributes, context)

    def _heed_scope(self, queue: QueueState) -> None:
        """The scope of deduplication that was asked for a while ago counts from now on."""
        per_group, from_ms = scope_asked(queue.settings)
        if from_ms <= self._store.now_ms():
            annotations = dict(queue.settings.annotations)
            del annotations[SCOPE]
            changes = {"dedup_per_group": per_group, "annotations": annotations}
            self._store.submit(ConfigureQueue(queue.name, changes))

    def send_batch(self, asked: model.SendMessageBatchRequest, caller: Caller) -> model.BatchResult:
        """SendMessageBatch."""
        queue = self._locate(asked.queue_url or "", caller)
        entries = check_entries(asked.entries, "SendMessageBatchRequestEntry")
        fifo = queue.settings.fifo
        if fifo:
            _check_fifo_entries(entries, queue.settings.dedup_by_content)
        _check_batch_bytes(entries)
        pushes: list[Push | Refusal] = []
        for place, entry in enumerate(entries, 1):
            try:
                pushes.append(self._push(queue, entry, caller, place))
            except Refusal as refusal:
                pushes.append(refusal)
        items: list[BatchItem] = [each for each in pushes if isinstance(each, Push)]
        replies = iter(self._store.submit(Batch(items)))
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
                sent.sequence_number = _sequence_number(reply.sequence)
            result.successful.append(sent)
        return result

    # Receiving.

    def receive(
        self, asked: model.ReceiveMessageRequest, caller: Caller
    ) -> model.ReceiveResult | PendingReceive:
        """ReceiveMessage; a PendingReceive if there is nothing yet and the caller will wait."""
        queue = self._locate(asked.queue_url or "", caller)
        pull = self._pull(queue, asked)
        names = _names_wanted(asked)
        try:
            claims = self._claims(queue, pull)
        except InFlightLimit:
            # Only a short poll of a standard queue is told; all others just find nothing.
            if not pull.wait_ms and not queue.settings.fifo:
                raise Refusal(faults.OVER_LIMIT, "Too many messages in flight.") from None
            claims = []
        except PenstockError as error:
            raise refusal_of(error) from None
        if not claims and pull.wait_ms:
            if pull.attempt_id is not None:
                self._note_attempt(queue, pull.attempt_id)
            return PendingReceive(
                pull, partial(self._show, queue, asked.message_attribute_names, names)
            )
        return self._show(queue, asked.message_attribute_names, names, claims)

    def _pull(self, queue: QueueState, asked: model.ReceiveMessageRequest) -> Pull:
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
        return Pull(queue.name, limit, visibility_ms, wait_ms, attempt_id)

    def _claims(self, queue: QueueState, pull: Pull) -> list[Claim]:
        if pull.attempt_id is None:
            return self._engine.submit(pull)
        now_ms = self._store.now_ms()
        key = (queue.number, pull.attempt_id)
        repeated = bool(queue.attempt(pull.attempt_id, now_ms))
        try:
            claims = self._engine.submit(pull)
        except AttemptLapsed:
            if now_ms - self._attempted_at_ms.get(key, 0) < DEDUP_WINDOW_MS:
                raise invalid_value(
                    pull.attempt_id,
                    "ReceiveRequestAttemptId",
                    "The receiveRequestAttemptId is not valid anymore since the receive call is "
                    "not retryable.",
                ) from None
            # Five minutes on, the id means nothing any more: this is a receive like any other.
            return self._engine.submit(
                Pull(pull.queue, pull.limit, pull.visibility_ms, pull.wait_ms)
            )
        if repeated:
            # A retry begins the time its messages are hidden anew.
            visibility_ms = pull.visibility_ms or queue.settings.visibility_ms
            extends: list[BatchItem] = [
                Extend(queue.name, claim.proof, visibility_ms) for claim in claims
            ]
            self._engine.submit(Batch(extends))
        elif claims:
            self._note_attempt(queue, pull.attempt_id)
        return claims

    def _note_attempt(self, queue: QueueState, attempt_id: str) -> None:
        if len(self._attempted_at_ms) >= ATTEMPTS_MAX:
            self._attempted_at_ms.clear()
        self._attempted_at_ms[queue.number, attempt_id] = self._store.now_ms()

    def _show(
        self,
        queue: QueueState,
        wanted: list[str] | None,
        names: frozenset[str],
        claims: list[Claim],
    ) -> model.ReceiveResult:
        fifo = queue.settings.fifo
        return model.ReceiveResult([self._shown(claim, names, wanted, fifo) for claim in claims])

    def _shown(
        self, claim: Claim, names: frozenset[str], wanted: list[str] | None, fifo: bool
    ) -> model.Received:
        body = claim.body
        try:
            text = body.decode()
        except UnicodeDecodeError:
            text = body_text(body)
            body = text.encode()
        if claim.epoch > 1:
            self._note_receive(claim)
        received = model.Received(claim.id, str(claim.proof), digest(body), text)
        if names:
            received.attributes = self._system_attributes(claim, names, fifo) or None
        if wanted and claim.attributes:
            shown = show_attributes(claim.attributes, claim.context, wanted)
            if shown:
                received.message_attributes = shown
                received.md5_of_message_attributes = attributes_digest(shown)
        return received

    def _system_attributes(self, claim: Claim, names: frozenset[str], fifo: bool) -> dict[str, str]:
        context = claim.context or {}
        everything = {
            "SenderId": context.get(SENDER, self._default_account),
            "ApproximateFirstReceiveTimestamp": str(claim.first_pulled_at_ms or 0),
            # The epoch: receives in the queue a dead letter came from count too. Once it is moved
            # back, it begins anew.
            "ApproximateReceiveCount": str(claim.epoch if claim.source else claim.receives),
            "SentTimestamp": str(claim.pushed_at_ms),
        }
        if fifo:
            everything["SequenceNumber"] = _sequence_number(claim.sequence)
            # A dead letter's is its message id: two that shared one must not seem the same there.
            dedup_id = claim.dedup_id if claim.source is None else claim.id
            everything["MessageDeduplicationId"] = dedup_id or ""
        if claim.group is not None:
            everything["MessageGroupId"] = claim.group
        if TRACE in context:
            everything["AWSTraceHeader"] = context[TRACE]
        if claim.source is not None:
            everything["DeadLetterQueueSourceArn"] = self._store.arn(claim.source)
        if "All" in names:
            return everything
        return {name: value for name, value in everything.items() if name in names}


def _sequence_number(sequence: int) -> str:
    """Twenty digits, as Amazon's have, that grow, as numbers and as text."""
    return str(_SEQUENCE_BEGINNING + sequence)


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
    """What a FIFO queue asks of a message; the delay is always the queue's own."""
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
    """What a FIFO queue asks of every message of a batch before it looks closer at any."""
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
