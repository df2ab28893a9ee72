"""The SQS endpoint: an HTTP request becomes an action, the action's result becomes the answer.

The caller is read from the signature's scope, the action from JSON or the Query protocol; both
protocols share one table of actions. An action is a generator of commands that the service runs. If
it completes within the call, the answer is returned at once; otherwise it is sent from a callback:
when changes must become durable first, when a receive waits for a message, and always if the
service is in another process.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, Final, cast

import msgspec

from penstock.backends.loop import Finish, Pending, Single, Steps
from penstock.core.receipts import IDENTITY_BYTES, MessageIds
from penstock.durations import Durations
from penstock.errors import JournalError, PenstockError
from penstock.server.http import HttpConnection, Request
from penstock.server.lines import REQUEST_SLOW, SIGNATURE_REFUSED, ServerLines
from penstock.server.sqs.access import Access
from penstock.server.sqs.first_use import FirstUse
from penstock.server.sqs.lookup import Caller, QueueLookup, refusal_of
from penstock.server.sqs.messages import MessageActions
from penstock.server.sqs.moves import MoveActions
from penstock.server.sqs.peek import PeekAction, is_peek
from penstock.server.sqs.permissions import PermissionActions
from penstock.server.sqs.protocols import SqsProtocol, protocol_of
from penstock.server.sqs.queues import QueueActions
from penstock.server.sqs.receipts import ReceiptActions
from penstock.server.sqs.tags import TagActions
from penstock.service import ListQueues
from penstock.settings import ServerSettings
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs.errors import Refusal, absent
from penstock.wire.sqs.message import trace_of_header
from penstock.wire.sqs.model import ACTIONS, Action, ReceiveResult, Shape, wire_name

Operation = Callable[[Any, Caller], Single | Steps[Any]]
# An action that takes at least this long gets a line.
SLOW_S: Final = 1.0
_OF_SIGNATURES: Final = (faults.SIGNATURE, faults.INVALID_SECURITY, faults.MISSING_TOKEN)
_RECEIVE: Final = "ReceiveMessage"
_RECEIVE_ACTION: Final = ACTIONS[_RECEIVE]
_NO_MESSAGES: Final = ReceiveResult([])


class _Exchange(msgspec.Struct, eq=False):
    """A request that is refused or answered later, and the connection it came on."""

    connection: HttpConnection
    protocol: SqsProtocol
    request_id: str
    # None if the request could not be read.
    action: Action | None
    # Where its duration is counted; None if it was refused.
    times: Durations | None = None
    pending: Pending | None = None
    # The function that makes the result from the reply, if the action was a single command.
    finish: Finish | None = None
    context: Any = None
    # When a receive began to wait, on the clock of the loop.
    since_s: float = 0.0


class SqsEndpoint:
    """Answers SQS requests from one queue service."""

    def __init__(
        self,
        lookup: QueueLookup,
        access: Access,
        lines: ServerLines | None = None,
        slow_s: float = SLOW_S,
        creates_on_use: bool = False,
    ) -> None:
        """An action that takes `slow_s` or longer gets a line.

        With `creates_on_use` a queue is created when it is first used.
        """
        self._service = lookup.service
        self._run = lookup.service.run
        self._submit = lookup.service.submit
        self._loop = asyncio.get_running_loop()
        self._access = access
        receipts, queues = ReceiptActions(lookup), QueueActions(lookup)
        tags, permissions = TagActions(lookup), PermissionActions(lookup)
        self._moves = MoveActions(lookup)
        messages = MessageActions(lookup, receipts)
        self._peek = PeekAction(lookup).peek
        operations: dict[str, Operation] = {
            "AddPermission": permissions.add,
            "CancelMessageMoveTask": self._moves.cancel,
            "ChangeMessageVisibility": receipts.change,
            "ChangeMessageVisibilityBatch": receipts.change_batch,
            "CreateQueue": queues.create,
            "DeleteMessage": receipts.delete,
            "DeleteMessageBatch": receipts.delete_batch,
            "DeleteQueue": queues.delete,
            "GetQueueAttributes": queues.attributes,
            "GetQueueUrl": queues.url,
            "ListDeadLetterSourceQueues": queues.sources,
            "ListMessageMoveTasks": self._moves.list,
            "ListQueueTags": tags.list,
            "ListQueues": queues.list,
            "PurgeQueue": queues.purge,
            _RECEIVE: messages.receive,
            "RemovePermission": permissions.remove,
            "SendMessage": messages.send,
            "SendMessageBatch": messages.send_batch,
            "SetQueueAttributes": queues.set_attributes,
            "StartMessageMoveTask": self._moves.start,
            "TagQueue": tags.add,
            "UntagQueue": tags.remove,
        }
        if creates_on_use:
            FirstUse(lookup, queues.create).wrap(operations)
        # How long actions took that were answered with 200 and did not wait for a message; and of
        # all others (action, status), how often. The metrics read both.
        self.times = {name: Durations() for name in ACTIONS}
        self.answered: Counter[tuple[str, int]] = Counter()
        # What performs each action, with a getter of its required parameters, and its times.
        self._operations = {
            name: (operations[name], _reader(action.required), self.times[name])
            for name, action in ACTIONS.items()
        }
        # Receives without an answer, most of them because they wait for a message.
        self._receives: set[_Exchange] = set()
        self._ending = False
        self._request_ids = MessageIds(secrets.token_bytes(IDENTITY_BYTES))
        self._requests = 0
        self._lines = lines if lines is not None else ServerLines()
        self._slow_s = slow_s

    def resume(self) -> None:
        """Resumes the move tasks that were running when the server was stopped."""
        pending = self._run(self._moves.resume())
        if isinstance(pending, Pending):
            pending.then(self._resumed)

    def _resumed(self, _: object, error: Exception | None) -> None:
        if error is not None and not isinstance(error, PenstockError):
            self._report("resuming move tasks", error)

    def answer(self, request: Request, connection: HttpConnection) -> bytes | None:
        """The response, or None if it will be sent later."""
        self._requests += 1
        request_id = self._request_ids.show(self._requests)
        protocol = protocol_of(request)
        action: Action | None = None
        pending: Pending | None = None
        try:
            caller = self._access.caller(request, connection)
            if "x-amzn-trace-id" in request.headers:
                caller = caller._replace(trace=trace_of_header(request.headers["x-amzn-trace-id"]))
            action, parameters = protocol.decode(request, caller.base_url)
            operation, required, times = self._operations[action.name]
            if request.path != "/" and action is _RECEIVE_ACTION and is_peek(request):
                operation = partial(self._peek, request)
            if None in required(parameters):
                raise absent(action.name, _first_absent(action, parameters))
            if self._ending:
                raise Refusal(faults.REQUEST_THROTTLED, "The server is about to stop.")
            made = operation(parameters, caller)
            finish: Finish | None = None
            context: Any = None
            if type(made) is tuple:
                command, finish, context = made
                try:
                    result = self._submit(command)
                except PenstockError as refused:
                    result, finish = finish(context, None, refused), None
            else:
                result = self._run(cast("Steps[Any]", made))
            if isinstance(result, Pending):
                pending = result
                if not pending.is_known:
                    exchange = _Exchange(connection, protocol, request_id, action, times, pending)
                    exchange.finish, exchange.context = finish, context
                    self._answer_when_done(exchange, pending)
                    return None
                result = pending.reply
            if finish is not None:
                result = finish(context, result, None)
            answer = protocol.encode(action, result, request_id, self._loop.time())
            if pending is None:
                if times.add(perf_counter() - connection.began_s) >= self._slow_s:
                    self._tell_slow(action, connection)
                return answer
            exchange = _Exchange(connection, protocol, request_id, action, times)
        except Exception as error:
            exchange = _Exchange(connection, protocol, request_id, action)
            answer = self._refused(exchange, error)
            if pending is None:
                return answer
        # The answer was made while the disk syncs, so that it is sent without further work.
        pending.done = partial(self._send_durable, exchange, answer)
        if action is _RECEIVE_ACTION:
            connection.on_gone = pending.cancel
        return None

    def _send_durable(
        self, exchange: _Exchange, answer: bytes, _: object, error: Exception | None
    ) -> None:
        connection, times = exchange.connection, exchange.times
        if error is not None:
            answer = self._refused(exchange, error)
        elif times and times.add(perf_counter() - connection.began_s) >= self._slow_s:
            self._tell_slow(exchange.action, connection)
        connection.finish(answer)
        if isinstance(error, JournalError):
            connection.close()

    def _answer_when_done(self, exchange: _Exchange, pending: Pending) -> None:
        pending.then(partial(self._answer_later, exchange))
        if exchange.action is _RECEIVE_ACTION:
            # Other actions are completed even if the client disconnects.
            exchange.since_s = self._loop.time()
            self._receives.add(exchange)
            exchange.connection.on_gone = partial(self._abandon, exchange)

    def _answer_later(self, exchange: _Exchange, reply: Any, error: Exception | None) -> None:
        self._receives.discard(exchange)
        answer, connection = self._make_answer(exchange, reply, error), exchange.connection
        times = exchange.times
        if times is not None and exchange.action is _RECEIVE_ACTION:
            # How long it waited for a message is not how long the server took.
            self.answered[_RECEIVE, 200] += 1
        elif times and times.add(perf_counter() - connection.began_s) >= self._slow_s:
            self._tell_slow(exchange.action, connection)
        connection.finish(answer)
        if isinstance(error, JournalError):
            connection.close()

    def _make_answer(self, exchange: _Exchange, reply: Any, error: Exception | None) -> bytes:
        finish, action = exchange.finish, exchange.action
        if error is not None and (finish is None or not isinstance(error, PenstockError)):
            # It must not be raised here: its traceback would keep this call, and with it itself and
            # the request, until the next garbage collection.
            return self._refused(exchange, error)
        try:
            if finish is not None:
                reply = finish(exchange.context, reply, error)
            assert action is not None
            now_s = self._loop.time()
            return exchange.protocol.encode(action, reply, exchange.request_id, now_s)
        except Exception as refused:
            return self._refused(exchange, refused)

    def _tell_slow(self, action: Action | None, connection: HttpConnection) -> None:
        took_s = perf_counter() - connection.began_s
        name = None if action is None else action.name
        self._lines.tell(REQUEST_SLOW, action=name, ms=round(took_s * 1_000, 1))

    def _abandon(self, exchange: _Exchange) -> None:
        """Called if the client of a receive disconnects: the messages claimed for it return."""
        self._receives.discard(exchange)
        if exchange.pending is not None:
            exchange.pending.cancel()

    def _refused(self, exchange: _Exchange, error: Exception) -> bytes:
        name = "" if exchange.action is None else exchange.action.name
        if isinstance(error, PenstockError):
            error = refusal_of(error)
        if not isinstance(error, Refusal):
            # A fault of this program: the caller may try again.
            self._report(name or "a request", error)
            error = Refusal(faults.SERVICE_UNAVAILABLE, "The request could not be served.")
        exchange.times = None
        self.answered[name, error.fault.status] += 1
        refusal: dict[str, object] = {
            "action": name or None,
            "code": error.fault.name,
            "request_id": exchange.request_id,
        }
        if error.fault in _OF_SIGNATURES:
            refusal["event"] = SIGNATURE_REFUSED
        exchange.connection.refusal = refusal
        return exchange.protocol.encode_refusal(error, exchange.request_id, self._loop.time())

    def _report(self, what: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": f"{what} failed", "exception": error})

    def health(self) -> Steps[bool]:
        """Whether the service answers."""
        if self._ending:
            return False
        try:
            yield ListQueues(limit=1)
        except PenstockError:
            return False
        return True

    def end_waits(self) -> None:
        """Answers every receive that waits with no messages, and refuses further requests."""
        self._ending = True
        self.end_waits_since(self._loop.time())

    def end_waits_since(self, since_s: float) -> None:
        """Answers the receives that wait since this time of the loop, or longer, with nothing."""
        for exchange in list(self._receives):
            pending = exchange.pending
            if pending is not None and pending.waits and exchange.since_s <= since_s:
                pending.cancel()
                exchange.finish = None
                self._answer_later(exchange, _NO_MESSAGES, None)

    def time_moved(self) -> None:
        """A manual clock was advanced."""
        self._moves.time_moved()

    async def close(self) -> None:
        """Stops the move tasks."""
        await self._moves.close()


def open_endpoint(
    lookup: QueueLookup, settings: ServerSettings, scheme: str, lines: ServerLines
) -> tuple[Access, SqsEndpoint]:
    """Who may use the queues of a lookup, and the endpoint that answers, as the settings say."""
    creates = settings.create_on_use
    access = Access(
        lookup.directory, scheme, settings.keys, settings.allow_hosts, creates_on_use=creates
    )
    endpoint = SqsEndpoint(lookup, access, lines, settings.slow_request, creates_on_use=creates)
    return access, endpoint


def _reader(fields: Sequence[str]) -> Callable[[Shape], tuple[Any, ...]]:
    """A getter of these fields. attrgetter returns a tuple only for two or more names."""
    padding = ["__class__"] * (2 - len(fields))
    return attrgetter(*padding, *fields)


def _first_absent(action: Action, parameters: Shape) -> str:
    return next(wire_name(field) for field in action.required if getattr(parameters, field) is None)
