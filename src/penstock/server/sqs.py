"""The SQS endpoint: an HTTP request becomes an action, the action's result becomes the answer.

Who asks is read from the signature's scope; what is asked, by JSON or by the Query protocol; both
meet in one table of actions. An answer leaves when what it says is durable: many answers share one
sync. A receive that finds nothing stands in the engine's line and costs nothing until it is served.
"""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

from penstock.backends.engine import Engine, Waiter
from penstock.core.due import NEVER_MS
from penstock.errors import InFlightLimit, JournalError, PenstockError
from penstock.server.http import Connection, Request, response
from penstock.server.sqs_access import Access
from penstock.server.sqs_messages import Messages, Poll
from penstock.server.sqs_moves import Moves
from penstock.server.sqs_queues import Queues
from penstock.server.sqs_store import Caller, Store, refusal_of
from penstock.wire import sqs_errors as faults
from penstock.wire import sqs_json, sqs_query
from penstock.wire.sqs_address import read_path
from penstock.wire.sqs_errors import Refusal, missing
from penstock.wire.sqs_model import Action, Shape, wire_name

_FORM: Final = "application/x-www-form-urlencoded"
Operation = Callable[[Any, Caller], Shape | Poll | None]


class Answers:
    """Answers that wait for the disk: one sync lets all of them go that it covers."""

    def __init__(self, engine: Engine) -> None:
        self._journal = engine.journal
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
            except JournalError:
                self._fail()
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

    def _fail(self) -> None:
        """Nothing that waits will ever be durable: whoever asked must not believe it was."""
        self._asking = False
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
        self._answers = Answers(store.engine)
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
        self._ending = False
        self._id_prefix = f"{secrets.token_hex(4)}-{secrets.token_hex(2)}-4000-8000-"
        self._asked = 0
        # (action, status): how often; read by the metrics.
        self.answered: Counter[tuple[str, int]] = Counter()

    def answer(self, request: Request, connection: Connection) -> bytes | None:
        """The response, or None if it will be sent when it may."""
        self._asked += 1
        talk = Talk(request, f"{self._id_prefix}{self._asked:012x}", self._loop)
        name = ""
        try:
            caller = self._access.caller(request)
            action, asked = talk.decode(caller)
            name = action.name
            for field in action.required:
                if getattr(asked, field) is None:
                    raise missing(wire_name(field))
            if self._ending:
                raise Refusal(faults.REQUEST_THROTTLED, "The server is about to stop.")
            result = self._operations[name](asked, caller)
            if type(result) is Poll:
                return self._wait(result, talk, action, connection)
            answer = talk.encode(action, result)  # type: ignore[arg-type]
            sequence = self._engine.answer_sequence
        except Refusal as refusal:
            self.answered[name, refusal.fault.status] += 1
            return talk.encode_refusal(refusal)
        self.answered[name, 200] += 1
        if sequence > self._journal.durable_sequence:
            self._answers.send_when_durable(sequence, connection, answer)
            return None
        return answer

    def _wait(
        self, poll: Poll, talk: "Talk", action: Action, connection: Connection
    ) -> bytes | None:
        def done(waiter: Waiter) -> None:
            connection.on_gone = None
            try:
                if waiter.error is not None and not isinstance(waiter.error, InFlightLimit):
                    raise refusal_of(waiter.error)
                answer = talk.encode(action, poll.finish(waiter.claims))
            except Refusal as refusal:
                self.answered[action.name, refusal.fault.status] += 1
                connection.finish(talk.encode_refusal(refusal))
                return
            self.answered[action.name, 200] += 1
            if waiter.sequence > self._journal.durable_sequence:
                self._answers.send_when_durable(waiter.sequence, connection, answer)
            else:
                connection.finish(answer)

        try:
            if self._polls.wait(poll, connection, done) is None:
                return talk.encode(action, poll.finish([]))
        except PenstockError as error:
            return talk.encode_refusal(refusal_of(error))
        return None

    def end_waits(self) -> None:
        """Answers every receive that waits with nothing, and refuses what is still to come."""
        self._ending = True
        self._polls.end()

    async def close(self) -> None:
        """Ends what runs by itself."""
        await self._moves.close()
        self._polls.close()


class Talk:
    """One request and the protocol it speaks, which its answer must speak too."""

    __slots__ = ("_as_json", "_id", "_loop", "_request", "_target")

    def __init__(self, request: Request, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self._request = request
        self._id = request_id
        self._loop = loop
        self._target = request.headers.get("x-amz-target")
        self._as_json = False

    def decode(self, caller: Caller) -> tuple[Action, Shape]:
        """What is asked. Raises Refusal."""
        request = self._request
        if self._target is not None and request.method == "POST":
            return sqs_json.decode(self._target, request.body)
        accept = request.headers.get("accept", "")
        self._as_json = request.method == "GET" and "application/json" in accept
        found = read_path(request.path)
        url = f"{caller.base_url}{request.path}" if found else None
        if request.method == "GET":
            return sqs_query.decode(request.query, url)
        if request.method != "POST":
            raise Refusal(faults.UNKNOWN_OPERATION, "Use GET or POST.")
        form = request.body.decode("utf-8", "replace")
        if request.query:
            form = f"{form}&{request.query}" if form else request.query
        return sqs_query.decode(form, url)

    def encode(self, action: Action, result: Shape | None) -> bytes:
        """The response of an action that went well."""
        if self._target is not None:
            return self._whole(200, sqs_json.CONTENT_TYPE, sqs_json.encode(result))
        if self._as_json:
            body = sqs_query.encode_as_json(action, result, self._id)
            return self._whole(200, "application/json", body)
        return self._whole(200, sqs_query.CONTENT_TYPE, sqs_query.encode(action, result, self._id))

    def encode_refusal(self, refusal: Refusal) -> bytes:
        """The response of a request that was refused."""
        status = refusal.fault.status
        if self._target is not None:
            body, code = sqs_json.encode_refusal(refusal)
            return self._whole(
                status, sqs_json.CONTENT_TYPE, body, f"x-amzn-query-error: {code}\r\n"
            )
        if refusal.fault is faults.QUEUE_DOES_NOT_EXIST:
            # The older protocol has the older words.
            refusal.message = "The specified queue does not exist for this wsdl version."
        if self._as_json:
            body = sqs_query.encode_refusal_as_json(refusal, self._id)
            return self._whole(status, "application/json", body)
        body = sqs_query.encode_refusal(refusal, self._id)
        return self._whole(status, sqs_query.CONTENT_TYPE, body)

    def _whole(self, status: int, content_type: str, body: bytes, more: str = "") -> bytes:
        headers = f"x-amzn-RequestId: {self._id}\r\nContent-Type: {content_type}\r\n{more}"
        return response(status, headers.encode(), body, self._loop.time())
