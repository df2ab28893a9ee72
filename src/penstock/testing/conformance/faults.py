"""Partial failure: the n-th request that a command sends is cut, delayed, cancelled or interrupted.

For a backend that is the client of a service elsewhere. In a test module:

    @pytest.fixture(scope="module")
    def through_proxy():
        url = "mine://127.0.0.1:{port}"
        with FaultyClients(("127.0.0.1", 7000), my_request, url, ManualClock()) as clients:
            yield clients

    class TestMineUnderFaults(FaultContract):
        @pytest.fixture
        def clients(self, through_proxy):
            return through_proxy

Each test executes one command again and again, with a fault at its first request, its second and
so on, until it has no more requests or `REQUESTS_MAX` is reached. Each time, on fresh queues:

- the command returns, or raises an UnavailableError (or the interrupt, or the cancellation);
- no message is lost, none comes back whose delete was answered, and none is there twice unless the
  command may leave it twice (`TWICE`);
- no message stays claimed by nobody: after a cancellation or an interrupt those that the command
  pulled are visible at once, after a lost connection when their claims run out;
- the next command of the same client works.
"""

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, ClassVar, Final, TypeVar

import pytest

import penstock
import penstock.aio
from penstock.clock import ManualClock
from penstock.errors import (
    PenstockError,
    QueueNotFound,
    StaleReceipt,
    UnavailableError,
)
from penstock.service import (
    Batch,
    Command,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Pull,
    Stats,
)
from penstock.testing.conformance.scenes import MANY, SCRIPTS, TIMEOUT_S, WAIT_MS, Scene, until
from penstock.testing.conformance.seam import POLL_S_MAX
from penstock.testing.proxy import FaultProxy, Moment, ProxyFault, Split

R = TypeVar("R")
# A claim of a test lasts so long, on a manual clock.
VISIBILITY_MS: Final = 60_000
_DELAY_S: Final = 0.02


class AwaitedClient:
    """An asyncio client, in an event loop that runs in a thread of its own."""

    def __init__(self, open_queues: Callable[[], Awaitable[penstock.aio.AsyncQueues]]) -> None:
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="awaited-client", daemon=True)
        self._thread.start()
        self._ended = threading.Event()
        self._task: asyncio.Task[Any] | None = None
        self._queues = self._run(_awaited(open_queues))

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def execute(self, command: Command[R]) -> R:
        """Executes a command to its end. Raises what it raises."""
        reply: R = self._run(self._queues.service.execute(command))
        return reply

    def start(self, command: Command[Any]) -> None:
        """Begins a command."""
        self._ended.clear()
        self._loop.call_soon_threadsafe(self._start, command)

    def _start(self, command: Command[Any]) -> None:
        self._task = self._loop.create_task(self._queues.service.execute(command))
        self._task.add_done_callback(lambda _: self._ended.set())

    def cancel(self) -> None:
        """Cancels the command, as its caller's cancellation does."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def outcome(self, timeout_s: float = TIMEOUT_S) -> Any:
        """The reply to the command, or what it raised; None if it is not there in time."""
        if not self._ended.wait(timeout_s) or self._task is None:
            return None
        if self._task.cancelled():
            return asyncio.CancelledError()
        return self._task.exception() or self._task.result()

    def close(self) -> None:
        """Closes the client and ends the thread."""
        self._run(self._queues.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _awaited(
    open_queues: Callable[[], Awaitable[penstock.aio.AsyncQueues]],
) -> penstock.aio.AsyncQueues:
    return await open_queues()


class FaultyClients:
    """A blocking and an asyncio client of a server, through a proxy.

    `url` is the client's, with `{port}` for the port of the proxy. With a clock that both sides
    have, time passes by it; without one in real time, and then `visibility_ms` should be short.
    """

    def __init__(
        self,
        server: tuple[str, int],
        split: Split,
        url: str,
        clock: ManualClock | None = None,
        *,
        has_clock: bool = True,
        visibility_ms: int = VISIBILITY_MS,
    ) -> None:
        self.clock = clock
        self.visibility_ms = visibility_ms
        self.proxy = FaultProxy(server, split)
        self._url = url.replace("{port}", str(self.proxy.port))
        self._clock = clock if has_clock else None
        self.blocking = penstock.connect(self._url, clock=self._clock)
        self.awaited = AwaitedClient(lambda: penstock.aio.connect(self._url, clock=self._clock))
        self.lacks = self.blocking.service.LACKS

    def pass_wait(self) -> None:
        """Lets a wait of a pull end, but no claim."""
        if self.clock is not None:
            self.clock.advance(seconds=2 * WAIT_MS / 1_000)

    def __enter__(self) -> "FaultyClients":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes both clients and the proxy."""
        self.awaited.close()
        self.blocking.close()
        self.proxy.close()


