"""The Carrot broker: it submits the requests of every connection to one service.

    bytes → SessionDecoder, or read_request → LoopService.submit → the answer, at once or later

An answer that is durable at once is made within the call that brought the request's bytes. Any
other is a `Pending` of the service: it waits for the disk, or for a message. Waiting reads are the
service's own waiting pulls, so they are served first come, first served.

`connection` has the states of one connection, `sessions` the requests of the extension.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from penstock.backends.loop import LoopService, Pending, Steps
from penstock.errors import InvalidReceipt, PenstockError, QueueNotFound, StaleReceipt
from penstock.server.faults import Faults
from penstock.server.metrics import MetricFamily
from penstock.server.stream import Limits, StreamServer, bodies_bytes
from penstock.service import Claim, Command, CreateQueue, Pull, Push
from penstock.wire.carrot import OPCODE_NAMES
from penstock.wire.carrot.reasons import REMOVED, make_reason, read_reason, reason_of

if TYPE_CHECKING:
    from penstock.server.carrot.connection import CarrotConnection

# Claims that a connection may hold unacknowledged.
HELD_MAX: Final = 10_000
_NAMES_MAX: Final = 10_000
# All messages written to a FIFO queue are in this group: the protocol has no groups.
GROUP: Final = "carrot"
_FIFO: Final = ".fifo"

Finish = Callable[[Any], None]
Refuse = Callable[[PenstockError], None]


class HeldClaim(NamedTuple):
    """A claim whose message was sent, and is not acknowledged yet."""

    queue: str
    proof: Any
    deadline_ms: int


class CarrotServer(StreamServer):
    """The broker: its connections and their claims."""

    def __init__(
        self,
        service: LoopService,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        failed: Callable[[PenstockError], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(service, limits, failed, faults)
        self.token = None if token is None else token.encode()
        self.submit = service.submit
        # Requests by opcode, and refusals by the first word of their reasons.
        self.requests = [0] * 256
        self.refused: Counter[str] = Counter()
        # The name and the group of a queue, by the bytes of its name in a request.
        self._names: dict[bytes, tuple[str, str | None]] = {}
        # Single reads whose message was sent and not acknowledged, by queue.
        self._unanswered: defaultdict[str, set[CarrotConnection]] = defaultdict(set)

    # Commands.

    def name_of(self, raw: bytes) -> tuple[str, str | None]:
        """The name of a queue, and the group of messages written to it."""
        found = self._names.get(raw)
        if found is None:
            name = raw.decode("latin-1")
            found = (name, GROUP if name.endswith(_FIFO) else None)
            if len(self._names) >= _NAMES_MAX:
                self._names.clear()
            self._names[raw] = found
        return found

    def execute(
        self,
        connection: "CarrotConnection",
        command: Command[Any],
        finish: Finish,
        refuse: Refuse,
    ) -> None:
        """Submits a command, and calls `finish` with the reply or `refuse` with the error.

        They are called at once or later; later only if the connection is still open.
        """
        try:
            reply = self.submit(command)
        except PenstockError as error:
            refuse(error)
        except Exception as fault:
            self.give_up(fault)
        else:
            if isinstance(reply, Pending):
                self.defer(connection, reply, finish, refuse, type(command) is Pull)
            else:
                finish(reply)

    def execute_steps(
        self,
        connection: "CarrotConnection",
        steps: Steps[Any],
        finish: Finish,
        refuse: Refuse,
        *,
        is_pull: bool = False,
    ) -> None:
        """The same as `execute` for several commands, of which the last may be a pull."""
        try:
            reply = self.service.run(steps)
        except PenstockError as error:
            refuse(error)
        except Exception as fault:
            self.give_up(fault)
        else:
            if isinstance(reply, Pending):
                self.defer(connection, reply, finish, refuse, is_pull)
            else:
                finish(reply)

    def defer(
        self,
        connection: "CarrotConnection",
        pending: Pending,
        finish: Finish,
        refuse: Refuse,
        is_pull: bool = False,
    ) -> None:
        """Answers when the reply has come, or the wait for a message has ended."""
        waits, size = pending.waits, 0
        if pending.runs:
            # Its later requests wait until all steps of this one are executed.
            connection.hold_requests()
            pending.ran = connection.resume_requests
        key = connection.next_key() if is_pull else 0
        if waits:
            connection.waits[key] = pending
        else:
            size = bodies_bytes(pending.claims)
            connection.count_deferred(1, size)
            # If the connection breaks, only requests that may make claims are cancelled.
            if is_pull:
                connection.claiming[key] = pending
        pending.then(partial(self._finish_later, connection, key, waits, size, finish, refuse))

    def _finish_later(
        self,
        connection: "CarrotConnection",
        key: int,
        waited: bool,
        size: int,
        finish: Finish,
        refuse: Refuse,
        reply: Any,
        error: Exception | None,
    ) -> None:
        if waited:
            connection.waits.pop(key, None)
        else:
            connection.count_deferred(-1, -size)
            connection.claiming.pop(key, None)
        if error is None:
            finish(reply)
        elif self.broken is None:
            # If the service has failed, `fail` has answered every connection already.
            refuse(self.shown_error(error))
        self.plan_flush()

    def reason(self, error: PenstockError) -> bytes:
        """The reason for an error; counts the refusal."""
        return self._counted(reason_of(error))

    def settle_reason(self, error: PenstockError) -> bytes:
        """The same for the error of a claim: a queue that is not found was removed since."""
        if isinstance(error, QueueNotFound) or (
            isinstance(error, InvalidReceipt) and not isinstance(error, StaleReceipt)
        ):
            reason = "the queue was removed, and its messages with it"
            return self._counted(make_reason(REMOVED, reason))
        return self.reason(error)

    def refusal(self, word: str, text: str) -> bytes:
        """A reason from its word and text; counts the refusal."""
        return self._counted(make_reason(word, text))

    def _counted(self, reason: bytes) -> bytes:
        self.refused[read_reason(reason)[0]] += 1
        return reason

    # Claims.

    def await_verdict(self, connection: "CarrotConnection", queue: str) -> None:
        """Notes a single read whose message was sent."""
        self._unanswered[queue].add(connection)

    def forget_verdict(self, connection: "CarrotConnection", queue: str) -> None:
        """Notes that a single read has ended."""
        waiting = self._unanswered.get(queue)
        if waiting is not None:
            waiting.discard(connection)
            if not waiting:
                del self._unanswered[queue]

    def cancel_reads(self, queue: str) -> None:
        """Ends the single reads that wait for a verdict on a message of a removed queue."""
        for connection in list(self._unanswered.get(queue, ())):
            connection.cancel_read()

    def release(self, claims: Sequence[HeldClaim]) -> None:
        """Releases the messages of a lost connection."""
        # A claim is released by its queue and its receipt.
        self.service.abandon(cast("Sequence[Claim]", claims))

    # Figures.

    def families(self) -> Iterator[MetricFamily]:
        """The broker's metrics."""
        connections = MetricFamily(
            "penstock_carrot_connections", "gauge", "Connections to the broker."
        )
        connections.add(len(self.connections))
        yield connections
        seen = MetricFamily(
            "penstock_carrot_connections_accepted_total",
            "counter",
            "Connections the broker has accepted.",
        )
        seen.add(self.connections_seen)
        yield seen
        held = MetricFamily(
            "penstock_carrot_unacknowledged",
            "gauge",
            "Messages that were sent and not acknowledged yet.",
        )
        held.add(sum(len(each.held) for each in self.connections))
        yield held
        requests = MetricFamily(
            "penstock_carrot_requests_total", "counter", "Requests to the broker, by opcode."
        )
        for opcode, name in OPCODE_NAMES.items():
            requests.add(self.requests[opcode], request=name)
        yield requests
        refused = MetricFamily(
            "penstock_carrot_refused_total", "counter", "Requests that the broker refused."
        )
        for word, count in sorted(self.refused.items()):
            refused.add(count, reason=word)
        yield refused


def make_push(name: str, group: str | None, message: bytes) -> Push:
    """The command of a WRITE or PUT."""
    return Push(name, message) if group is None else Push(name, message, group=group)


def make_create(name: str, settings: dict[str, Any]) -> CreateQueue:
    """The command of an ADD; a name that ends in .fifo makes a FIFO queue."""
    return CreateQueue(name, {**settings, "fifo": True} if name.endswith(_FIFO) else settings)
