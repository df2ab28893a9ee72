"""The SQS endpoint: an HTTP request becomes an action, the action's result becomes the answer.

Who asks is read from the signature's scope; what is asked, by JSON or by the Query protocol; both
meet in one table of actions. An answer leaves when what it says is durable: many answers share one
sync. A receive that finds nothing stands in the engine's line and costs nothing until it is served.
"""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from penstock.backends.engine import Engine, Waiter
from penstock.core.due import NEVER_MS
from penstock.errors import InFlightLimit, JournalError, PenstockError
from penstock.server.http import Connection, Request, response
from penstock.server.sqs_access import Access
from penstock.server.sqs_messages import Messages, Poll
from penstock.server.sqs_moves import Moves
from penstock.server.sqs_queues import Queues
from penstock.server.sqs_speech import Speech, speech_of
from penstock.server.sqs_store import Caller, Store, refusal_of
from penstock.service import ListQueues
from penstock.wire import sqs_errors as faults
from penstock.wire.sqs_errors import Refusal, missing
from penstock.wire.sqs_model import ACTIONS, Action, Shape, wire_name

Operation = Callable[[Any, Caller], Shape | Poll | None]


class Answers:
    """Answers that wait for the disk: one sync lets all of them go that it covers."""

    def __init__(self, engine: Engine, failed: Callable[[JournalError], None]) -> None:
        self._journal = engine.journal
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, Connection, bytes]] = deque()
        self._asked_for = 0
        self._asking = False

    def send_when_durable(self, sequence: int, connection: Connection, answer: bytes) -> None:
        """Sends the answer once the journal has this sequence on the disk."""
        self._waiting.append((sequence, connection, answer))
        if not self._asking:
            self._asking = True
            # Not yet: whoever else is read from in this turn of the loop shares the sync.
            self._loop.call_soon(self._ask)

    def _ask(self) -> None:
        self._asked_for = max(sequence for sequence, _, _ in self._waiting)
        self._journal.notify(self._asked_for, self._told)

    def _told(self) -> None:
        self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        durable = self._journal.durable_sequence
        if durable < self._asked_for:
            try:
                self._journal.wait(self._asked_for)
            except JournalError as error:
                self._fail(error)
                return
            durable = self._journal.durable_sequence
        later: deque[tuple[int, Connection, bytes]] = deque()
        while self._waiting:
            sequence, connection, answer = self._waiting.popleft()
            if sequence <= durable:
                connection.finish(answer)
            else:
                later.append((sequence, connection, answer))
        self._waiting = later
        self._asking = bool(later)
        if later:
            self._ask()

    def _fail(self, error: JournalError) -> None:
        """Nothing that waits will ever be durable: whoever asked must not believe it was."""
        self._asking = False
        self._failed(error)
        refused = response(503, b"Connection: close\r\n", b"", self._loop.time())
        while self._waiting:
            _, connection, _ = self._waiting.popleft()
            connection.finish(refused)
            connection.close()