# Of a backend whose blocking face is a portal to the one for asyncio.
PORTAL_FAULTS: Final = (
    *("cut before", "cut after", "delay before", "delay after"),
    *("interrupt before", "interrupt after", "cancel before", "cancel after"),
)
_CALLER_ENDS: Final = (asyncio.CancelledError, KeyboardInterrupt)
FAULTS: Final = (*PORTAL_FAULTS, "cut before, awaited", "cut after, awaited")


class FaultContract:
    """The suite; subclass it and define the fixture `clients`."""

    # At how many requests of each command a fault is tried; None for all of them.
    REQUESTS_MAX: ClassVar[int | None] = 5
    # The commands that may leave a message twice if their connection is lost, each with its reason.
    TWICE: ClassVar[dict[str, str]] = {}
    # Why claims of a blocking pull that is interrupted last until they run out; empty if they do
    # not.
    KEPT_CLAIMS: ClassVar[str] = ""
    FAULTS: ClassVar[Sequence[str]] = FAULTS
    COMMANDS: ClassVar[Sequence[str]] = tuple(SCRIPTS)

    @pytest.fixture(name="clients")
    def _no_clients(self) -> FaultyClients:
        raise NotImplementedError(f"{type(self).__name__} must have a fixture called clients")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test for each command and fault."""
        metafunc.parametrize("fault", self.FAULTS)
        metafunc.parametrize("command", self.COMMANDS)

    def test_a_fault_at_any_request_of_a_command_loses_nothing(
        self,
        clients: FaultyClients,
        command: str,
        fault: str,
        request: pytest.FixtureRequest,
    ) -> None:
        """Row 26: the ledger holds after a fault at each request, and the next command works."""
        tried = 0
        for number in count(1):
            if self.REQUESTS_MAX is not None and number > self.REQUESTS_MAX:
                break
            if not self._round(clients, command, fault, number):
                break
            tried += 1
        figure = f"{tried} requests of a command with a fault at each"
        request.node.user_properties.append(("figure", figure))

    def pass_time(self, clients: FaultyClients) -> None:
        """Lets the claims run out; in real time, by waiting until their messages are found."""
        if clients.clock is not None:
            clients.clock.advance(seconds=3 * clients.visibility_ms / 1_000)

    def _round(self, clients: FaultyClients, command: str, fault: str, number: int) -> bool:
        """Tries a fault at this request; whether there was such a request."""
        kind, moment = fault.partition(",")[0].split()
        is_awaited = kind == "cancel" or "awaited" in fault
        client: Any = clients.awaited if is_awaited else clients.blocking.service
        scene = Scene(client.execute, clients.visibility_ms)
        if command in self.TWICE:
            scene.twice |= {*scene.bodies(MANY), b"the fourth", *(b"new %d" % n for n in range(4))}
        script = SCRIPTS[command](scene)
        asked = next(script)
        place: Any = moment
        outcome, is_met = _meet(clients, asked, kind, place, number, is_awaited)
        self._check_outcome(command, kind, outcome, is_met, clients.clock is None)
        if kind == "cut" and not isinstance(outcome, BaseException):
            # Nothing of the command waited for that connection: the next one meets its loss.
            with suppress(UnavailableError, QueueNotFound):
                scene.execute(Stats(scene.queue))
        with suppress(StopIteration):
            script.send(outcome)
        ends = (asyncio.CancelledError,) if self.KEPT_CLAIMS else _CALLER_ENDS
        if scene.is_pull and isinstance(outcome, ends):
            self._check_released(scene)
        self.pass_time(clients)
        self._check_ledger(scene)
        for queue in (scene.queue, scene.dead, scene.other):
            with suppress(QueueNotFound):
                scene.execute(DeleteQueue(queue))
        return is_met

    def _check_outcome(
        self, command: str, kind: str, outcome: Any, is_met: bool, in_real_time: bool
    ) -> None:
        """A fault ends a command by an answer, by UnavailableError, or as its caller asked."""
        if not isinstance(outcome, BaseException):
            return
        if in_real_time and isinstance(outcome, StaleReceipt):
            # The claim has run out before the command, on a busy machine.
            return
        assert is_met, f"the command failed without a fault: {outcome!r}"
        allowed: tuple[type[BaseException], ...] = {
            "cut": (UnavailableError,),
            "interrupt": (KeyboardInterrupt,),
            "cancel": (asyncio.CancelledError,),
        }.get(kind, ())
        if command == "remove" and kind == "cut":
            # A client may repeat a remove that was done.
            allowed += (QueueNotFound,)
        if not isinstance(outcome, allowed):
            raise AssertionError(f"a {kind} gave {outcome!r}") from outcome

    def _check_released(self, scene: Scene) -> None:
        """A cancelled pull releases what it pulled; on a real clock, before the claims run out."""
        wanted = len(scene.here)

        def visible() -> int:
            found = int(scene.execute(Stats(scene.queue)).visible)
            with suppress(QueueNotFound):
                found += int(scene.execute(Stats(scene.dead)).visible)
            return found

        if scene.here and scene.twice:
            # The dead letter whose claim this test holds is in flight.
            wanted -= 1
        until(lambda: visible() >= wanted, lambda: f"{visible()} of {wanted} are visible")

    def _check_ledger(self, scene: Scene) -> None:
        """Pulls and deletes everything, by the next commands of the same client."""
        found: Counter[bytes] = Counter()
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            claims = [each for queue in _existing(scene) for each in scene.execute(queue)]
            if claims:
                deletes = Batch([Delete(claim.queue, claim.proof) for claim in claims])
                replies = scene.execute(deletes)
                assert replies == [True] * len(claims), f"a delete was refused: {replies}"
                found.update(claim.body for claim in claims)
            elif scene.here <= set(found) or time.monotonic() > give_up:
                break
            else:
                time.sleep(POLL_S_MAX)
        assert not scene.here - set(found), f"lost: {scene.here - set(found)}"
        assert not scene.gone & set(found), f"deleted, and back: {scene.gone & set(found)}"
        assert set(found) <= scene.here | scene.perhaps, "a message that was never pushed"
        more = {body for body, times in found.items() if times > 1}
        assert more <= scene.twice, f"there twice: {more}"


def _existing(scene: Scene) -> list[Pull]:
    pulls = []
    for queue in (scene.queue, scene.dead, scene.other):
        with suppress(QueueNotFound):
            scene.execute(DescribeQueue(queue))
            pulls.append(Pull(queue, 2 * MANY, 600_000))
    return pulls


def _meet(
    clients: FaultyClients,
    command: Command[Any],
    kind: str,
    moment: Moment,
    number: int,
    is_awaited: bool,
) -> tuple[Any, bool]:
    """Executes a command with a fault; its outcome, and whether the fault was met."""
    proxy = clients.proxy
    if kind == "cut":
        fault = proxy.arm(number, moment, cut=True)
        with _passing_waits(clients, command):
            outcome = _outcome(clients.awaited if is_awaited else clients.blocking.service, command)
    elif kind == "delay":
        fault = proxy.arm(number, moment, met=lambda: _later(proxy.disarm))
        outcome = _outcome(clients.blocking.service, command)
    elif kind == "interrupt":
        fault, outcome = _interrupted(clients, command, moment, number)
    else:
        fault = proxy.arm(number, moment, met=clients.awaited.cancel)
        clients.awaited.start(command)
        outcome = clients.awaited.outcome()
    proxy.disarm()
    if fault.is_met:
        # A request that was held is executed late, but before the next command.
        assert fault.is_over.wait(TIMEOUT_S)
    return outcome, fault.is_met


def _outcome(client: Any, command: Command[Any]) -> Any:
    try:
        return client.execute(command)
    except PenstockError as error:
        return error


@contextmanager
def _passing_waits(clients: FaultyClients, command: Command[Any]) -> Iterator[None]:
    """Lets the waits of a pull end that is repeated while its first claims are in flight."""
    ended = threading.Event()

    def pass_waits() -> None:
        while not ended.wait(2 * _DELAY_S):
            clients.pass_wait()

    thread = threading.Thread(target=pass_waits)
    if type(command) is Pull and command.wait_ms:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


def _later(action: Callable[[], None]) -> None:
    timer = threading.Timer(_DELAY_S, action)
    timer.daemon = True
    timer.start()


def _interrupted(
    clients: FaultyClients, command: Command[Any], moment: Moment, number: int
) -> tuple[ProxyFault, Any]:
    """Executes a command that Ctrl-C interrupts when its n-th request is met."""
    guard = threading.Lock()
    caller = threading.get_ident()
    is_running = True

    def interrupt() -> None:
        with guard:
            if is_running:
                signal.pthread_kill(caller, signal.SIGINT)

    fault = clients.proxy.arm(number, moment, met=interrupt)
    outcome: Any
    # A process that a shell started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = _outcome(clients.blocking.service, command)
        with guard:
            is_running = False
    except KeyboardInterrupt as error:
        outcome = error
    finally:
        is_running = False
        signal.signal(signal.SIGINT, before)
    return fault, outcome
