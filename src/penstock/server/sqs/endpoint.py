"""The SQS endpoint: an HTTP request becomes an action, the action's result becomes the answer.

The caller is read from the signature's scope, the action from JSON or the Query protocol; both
protocols share one table of actions. An action is a generator of commands that the service runs. If
it completes within the call, the answer is returned at once; otherwise it is sent from a callback:
when changes must become durable first, when a receive waits for a message, and always if the
service is in another process.
"""

import asyncio
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, Final, cast

import msgspec

from penstock.backends.loop import Finish, Pending, Single, Steps
from penstock.core.receipts import IDENTITY_BYTES, MessageIds
from penstock.durations import BOUNDS_S, Durations
from penstock.errors import JournalError, PenstockError
from penstock.server.http import HttpConnection, Request
from penstock.server.lines import REQUEST_SLOW, SIGNATURE_REFUSED, ServerLines
from penstock.server.sqs.access import Access, holder_of
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
_SENDS: Final = frozenset({"SendMessage", "SendMessageBatch"})
_ATTRIBUTE: Final = b"MessageAttribute"
_NO_MESSAGES: Final = ReceiveResult([])


class _Exchange(msgspec.Struct, eq=False):
    """A request that is answered, now or later, and the connection it came on."""

    connection: HttpConnection
    protocol: SqsProtocol
    request_id: str
    began_s: float
    action: Action | None = None
    # The function that makes the result from the reply, if the action was a single command.
    finish: Finish | None = None
    context: Any = None
    pending: Pending | None = None
    # Made while the disk syncs, if the reply was known then.
    answer: bytes | None = None
    is_refused: bool = False
    # When a receive began to wait, on the clock of the loop.
    since_s: float = 0.0

    @property
    def action_name(self) -> str:
        """The name of the action; empty if the request could not be read."""
        return "" if self.action is None else self.action.name


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
        # What performs each action, with a getter of its required parameters.
        self._operations = {
            name: (operations[name], _reader(action.required)) for name, action in ACTIONS.items()
        }
        # Receives without an answer, most of them because they wait for a message.
        self._receives: set[_Exchange] = set()
        self._ending = False
        self._request_ids = MessageIds(secrets.token_bytes(IDENTITY_BYTES))
        self._requests = 0
        # How long actions took that were answered with 200 and did not wait for a message; and of
        # all others (action, status), how often. The metrics read both.
        self.times = {name: Durations() for name in ACTIONS}
        self.answered: Counter[tuple[str, int]] = Counter()
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
        began_s = perf_counter()
        self._requests += 1
        exchange = _Exchange(
            connection, protocol_of(request), self._request_ids.show(self._requests), began_s
        )
        try:
            caller = self._access.caller(request)
            if "x-amzn-trace-id" in request.headers:
                caller = caller._replace(trace=trace_of_header(request.headers["x-amzn-trace-id"]))
            action, parameters = exchange.protocol.decode(request, caller.base_url)
            exchange.action = action
            name = action.name
            operation, required = self._operations[name]
            # A message without attributes is stored in less time: its sender is kept with it only
            # where the sender is known by a key.
            if (
                name == _RECEIVE
                or caller.confined
                or (name in _SENDS and _ATTRIBUTE in request.body)
            ):
                # The same as `_replace`, in less time: every receive comes here.
                holder = holder_of(request, exchange.connection)
                caller = Caller(
                    caller.owner,
                    caller.suffix,
                    caller.base_url,
                    caller.confined,
                    caller.trace,
                    holder,
                )
                if name == _RECEIVE and is_peek(request):
                    operation = partial(self._peek, request)
            if None in required(parameters):
                raise absent(name, _first_absent(action, parameters))
            if self._ending:
                raise Refusal(faults.REQUEST_THROTTLED, "The server is about to stop.")
            made = operation(parameters, caller)
            if type(made) is tuple:
                command, exchange.finish, exchange.context = made
                result = self._submit(command)
            else:
                result = self._run(cast("Steps[Any]", made))
        except Exception as error:
            return self._make_answer(exchange, None, error)
        if not isinstance(result, Pending):
            answer = self._make_answer(exchange, result, None)
            self._count(exchange)
            return answer
        exchange.pending = result
        if result.is_known:
            exchange.answer = self._make_answer(exchange, result.reply, None)
        result.then(partial(self._answer_later, exchange))
        if exchange.action_name == _RECEIVE:
            # Other actions are completed even if the client disconnects.
            exchange.since_s = self._loop.time()
            self._receives.add(exchange)
            connection.on_gone = partial(self._abandon, exchange)
        return None

    def _answer_later(self, exchange: _Exchange, reply: Any, error: Exception | None) -> None:
        self._receives.discard(exchange)
        answer = exchange.answer
        if answer is None or error is not None:
            answer = self._make_answer(exchange, reply, error)
        self._count(exchange)
        exchange.connection.finish(answer)
        if isinstance(error, JournalError):
            exchange.connection.close()

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

    def _count(self, exchange: _Exchange) -> None:
        """Counts an action that was answered with 200; others are counted when they are refused."""
        if exchange.is_refused:
            return
        name = exchange.action_name
        if name == _RECEIVE and exchange.pending is not None and exchange.answer is None:
            # How long it waited for a message is not how long the server took.
            self.answered[name, 200] += 1
            return
        took_s = perf_counter() - exchange.began_s
        # The same as `Durations.add`, in less time: every request comes here.
        times = self.times[name]
        times.counts[bisect_left(BOUNDS_S, took_s)] += 1
        times.sum_s += took_s
        if took_s >= self._slow_s:
            self._lines.tell(REQUEST_SLOW, action=name, ms=round(took_s * 1_000, 1))

    def _abandon(self, exchange: _Exchange) -> None:
        """Called if the client of a receive disconnects: the messages claimed for it return."""
        self._receives.discard(exchange)
        if exchange.pending is not None:
            exchange.pending.cancel()

    def _refused(self, exchange: _Exchange, error: Exception) -> bytes:
        if isinstance(error, PenstockError):
            error = refusal_of(error)
        if not isinstance(error, Refusal):
            # A fault of this program: the caller may try again.
            self._report(exchange.action_name or "a request", error)
            error = Refusal(faults.SERVICE_UNAVAILABLE, "The request could not be served.")
        exchange.is_refused = True
        self.answered[exchange.action_name, error.fault.status] += 1
        refusal: dict[str, object] = {
            "action": exchange.action_name or None,
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
