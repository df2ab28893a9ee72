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
from typing import Any, Final, cast

import msgspec

from penstock.backends.loop import Finish, Pending, Single, Steps
from penstock.core.receipts import IDENTITY_BYTES, MessageIds
from penstock.errors import JournalError, PenstockError
from penstock.server.http import HttpConnection, Request
from penstock.server.sqs.access import Access
from penstock.server.sqs.lookup import Caller, QueueLookup, refusal_of
from penstock.server.sqs.messages import MessageActions
from penstock.server.sqs.moves import MoveActions
from penstock.server.sqs.permissions import PermissionActions
from penstock.server.sqs.protocols import SqsProtocol, protocol_of
from penstock.server.sqs.queues import QueueActions
from penstock.server.sqs.receipts import ReceiptActions
from penstock.server.sqs.tags import TagActions
from penstock.service import ListQueues
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs.errors import Refusal, absent
from penstock.wire.sqs.message import trace_of_header
from penstock.wire.sqs.model import ACTIONS, Action, ReceiveResult, Shape, wire_name

Operation = Callable[[Any, Caller], Single | Steps[Any]]
_RECEIVE: Final = "ReceiveMessage"
_NO_MESSAGES: Final = ReceiveResult([])


class _Exchange(msgspec.Struct, eq=False):
    """A request whose answer is sent later, and the connection it is sent on."""

    action: Action
    protocol: SqsProtocol
    request_id: str
    connection: HttpConnection
    pending: Pending
    # The function that makes the result from the reply, if the action was a single command.
    finish: Finish | None
    context: Any


class SqsEndpoint:
    """Answers SQS requests from one queue service."""

    def __init__(self, lookup: QueueLookup, access: Access) -> None:
        self._service = lookup.service
        self._run = lookup.service.run
        self._submit = lookup.service.submit
        self._loop = asyncio.get_running_loop()
        self._access = access
        receipts, queues = ReceiptActions(lookup), QueueActions(lookup)
        tags, permissions = TagActions(lookup), PermissionActions(lookup)
        self._moves = MoveActions(lookup)
        messages = MessageActions(lookup, receipts)
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
        # What performs each action, with a getter of its required parameters.
        self._operations = {
            name: (operations[name], _reader(action.required)) for name, action in ACTIONS.items()
        }
        # Receives whose messages are not known yet, most of them because they wait for one.
        self._receives: set[_Exchange] = set()
        self._ending = False
        self._request_ids = MessageIds(secrets.token_bytes(IDENTITY_BYTES))
        self._requests = 0
        # (action, status): how often; read by the metrics.
        self.answered: Counter[tuple[str, int]] = Counter()

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
        name = ""
        try:
            caller = self._access.caller(request)
            if "x-amzn-trace-id" in request.headers:
                caller = caller._replace(trace=trace_of_header(request.headers["x-amzn-trace-id"]))
            action, parameters = protocol.decode(request, caller.base_url)
            name = action.name
            operation, required = self._operations[name]
            if None in required(parameters):
                raise absent(name, _first_absent(action, parameters))
            if self._ending:
                raise Refusal(faults.REQUEST_THROTTLED, "The server is about to stop.")
            made = operation(parameters, caller)
            finish = context = None
            if type(made) is tuple:
                command, finish, context = made
                try:
                    result = self._submit(command)
                except PenstockError as refused:
                    result = finish(context, None, refused)
                else:
                    if not isinstance(result, Pending):
                        result = finish(context, result, None)
            else:
                result = self._run(cast("Steps[Any]", made))
        except Exception as error:
            return self._refused(name, error, protocol, request_id)
        if isinstance(result, Pending):
            if not result.is_known:
                self._answer_when_done(
                    _Exchange(action, protocol, request_id, connection, result, finish, context)
                )
                return None
            # The answer is made while the disk syncs, so that it is sent without further work.
            try:
                reply = result.reply if finish is None else finish(context, result.reply, None)
                answer = protocol.encode(action, reply, request_id, self._loop.time())
                self.answered[name, 200] += 1
            except Exception as error:
                answer = self._refused(name, error, protocol, request_id)
            result.done = partial(
                self._send_durable, connection, answer, name, protocol, request_id
            )
            if name == _RECEIVE:
                connection.on_gone = result.cancel
            return None
        self.answered[name, 200] += 1
        return protocol.encode(action, result, request_id, self._loop.time())

    def _answer_when_done(self, exchange: _Exchange) -> None:
        exchange.pending.then(partial(self._answer_later, exchange))
        if exchange.action.name == _RECEIVE:
            # Other actions are completed even if the client disconnects.
            self._receives.add(exchange)
            exchange.connection.on_gone = partial(self._abandon, exchange)

    def _send_durable(
        self,
        connection: HttpConnection,
        answer: bytes,
        name: str,
        protocol: SqsProtocol,
        request_id: str,
        _: object,
        error: Exception | None,
    ) -> None:
        if error is not None:
            answer = self._refused(name, error, protocol, request_id)
        connection.finish(answer)
        if isinstance(error, JournalError):
            connection.close()

    def _answer_later(self, exchange: _Exchange, result: Any, error: Exception | None) -> None:
        self._receives.discard(exchange)
        exchange.connection.finish(self._make_answer(exchange, result, error))
        if isinstance(error, JournalError):
            exchange.connection.close()

    def _make_answer(self, exchange: _Exchange, result: Any, error: Exception | None) -> bytes:
        action, protocol = exchange.action, exchange.protocol
        if exchange.finish is not None and (error is None or isinstance(error, PenstockError)):
            try:
                result, error = exchange.finish(exchange.context, result, error), None
            except Exception as refused:
                error = refused
        if error is not None:
            return self._refused(action.name, error, protocol, exchange.request_id)
        self.answered[action.name, 200] += 1
        return protocol.encode(action, result, exchange.request_id, self._loop.time())

    def _abandon(self, exchange: _Exchange) -> None:
        """Called if the client of a receive disconnects: the messages claimed for it return."""
        self._receives.discard(exchange)
        exchange.pending.cancel()

    def _refused(
        self, name: str, error: Exception, protocol: SqsProtocol, request_id: str
    ) -> bytes:
        if isinstance(error, PenstockError):
            error = refusal_of(error)
        if not isinstance(error, Refusal):
            # A fault of this program: the caller may try again.
            self._report(name or "a request", error)
            error = Refusal(faults.SERVICE_UNAVAILABLE, "The request could not be served.")
        self.answered[name, error.fault.status] += 1
        return protocol.encode_refusal(error, request_id, self._loop.time())

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
        for exchange in list(self._receives):
            if exchange.pending.waits:
                exchange.pending.cancel()
                exchange.finish = None
                self._answer_later(exchange, _NO_MESSAGES, None)

    async def close(self) -> None:
        """Stops the move tasks."""
        await self._moves.close()


def _reader(fields: Sequence[str]) -> Callable[[Shape], tuple[Any, ...]]:
    """A getter of these fields. attrgetter returns a tuple only for two or more names."""
    padding = ["__class__"] * (2 - len(fields))
    return attrgetter(*padding, *fields)


def _first_absent(action: Action, parameters: Shape) -> str:
    return next(wire_name(field) for field in action.required if getattr(parameters, field) is None)
