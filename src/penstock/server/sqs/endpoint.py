"""The SQS endpoint: an HTTP request becomes an action, the action's result becomes the answer.

Who asks is read from the signature's scope; what is asked, by JSON or by the Query protocol; both
meet in one table of actions. An answer leaves when what it says is durable: many answers share one
sync. A receive that finds nothing stands in the engine's line and costs nothing until it is served.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from penstock.backends.engine.waiting import Waiter
from penstock.errors import InFlightLimit, JournalError, PenstockError, QueueNotFound
from penstock.server.http import HttpConnection, Request
from penstock.server.sqs.access import Access
from penstock.server.sqs.messages import MessageActions, PendingReceive
from penstock.server.sqs.moves import MoveActions
from penstock.server.sqs.protocols import SqsProtocol, protocol_of
from penstock.server.sqs.queues import QueueActions
from penstock.server.sqs.receipts import ReceiptActions
from penstock.server.sqs.store import Caller, Store, refusal_of
from penstock.server.sqs.waits import Answers, Waits
from penstock.service import ListQueues
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs.errors import Refusal, absent
from penstock.wire.sqs.message import header_trace
from penstock.wire.sqs.model import ACTIONS, Action, Shape, wire_name

Operation = Callable[[Any, Caller], Shape | PendingReceive | None]


class SqsEndpoint:
    """Answers SQS requests from one engine."""

    def __init__(self, store: Store, access: Access) -> None:
        self._engine = store.engine
        self._journal = store.engine.journal
        self._loop = asyncio.get_running_loop()
        self._access = access
        self._answers = Answers(store.engine, self._fail)
        # Done once the engine has stopped because its storage cannot be trusted.
        self.failed: asyncio.Future[JournalError] = self._loop.create_future()
        self._waits = Waits(store.engine)
        receipts, queues, self._moves = (
            ReceiptActions(store),
            QueueActions(store),
            MoveActions(store),
        )
        messages = MessageActions(store, receipts)
        self._operations: dict[str, Operation] = {
            "AddPermission": queues.permit,
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

    def answer(self, request: Request, connection: HttpConnection) -> bytes | None:
        """The response, or None if it will be sent when it may."""
        self._asked += 1
        request_id = f"{self._id_prefix}{self._asked:012x}"
        protocol = protocol_of(request)
        name = ""
        try:
            caller = self._access.caller(request)
            if "x-amzn-trace-id" in request.headers:
                caller = caller._replace(trace=header_trace(request.headers["x-amzn-trace-id"]))
            action, asked = protocol.decode(request, caller.base_url)
            name = action.name
            if None in self._required[name](asked):
                raise absent(name, _first_absent(action, asked))
            if self._ending:
                raise Refusal(faults.REQUEST_THROTTLED, "The server is about to stop.")
            result = self._operations[name](asked, caller)
            if type(result) is PendingReceive:
                return self._wait(result, protocol, action, request_id, connection)
        except Refusal as refusal:
            return self._refused(name, refusal, protocol, request_id)
        except Exception as error:
            # A fault of ours: the caller may try again, and whoever runs the server must be told.
            told = {"message": f"{name or 'a request'} failed", "exception": error}
            self._loop.call_exception_handler(told)
            failed = Refusal(faults.SERVICE_UNAVAILABLE, "The request could not be served.")
            return self._refused(name, failed, protocol, request_id)
        now_s = self._loop.time()
        answer = protocol.encode(action, result, request_id, now_s)  # type: ignore[arg-type]
        self.answered[name, 200] += 1
        sequence = self._engine.answer_sequence
        if sequence > self._journal.durable_sequence:
            self._answers.send_when_durable(sequence, connection, answer)
            return None
        return answer

    def _refused(
        self, name: str, refusal: Refusal, protocol: SqsProtocol, request_id: str
    ) -> bytes:
        self.answered[name, refusal.fault.status] += 1
        if refusal.fault is faults.SERVICE_UNAVAILABLE:
            self.is_healthy()
        return protocol.encode_refusal(refusal, request_id, self._loop.time())

    def _wait(
        self,
        poll: PendingReceive,
        protocol: SqsProtocol,
        action: Action,
        request_id: str,
        connection: HttpConnection,
    ) -> bytes | None:
        done = partial(self._waited, poll, protocol, action, request_id, connection)
        try:
            if self._waits.wait(poll.pull, connection, done):
                return None
        except PenstockError as error:
            return self._refused(action.name, refusal_of(error), protocol, request_id)
        return protocol.encode(action, poll.finish([]), request_id, self._loop.time())

    def _waited(
        self,
        poll: PendingReceive,
        protocol: SqsProtocol,
        action: Action,
        request_id: str,
        connection: HttpConnection,
        waiter: Waiter,
    ) -> None:
        # A queue that was deleted meanwhile had nothing for whoever waited there.
        if waiter.error is not None and not isinstance(waiter.error, InFlightLimit | QueueNotFound):
            refusal = refusal_of(waiter.error)
            connection.finish(self._refused(action.name, refusal, protocol, request_id))
            return
        result = poll.finish(waiter.claims)
        answer = protocol.encode(action, result, request_id, self._loop.time())
        self.answered[action.name, 200] += 1
        if waiter.sequence > self._journal.durable_sequence:
            self._answers.send_when_durable(waiter.sequence, connection, answer)
        else:
            connection.finish(answer)

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
        self._waits.end()

    async def close(self) -> None:
        """Ends what runs by itself."""
        await self._moves.close()
        self._waits.close()


def _first_absent(action: Action, asked: Shape) -> str:
    return next(wire_name(field) for field in action.required if getattr(asked, field) is None)
