"""The network of a simulation: messages that are late or lost, subjects, and who listens to them.

`HostConnection` has the methods of a NATS client, and of `cluster.jetstream`, that routers and
owners use. Each message has a transit time of its own, so messages may overtake each other, which
those of one NATS connection never do; and each may be lost alone. Nothing may rely on more.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from nats.errors import NoRespondersError

from penstock.cluster.log import Append, LogRequest, LogSteps, Mismatch, Pause, Unanswered
from penstock.cluster.router import Router
from tests.simulation.schedule import Action, Host, RunSchedule
from tests.simulation.streams import StreamsModel

if TYPE_CHECKING:
    from tests.simulation.cluster import Profile, SimulatedCluster

T = TypeVar("T")
# The name of the cluster, with which its subjects begin.
NAME: Final = "sim"
EPOCH_MS: Final = 1_700_000_000_000
_APPEND_MS: Final = 500
_REQUEST_MS: Final = 2_000
_REQUEST_S: Final = 0.5
_OPEN_AGAIN_S: Final = 0.05
_NO_RESPONDERS: Final = {"Status": "503"}


class SimulatedMessage(NamedTuple):
    """A message as a subscription gets it."""

    subject: str
    data: bytes
    reply: str
    headers: dict[str, str] | None = None
    # Sends a message from the host that got this one.
    publish: Callable[[str, bytes, str], None] | None = None

    async def respond(self, data: bytes) -> None:
        """Sends data to the reply subject."""
        if self.publish is not None:
            self.publish(self.reply, data, "")


Take = Callable[[Any], Awaitable[None]]


class RequestCaller(Protocol):
    """Whatever waits for the reply to a request."""

    def resume(self, reply: Any, error: Exception | None) -> None:
        """The reply has come, or an error."""
        ...


class SimulatedSubscription:
    """What a host listens to; messages are taken one after another."""

    def __init__(self, network: "SimulatedNetwork", host: Host, subject: str, take: Take) -> None:
        self.host = host
        self.subject = subject
        self._network = network
        self._take = take
        self._arrived: deque[SimulatedMessage] = deque()
        self._is_taking = False

    def arrive(self, message: SimulatedMessage) -> None:
        """A message has arrived at the host."""
        self._arrived.append(message)
        if not self._is_taking:
            self._is_taking = True
            self.host.loop.create_task(self._take_all())

    async def _take_all(self) -> None:
        try:
            while self._arrived:
                await self._take(self._arrived.popleft())
        except Exception as error:
            self.host.schedule.violate(
                f"{self.host.name}: taking a message of {self.subject} raised "
                f"{type(error).__name__}: {error}"
            )
        finally:
            self._is_taking = False

    def end(self) -> None:
        """Listens no longer."""
        self._network.end(self)

    async def unsubscribe(self) -> None:
        """Listens no longer."""
        self.end()


class SimulatedNetwork:
    """All hosts' connections, and the servers behind them."""

    def __init__(self, schedule: RunSchedule, profile: "Profile", streams: StreamsModel) -> None:
        self._schedule = schedule
        self._profile = profile
        self._streams = streams
        self._listeners: dict[str, list[SimulatedSubscription]] = {}
        self._inboxes = 0

    def transit_ms(self) -> int | None:
        """How long the network takes for a message; None if the message is lost."""
        chance = self._schedule.chance()
        if chance < self._profile.loss:
            return None
        if chance > 1 - self._profile.late:
            return self._schedule.below(self._schedule.pick([60, 800, 3_000]))
        return self._schedule.below(4)

    def request(self, host: Host, caller: RequestCaller, request: LogRequest[Any]) -> None:
        """Sends a request to the servers and the reply back; or Unanswered, after a time."""
        exchange = _SimulatedExchange(self, host, caller)
        limit_ms = _APPEND_MS if type(request) is Append else _REQUEST_MS
        exchange.timer = host.later(limit_ms, exchange.time_out)
        transit_ms = self.transit_ms()
        if transit_ms is not None and not host.is_outbound_cut:
            arrive = partial(self._streams.arrive, request, exchange.answer)
            self._schedule.after(transit_ms, arrive)

    def reply(self, host: Host, action: Action) -> None:
        """Runs an action on a host when a reply of the servers has come, unless it is lost."""
        transit_ms = self.transit_ms()
        if transit_ms is not None and not host.is_inbound_cut:
            self._schedule.after(transit_ms, partial(host.run, action))

    def send(self, sender: Host, receiver: Host, action: Action) -> None:
        """Runs an action on the receiver after a transit time, unless the message is lost."""
        transit_ms = self.transit_ms()
        if transit_ms is not None and not sender.is_outbound_cut and not receiver.is_inbound_cut:
            self._schedule.after(transit_ms, partial(receiver.run, action))

    # Subjects.

    def next_inbox(self, host: Host) -> str:
        """A subject for replies that no other host has."""
        self._inboxes += 1
        return f"inbox.{host.name}-{self._inboxes}"

    def listen(self, host: Host, subject: str, take: Take) -> SimulatedSubscription:
        """Has the messages of a subject brought to a host; it may end in `.*`."""
        subscription = SimulatedSubscription(self, host, subject, take)
        self._listeners.setdefault(subject, []).append(subscription)
        return subscription

    def end(self, subscription: SimulatedSubscription) -> None:
        """Ends a subscription."""
        listening = self._listeners.get(subscription.subject, [])
        if subscription in listening:
            listening.remove(subscription)
        if not listening:
            self._listeners.pop(subscription.subject, None)

    def disconnect(self, host: Host) -> None:
        """Ends all subscriptions of a host that was stopped."""
        for listening in [*self._listeners.values()]:
            for subscription in [*listening]:
                if subscription.host is host:
                    self.end(subscription)

    def publish(self, sender: Host, subject: str, data: bytes, reply: str) -> None:
        """Sends a message to all subscribers; if there are none, the servers notify `reply`."""
        if sender.is_stopped:
            return
        message = SimulatedMessage(subject, data, reply)
        listening = self._listening(subject)
        for subscription in listening:
            publish = partial(self.publish, subscription.host)
            arrive = partial(subscription.arrive, message._replace(publish=publish))
            self.send(sender, subscription.host, arrive)
        if reply and not listening:
            no_responders = SimulatedMessage(reply, b"", "", _NO_RESPONDERS)
            for subscription in self._listening(reply):
                self.send(sender, subscription.host, partial(subscription.arrive, no_responders))

    def _listening(self, subject: str) -> list[SimulatedSubscription]:
        several = subject.rpartition(".")[0] + ".*"
        return [*self._listeners.get(subject, ()), *self._listeners.get(several, ())]