class Polls:
    """Receives that wait, and the one timer that wakes the engine for all of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = NEVER_MS
        self._unsubscribe = engine.clock.subscribe(self._time_moved)
        self._waiting: dict[Waiter, Callable[[], None]] = {}

    def wait(
        self, poll: Poll, connection: Connection, done: Callable[[Waiter], None]
    ) -> Waiter | None:
        """Puts a receive in line; `done` is called once, unless the connection goes away first."""
        box: list[Waiter] = []

        def wake() -> None:
            if box and box[0].done:
                self._loop.call_soon(finish)
            else:
                self._plan()

        def finish() -> None:
            # Gone meanwhile: `forget` has put back what the waiter was given.
            if self._waiting.pop(box[0], None) is not None:
                done(box[0])

        def gone() -> None:
            if self._waiting.pop(box[0], None) is not None:
                self._engine.forget(box[0])

        waiter = self._engine.wait(poll.pull, wake)
        if waiter is None:
            return None
        box.append(waiter)
        self._waiting[waiter] = finish
        connection.on_gone = gone
        self._plan()
        return waiter

    def _plan(self) -> None:
        wake_ms = self._engine.next_wake_ms
        if self._timer is not None:
            if self._timer_ms == wake_ms:
                return
            self._timer.cancel()
            self._timer = None
        timeout_s = self._engine.clock.timeout_s(wake_ms)
        if wake_ms < NEVER_MS and timeout_s is not None:
            self._timer_ms = wake_ms
            self._timer = self._loop.call_later(timeout_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._engine.tick()
        if self._engine.has_waiters:
            self._plan()

    def _time_moved(self) -> None:
        self._loop.call_soon_threadsafe(self._tick)

    def end(self) -> None:
        """Lets every receive that waits go home with what it has, which is nothing."""
        for waiter, finish in list(self._waiting.items()):
            if not waiter.done:
                self._engine.forget(waiter)
                self._loop.call_soon(finish)

    def close(self) -> None:
        """Stops looking at the clock."""
        self._unsubscribe()
        if self._timer is not None:
            self._timer.cancel()


class Endpoint:
    """Answers SQS requests from one engine."""

    def __init__(self, store: Store, access: Access) -> None:
        self._engine = store.engine
        self._journal = store.engine.journal
        self._loop = asyncio.get_running_loop()
        self._access = access
        self._answers = Answers(store.engine, self._fail)
        # Done once the engine has stopped because its storage cannot be trusted.
        self.failed: asyncio.Future[JournalError] = self._loop.create_future()
        self._polls = Polls(store.engine)
        messages, queues, self._moves = Messages(store), Queues(store), Moves(store)
        self._operations: dict[str, Operation] = {
            "AddPermission": queues.permit,
            "CancelMessageMoveTask": self._moves.cancel,
            "ChangeMessageVisibility": messages.change,
            "ChangeMessageVisibilityBatch": messages.change_batch,
            "CreateQueue": queues.create,
            "DeleteMessage": messages.delete,
            "DeleteMessageBatch": messages.delete_batch,
            "DeleteQueue": queues.delete,
            "GetQueueAttributes": queues.attributes,
            "GetQueueUrl": queues.url,
            "ListDeadLetterSourceQueues": queues.sources,
            "ListMessageMoveTasks": self._moves.list,
            "ListQueueTags": queues.tags,
            "ListQueues": queues.list,
            "PurgeQueue": queues.purge,
            "ReceiveMessage": messages.receive,
            "RemovePermission": queues.forbid,
            "SendMessage": messages.send,
            "SendMessageBatch": messages.send_batch,
            "SetQueueAttributes": queues.set_attributes,
            "StartMessageMoveTask": self._moves.start,
            "TagQueue": queues.tag,
            "UntagQueue": queues.untag,
        }
        # What each action cannot do without, read in one step: with the class twice in front it is
        # always a tuple.
        self._required = {
            name: attrgetter("__class__", "__class__", *action.required)
            for name, action in ACTIONS.items()
        }
        self._ending = False
        self._id_prefix = f"{secrets.token_hex(4)}-{secrets.token_hex(2)}-4000-8000-"
        self._asked = 0
        # (action, status): how often; read by the metrics.
        self.answered: Counter[tuple[str, int]] = Counter()

    def answer(self, request: Request, connection: Connection) -> bytes | None:
        """The response, or None if it will be sent when it may."""
        self._asked += 1
        request_id = f"{self._id_prefix}{self._asked:012x}"
        speech = speech_of(request)
        name = ""
        try:
            caller = self._access.caller(request)
            action, asked = speech.decode(request, caller.base_url)
            name = action.name
            if None in self._required[name](asked):
                raise missing(_absent(action, asked))
            if self._ending:
                raise Refusal(faults.REQUEST_THROTTLED, "The server is about to stop.")
            result = self._operations[name](asked, caller)
            if type(result) is Poll:
                return self._wait(result, speech, action, request_id, connection)
        except Refusal as refusal:
            return self._refused(name, refusal, speech, request_id)
        except Exception as error:
            # A fault of ours: the caller may try again, and whoever runs the server must be told.
            told = {"message": f"{name or 'a request'} failed", "exception": error}
            self._loop.call_exception_handler(told)
            failed = Refusal(faults.SERVICE_UNAVAILABLE, "The request could not be served.")
            return self._refused(name, failed, speech, request_id)
        now_s = self._loop.time()
        answer = speech.encode(action, result, request_id, now_s)  # type: ignore[arg-type]
        self.answered[name, 200] += 1
        sequence = self._engine.answer_sequence
        if sequence > self._journal.durable_sequence:
            self._answers.send_when_durable(sequence, connection, answer)
            return None
        return answer

    def _refused(self, name: str, refusal: Refusal, speech: Speech, request_id: str) -> bytes:
        self.answered[name, refusal.fault.status] += 1
        if refusal.fault is faults.SERVICE_UNAVAILABLE:
            self.is_healthy()
        return speech.encode_refusal(refusal, request_id, self._loop.time())

    def _wait(
        self, poll: Poll, speech: Speech, action: Action, request_id: str, connection: Connection
    ) -> bytes | None:
        def done(waiter: Waiter) -> None:
            connection.on_gone = None
            if waiter.error is not None and not isinstance(waiter.error, InFlightLimit):
                refusal = refusal_of(waiter.error)
                connection.finish(self._refused(action.name, refusal, speech, request_id))
                return
            result = poll.finish(waiter.claims)
            answer = speech.encode(action, result, request_id, self._loop.time())
            self.answered[action.name, 200] += 1
            if waiter.sequence > self._journal.durable_sequence:
                self._answers.send_when_durable(waiter.sequence, connection, answer)
            else:
                connection.finish(answer)

        try:
            if self._polls.wait(poll, connection, done) is None:
                return speech.encode(action, poll.finish([]), request_id, self._loop.time())
        except PenstockError as error:
            return self._refused(action.name, refusal_of(error), speech, request_id)
        return None

    def _fail(self, error: JournalError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def is_healthy(self) -> bool:
        """Whether the engine answers; if its storage has failed, that is told."""
        try:
            self._engine.submit(ListQueues(limit=1))
        except JournalError as error:
            self._fail(error)
            return False
        except PenstockError:
            return False
        return not self.failed.done() and not self._ending

    def end_waits(self) -> None:
        """Answers every receive that waits with nothing, and refuses what is still to come."""
        self._ending = True
        self._polls.end()

    async def close(self) -> None:
        """Ends what runs by itself."""
        await self._moves.close()
        self._polls.close()


def _absent(action: Action, asked: Shape) -> str:
    return next(wire_name(field) for field in action.required if getattr(asked, field) is None)
