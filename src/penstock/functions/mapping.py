"""The event source mapping: batches of a queue's messages, each given to an invocation.

As in Lambda: a batch whose invocation succeeds is deleted. One that fails comes back after the
queue's visibility timeout; if the function reports failures of single messages, only these do.
Messages that no filter matches are deleted. A FIFO queue gives the messages of a group to one
invocation at a time, because the queue gives none of a group while one is in flight.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from penstock.client import Queues
from penstock.errors import InvalidField, StaleReceipt, UnavailableError
from penstock.functions.answer import failed_ids, with_later_ones
from penstock.functions.event import sqs_entry
from penstock.functions.filters import FilterCriteria
from penstock.functions.invoke import FunctionError, LambdaFunction
from penstock.service import SECOND_MS, Claim
from penstock.wire.sqs.address import Owner

BATCH_MAX: Final = 10_000
FIFO_BATCH_MAX: Final = 10
# A larger batch must have a window.
PLAIN_BATCH_MAX: Final = 10
WINDOW_S_MAX: Final = 300
PAYLOAD_BYTES_MAX: Final = 6 * 1024 * 1024
CONCURRENCY_MAX: Final = 1_000
# How long a receive waits, and so at most how long the end of the mapping.
WAIT_S: Final = 2.0
_PULL_MAX: Final = 10
# After so many failures in a row, pauses grow from the first of these to the last.
_PAUSE_S: Final = 0.5
_PAUSE_S_MAX: Final = 30.0
HOME: Final = Owner("000000000000", "us-east-1")


class MappingOptions(NamedTuple):
    """The options of a mapping, with the names and limits that they have in Lambda."""

    batch_size: int = 10
    window_s: float = 0.0
    concurrency: int = 1
    reports_failures: bool = False
    filters: FilterCriteria = FilterCriteria()
    home: Owner = HOME

    def check(self, *, fifo: bool, visibility_s: float, timeout_s: float) -> None:
        """Raises InvalidField for what Lambda would refuse for such a queue and function."""
        most = FIFO_BATCH_MAX if fifo else BATCH_MAX
        if not 1 <= self.batch_size <= most:
            kind = "FIFO" if fifo else "standard"
            raise InvalidField(
                f"batch-size: {self.batch_size} is outside 1 to {most} for a {kind} queue"
            )
        if not 0 <= self.window_s <= WINDOW_S_MAX:
            raise InvalidField(f"window: {self.window_s:g} s is outside 0 to {WINDOW_S_MAX} s")
        if fifo and self.window_s:
            raise InvalidField("window: a FIFO queue has none; leave it out")
        if self.batch_size > PLAIN_BATCH_MAX and self.window_s < 1:
            raise InvalidField(
                f"window: a batch size above {PLAIN_BATCH_MAX} needs a window of 1 s or more"
            )
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise InvalidField(f"concurrency: {self.concurrency} is outside 1 to {CONCURRENCY_MAX}")
        if timeout_s > visibility_s:
            raise InvalidField(
                f"timeout: {timeout_s:g} s is more than the queue's visibility timeout, "
                f"{visibility_s:g} s: messages would come back while the function works on them"
            )


class InvokedBatch(NamedTuple):
    """What became of a batch."""

    messages: int
    failed: int
    filtered: int
    error: str = ""


class EventSourceMapping:
    """Invokes a function with the messages of a queue."""

    def __init__(
        self,
        queues: Queues,
        queue: str,
        function: LambdaFunction,
        options: MappingOptions,
        told: Callable[[InvokedBatch], None] = lambda batch: None,
    ) -> None:
        """Raises InvalidField or QueueNotFound."""
        settings = queues.describe(queue).settings
        self._fifo = settings.fifo
        options.check(
            fifo=self._fifo,
            visibility_s=settings.visibility_timeout,
            timeout_s=function.timeout_s,
        )
        # If a claim ended while its batch is gathered, its message would be in the batch twice.
        left_s = settings.visibility_timeout - function.timeout_s
        self._gather_s = min(options.window_s, left_s)
        self._queues = queues
        self._queue = queue
        self._function = function
        self._options = options
        self._told = told
        self._ended = threading.Event()

    def poll(self, wait_s: float = 0.0) -> InvokedBatch | None:
        """Receives one batch and invokes the function with it; None if there is no message.

        Raises PenstockError if the queue cannot be read, or messages cannot be deleted.
        """
        claims = self._receive(wait_s)
        if not claims:
            return None
        entries = {each.id: sqs_entry(each, self._options.home, fifo=self._fifo) for each in claims}
        wanted = [each for each in claims if self._options.filters.matches(entries[each.id])]
        ids = {each.id for each in wanted}
        self._delete([each for each in claims if each.id not in ids])
        failed, error = self._invoke(wanted, [entries[each.id] for each in wanted])
        self._delete([each for each in wanted if each.id not in failed])
        batch = InvokedBatch(len(wanted), len(failed), len(claims) - len(wanted), error)
        self._told(batch)
        return batch

    def _receive(self, wait_s: float) -> list[Claim]:
        """A batch: until it is full, or its window has ended, or there is no message."""
        options = self._options
        claims = self._pull(options.batch_size, wait_s)
        until_ms = self._queues.clock.now_ms() + round(self._gather_s * SECOND_MS)
        size_bytes = sum(len(each.body) for each in claims)
        while claims and len(claims) < options.batch_size and size_bytes < PAYLOAD_BYTES_MAX:
            left_ms = max(0, until_ms - self._queues.clock.now_ms())
            # Without a window, and on FIFO queues, a batch is what one receive gives.
            if not options.window_s or self._ended.is_set():
                break
            more = self._pull(options.batch_size - len(claims), min(WAIT_S, left_ms / SECOND_MS))
            claims += more
            size_bytes += sum(len(each.body) for each in more)
            if not more and not left_ms:
                break
        return claims

    def _pull(self, limit: int, wait_s: float) -> list[Claim]:
        return self._queues.pull_many(self._queue, min(limit, _PULL_MAX), wait=wait_s)

    def _invoke(
        self, claims: Sequence[Claim], entries: Sequence[dict[str, Any]]
    ) -> tuple[set[str], str]:
        """The ids of the messages that failed, and why the invocation failed, if it did."""
        ids = [each.id for each in claims]
        if not ids:
            return set(), ""
        try:
            answer = self._function.invoke({"Records": entries})
        except FunctionError as error:
            return set(ids), str(error)
        if not self._options.reports_failures:
            return set(), ""
        failed = failed_ids(answer, ids)
        if self._fifo:
            failed = with_later_ones(failed, {each.id: each.group for each in claims})
        return failed, ""

    def _delete(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            try:
                self._queues.delete(claim)
            except StaleReceipt:
                # It ran out while the function worked: the message comes again, as in Lambda.
                continue

    def run(self) -> None:
        """Polls until `end` is called, with as many invocations at a time as are allowed.

        After failures in a row it pauses, longer and longer. Raises PenstockError if the queue is
        gone, or cannot be read for another reason than that its service is not there now; and
        whatever else ended one of its threads.
        """
        failures: list[Exception] = []
        threads = [
            threading.Thread(target=self._work, args=(failures,), name=f"penstock-lambda-{number}")
            for number in range(self._options.concurrency)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if failures:
            raise failures[0]

    def _work(self, failures: list[Exception]) -> None:
        in_a_row = 0
        while not self._ended.is_set():
            began_s = time.monotonic()
            try:
                batch = self.poll(WAIT_S)
            except UnavailableError:
                in_a_row += 1
            except Exception as error:
                # Left in this thread, an error would end it unseen, and `run` would return.
                failures.append(error)
                self.end()
                return
            else:
                is_failure = batch is not None and bool(batch.error)
                in_a_row = in_a_row + 1 if is_failure else 0
            if in_a_row:
                pause_s = min(_PAUSE_S_MAX, _PAUSE_S * 2 ** (in_a_row - 1))
                self._ended.wait(max(0.0, pause_s - (time.monotonic() - began_s)))

    def end(self) -> None:
        """Ends `run` after the invocations that are under way."""
        self._ended.set()