class HostConnection:
    """A host's connection to the servers, for routers and owners."""

    def __init__(self, network: SimulatedNetwork, host: Host) -> None:
        self._network = network
        self._host = host

    def new_inbox(self) -> str:
        """A subject for replies."""
        return self._network.next_inbox(self._host)

    async def subscribe(self, subject: str, *, cb: Take) -> SimulatedSubscription:
        """Has `cb` called with the messages of a subject."""
        return self._network.listen(self._host, subject, cb)

    async def publish(self, subject: str, data: bytes = b"", reply: str = "") -> None:
        """Sends a message."""
        self._network.publish(self._host, subject, data, reply)

    async def request(
        self, subject: str, data: bytes = b"", timeout: float = _REQUEST_S
    ) -> SimulatedMessage:
        """Sends a message and waits for its reply. Raises NoRespondersError or TimeoutError."""
        answered: asyncio.Future[SimulatedMessage] = self._host.loop.create_future()

        async def take(message: SimulatedMessage) -> None:
            if not answered.done():
                answered.set_result(message)

        inbox = self.new_inbox()
        subscription = self._network.listen(self._host, inbox, take)
        self._network.publish(self._host, subject, data, inbox)
        try:
            async with asyncio.timeout(timeout):
                message = await answered
        finally:
            subscription.end()
        if message.headers:
            raise NoRespondersError
        return message

    async def execute(self, request: LogRequest[T]) -> T:
        """Has the replicated log carry a request out. Raises Mismatch or Unanswered."""
        waiting = _WaitingForReply(self._host)
        self._network.request(self._host, waiting, request)
        return await waiting.reply

    async def run(self, steps: LogSteps[T]) -> T:
        """Runs steps to their end, as `JetStream.run` does. Raises what they raise."""
        reply, error = None, None
        try:
            while True:
                request = steps.send(reply) if error is None else steps.throw(error)
                reply, error = None, None
                try:
                    if type(request) is Pause:
                        await asyncio.sleep(request.ms / 1_000)
                    else:
                        reply = await self.execute(request)
                except (Mismatch, Unanswered) as raised:
                    error = raised
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()

    async def close(self) -> None:
        """Ends the connection."""


class _WaitingForReply:
    """A coroutine that waits for the reply to a request."""

    __slots__ = ("reply",)

    def __init__(self, host: Host) -> None:
        self.reply = host.loop.create_future()

    def resume(self, reply: Any, error: Exception | None) -> None:
        """The reply has come, or an error."""
        if self.reply.done():
            return
        if error is None:
            self.reply.set_result(reply)
        else:
            self.reply.set_exception(error)


class _SimulatedExchange:
    """A request to the servers, and its reply."""

    __slots__ = ("_caller", "_host", "_network", "timer")

    def __init__(self, network: SimulatedNetwork, host: Host, caller: RequestCaller) -> None:
        self._network = network
        self._host = host
        self._caller: RequestCaller | None = caller
        self.timer: Any = None

    def answer(self, reply: Any, error: Exception | None) -> None:
        """The servers reply."""
        self._network.reply(self._host, partial(self._finish, reply, error))

    def time_out(self) -> None:
        """No reply has come."""
        self._finish(None, Unanswered("no answer"))

    def _finish(self, reply: Any, error: Exception | None) -> None:
        caller, self._caller = self._caller, None
        if caller is not None:
            self.timer.cancel()
            caller.resume(reply, error)


class RoutingHost(Host):
    """A process with a router: a node, or a client that asks the owners itself."""

    def __init__(self, cluster: "SimulatedCluster", name: str, skew_ms: int) -> None:
        super().__init__(cluster.schedule, name)
        self.cluster = cluster
        self.skew_ms = skew_ms
        # Routers and owners expect a NATS client, and a JetStream.
        self.connection: Any = HostConnection(cluster.network, self)
        self.router: Router | None = None
        self._has_router = asyncio.Event()
        self.schedule.after(0, partial(self.run, self._open))

    def _open(self) -> None:
        self.begin(self._open_router(), self._opened)

    async def _open_router(self) -> Router:
        while True:
            try:
                return await self.cluster.router_class.open(
                    self.connection,
                    self.connection,
                    NAME,
                    self.cluster.settings,
                    self.now_ms,
                    self.schedule.below,
                )
            except Unanswered:
                await asyncio.sleep(_OPEN_AGAIN_S)

    def _opened(self, router: Any, error: Exception | None) -> None:
        if error is not None:
            self.schedule.violate(f"opening a router raised {type(error).__name__}: {error}")
        self.router = router
        self._has_router.set()

    def now_ms(self) -> int:
        """The wall clock of this host."""
        return EPOCH_MS + self.schedule.now_ms + self.skew_ms

    async def opened_router(self) -> Router:
        """The router, once it is open."""
        await self._has_router.wait()
        assert self.router is not None
        return self.router

    def stop(self) -> None:
        super().stop()
        self.cluster.network.disconnect(self)
