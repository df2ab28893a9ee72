"""Where the queues of a test are: an account on a server for tests, or an engine in this process.

Both have a clock that is moved, both can be asked what happened to every message, and both are
entered by a `with`: the functions of `awaiting` are about the one that was entered last.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection, ImproperConnectionState
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from penstock.backends.engine.blocking import BlockingEngine
from penstock.client import Queues
from penstock.clock import is_only_thread
from penstock.errors import InvalidField
from penstock.server.testing.chaos import MadeFault
from penstock.server.testing.clock import MovableClock
from penstock.server.testing.observed import (
    Match,
    ObservedStore,
    QueueDepth,
    SeenMessage,
    matches,
)
from penstock.testing.serving import shared_url, start_server

REGION: Final = "us-east-1"
_ANSWER_S_MAX: Final = 90.0
_SECRET: Final = "any"
# The variables by which AWS's SDKs find an endpoint and sign; others could lead elsewhere.
_HIDDEN: Final = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN")


class QueuePlace(Protocol):
    """What a test can ask of the place where its queues are."""

    def advance(self, step: timedelta) -> None:
        """Moves the clock forward, and returns when all that is due has been done."""
        ...

    def set_mode(self, mode: str) -> None:
        """Stands still (manual), moves when somebody waits (auto), or flows (system)."""
        ...

    @property
    def now(self) -> datetime:
        """The time of the clock."""
        ...

    def find(
        self, queue: str, match: Match, until: str, how_many: int, timeout: float
    ) -> list[SeenMessage]:
        """The messages that match and have come to this, as soon as there are so many.

        Those that there are, if there are fewer after `timeout` seconds of real time.
        """
        ...

    def wait_until_empty(self, queue: str, timeout: float) -> bool:
        """Whether the queue held no message, in any state, within that time."""
        ...

    def stories(self) -> dict[str, list[str]]:
        """What happened to the messages of each queue."""
        ...


# The places that were entered and not left, the last one at the end.
places: list[QueuePlace] = []


@contextmanager
def entered(place: QueuePlace) -> Iterator[None]:
    """Makes this the place that the functions of `awaiting` are about."""
    places.append(place)
    try:
        yield
    finally:
        places.remove(place)


class TestQueues(Queues):
    """`Queues` in this process, in memory, on a clock that a test moves."""

    __test__ = False

    def __init__(self, clock: str = "manual", *, store: ObservedStore | None = None) -> None:
        """`clock` is manual, auto or system."""
        self.store = store or ObservedStore(MovableClock(clock))
        self._engine = BlockingEngine(self.store.engine)
        super().__init__(self._engine, self.store.clock)

    def advance(self, step: timedelta) -> None:
        """Moves the clock forward, and returns when all that is due has been done."""
        self.movable.travel(step / timedelta(milliseconds=1))

    @property
    def movable(self) -> MovableClock:
        """The clock."""
        clock = self.store.clock
        assert isinstance(clock, MovableClock)
        return clock

    def set_mode(self, mode: str) -> None:
        """Stands still (manual), moves when somebody waits (auto), or flows (system)."""
        self.movable.set_mode(mode)

    @property
    def now(self) -> datetime:
        """The time of the clock."""
        return datetime.fromtimestamp(self.store.clock.now_ms() / 1_000, UTC)

    def find(
        self, queue: str, match: Match, until: str, how_many: int, timeout: float
    ) -> list[SeenMessage]:
        """The messages that match and have come to this, as soon as there are so many."""
        found: list[SeenMessage] = []

        def look() -> bool:
            found[:] = self._engine.exclusively(lambda: self.store.matching(queue, match, until))
            return len(found) >= how_many

        self._wait(look, timeout)
        return found

    def wait_until_empty(self, queue: str, timeout: float) -> bool:
        """Whether the queue held no message, in any state, within that time."""
        return self._wait(
            lambda: self._engine.exclusively(lambda: self.store.is_empty(queue)), timeout
        )

    def _wait(self, look: Any, timeout: float) -> bool:
        """Looks again whenever something has happened; at once only, if nobody else could act."""
        changed = threading.Event()
        listeners = self.store.journal.listeners
        listeners.add(changed.set)
        try:
            give_up_s = time.monotonic() + timeout
            while not look():
                left_s = give_up_s - time.monotonic()
                if left_s <= 0 or is_only_thread() or not changed.wait(left_s):
                    return bool(look())
                changed.clear()
            return True
        finally:
            listeners.discard(changed.set)

    def depths(self) -> tuple[dict[str, QueueDepth], int]:
        """How many messages each queue holds, and how often anything has changed."""
        return self._engine.exclusively(lambda: (self.store.depths(), self.store.changes))

    def go_to_next_due(self) -> None:
        """Moves the clock to the next instant at which something is due."""
        self.store.go_to_next_due()

    def stories(self) -> dict[str, list[str]]:
        """What happened to the messages of each queue."""
        return self._engine.exclusively(self.store.stories)


class TestAccount:
    """An account of its own on a server for tests, with queues and a clock that no other has."""

    __test__ = False

    def __init__(self, url: str, account: str) -> None:
        self.url = url
        self.account = account
        self.region = REGION
        parts = urlsplit(url)
        self._connection = HTTPConnection(
            parts.hostname or "", parts.port or 80, timeout=_ANSWER_S_MAX
        )
        self._lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which AWS's SDKs and aws-cli use this account."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ENDPOINT_URL_SQS": self.url,
            "AWS_ACCESS_KEY_ID": self.account,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, **options: Any) -> Any:
        """A boto3 client of SQS; the options are those of `boto3.client`."""
        try:
            import boto3
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError("a client needs boto3: pip install boto3") from missing

        given = {
            "endpoint_url": self.url,
            "region_name": self.region,
            "aws_access_key_id": self.account,
            "aws_secret_access_key": _SECRET,
            **options,
        }
        return _session(boto3).client("sqs", **given)

    def ask(self, page: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """The status and the answer of the control interface, about this account."""
        method, path = "GET", f"/_penstock/{page}?account={self.account}"
        sent = None
        if body is not None:
            method, path = "POST", f"/_penstock/{page}"
            sent = msgspec.json.encode({**body, "account": self.account})
        with self._lock:
            for is_last in (False, True):
                try:
                    headers = {"Content-Type": "application/json"}
                    self._connection.request(method, path, sent, headers)
                    answer = self._connection.getresponse()
                    return answer.status, msgspec.json.decode(answer.read())
                except (ConnectionError, ImproperConnectionState):
                    # The server closes a connection that was idle for long: nothing was done.
                    self._connection.close()
                    if is_last:
                        raise
                except BaseException:
                    # It may have been done: a clock would be moved twice.
                    self._connection.close()
                    raise
        raise AssertionError("one of the two requests has returned or raised")

    def done(self, page: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of the control interface. Raises InvalidField if it refuses the request."""
        status, found = self.ask(page, body)
        if status != 200:
            raise InvalidField(found["error"])
        return found

    def depths(self) -> tuple[dict[str, QueueDepth], int]:
        """How many messages each queue holds, and how often anything has changed."""
        found = self.done("queues")
        return msgspec.convert(found["queues"], dict[str, QueueDepth]), found["changes"]

    def go_to_next_due(self) -> None:
        """Moves the clock to the next instant at which something is due."""
        self.done("clock", {"advance": "next"})

    def faults(self) -> list[MadeFault]:
        """The faults that were made, in order."""
        found = self.done("chaos")["faults"]
        return [MadeFault(**{name: each[name] for name in MadeFault._fields}) for each in found]

    def broken(self) -> list[str]:
        """The checks of the audit that do not hold."""
        found: list[str] = self.done("audit")["broken"]
        return found

    def advance(self, step: timedelta) -> None:
        """Moves the clock forward, and returns when all that is due has been done."""
        self.done("clock", {"advance": step.total_seconds()})

    def set_mode(self, mode: str) -> None:
        """Stands still (manual), moves when somebody waits (auto), or flows (system)."""
        self.done("clock", {"mode": mode})

    @property
    def now(self) -> datetime:
        """The time of the clock."""
        return datetime.fromtimestamp(self.done("clock")["now_ms"] / 1_000, UTC)

    def find(
        self, queue: str, match: Match, until: str, how_many: int, timeout: float
    ) -> list[SeenMessage]:
        """The messages that match and have come to this, as soon as there are so many."""
        is_sent = match is None or isinstance(match, str | dict)
        asked = {"queue": queue, "until": until, "match": match if is_sent else None}
        give_up_s = time.monotonic() + timeout
        known = 0
        while True:
            # A function cannot be sent: each further message is looked at here.
            left_s = max(0.0, give_up_s - time.monotonic())
            wanted = how_many if is_sent else known + 1
            status, found = self.ask("await", {**asked, "count": wanted, "timeout": left_s})
            if status == 409:
                if wanted == 1:
                    return []
                # Fewer than were wanted: those that there are.
                status, found = self.ask("await", {**asked, "count": 1, "timeout": 0})
            if status == 409:
                return []
            if status != 200:
                raise InvalidField(found["error"])
            messages = [*map(_read_message, found["messages"])]
            fitting = [each for each in messages if is_sent or matches(match, each)]
            if len(fitting) >= how_many or time.monotonic() >= give_up_s:
                return fitting
            if len(messages) < wanted:
                raise InvalidField(
                    f"match: of {queue} only the first {len(messages)} messages can be looked at "
                    "by a function or for bytes, and too few of them fit; give a text or a part "
                    "of the JSON body"
                )
            known = len(messages)

    def wait_until_empty(self, queue: str, timeout: float) -> bool:
        """Whether the queue held no message, in any state, within that time."""
        asked = {"queue": queue, "until": "empty", "timeout": timeout}
        status, found = self.ask("await", asked)
        if status not in (200, 409):
            raise InvalidField(found["error"])
        return status == 200

    def stories(self) -> dict[str, list[str]]:
        """What happened to the messages of each queue."""
        found: dict[str, list[str]] = self.done("stories")["stories"]
        return found

    def reset(self) -> None:
        """Removes all queues of the account; its clock begins again at the real time."""
        self.done("reset", {})

    def close(self) -> None:
        """Removes the account."""
        try:
            self.reset()
        finally:
            self._connection.close()


def _read_message(found: dict[str, Any]) -> SeenMessage:
    encoded = found.pop("body_base64", None)
    message = msgspec.convert({**found, "body": encoded or b""}, SeenMessage, strict=False)
    if encoded is None:
        message.body = found["body"].encode()
    return message


_sessions: dict[str, Any] = {}


def _session(boto3: Any) -> Any:
    """One session for all clients: it reads the model of SQS once, which takes most of the time."""
    if not _sessions:
        _sessions["sqs"] = boto3.Session()
    return _sessions["sqs"]


_numbers = count(1)
_servers: dict[int, str] = {}


def own_url() -> str:
    """The server for tests of this process, which is started when it is first needed."""
    pid = os.getpid()
    if pid not in _servers:
        _servers[pid] = start_server(pid)
    return _servers[pid]


def run_url(directory: Path) -> str:
    """The server of a test run in several processes, which share this directory."""
    return shared_url(directory, os.getppid(), start_server)


def next_account(worker: int = 0) -> str:
    """The number of an account that no other test of this run has."""
    return f"{1 + worker:03d}{next(_numbers):09d}"


@contextmanager
def server(clock: str = "manual", *, url: str | None = None) -> Iterator[TestAccount]:
    """An account of its own on a server for tests; without `url`, one that this process starts.

    `clock` is manual, auto or system. The variables of the environment lead AWS's SDKs to it.
    """
    account = TestAccount(url or own_url(), next_account(os.getpid() % 900))
    with opened(account, clock), in_environment(account):
        yield account


@contextmanager
def opened(account: TestAccount, clock: str = "manual") -> Iterator[None]:
    """The account, entered; it is removed in the end."""
    try:
        if clock != "manual":
            account.set_mode(clock)
        with entered(account):
            yield
    finally:
        account.close()


@contextmanager
def in_environment(account: TestAccount, **more: str) -> Iterator[None]:
    """Sets the variables by which AWS's SDKs find the account, and forgets boto3's own session."""
    wanted = {**account.environment, **more}
    before = {name: os.environ.get(name) for name in (*wanted, *_HIDDEN)}
    for name in _HIDDEN:
        os.environ.pop(name, None)
    os.environ.update(wanted)
    _forget_session()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _forget_session()


def _forget_session() -> None:
    """boto3 keeps the variables that it has read when its first client was made."""
    boto3 = sys.modules.get("boto3")
    if boto3 is not None:
        boto3.DEFAULT_SESSION = None  # type: ignore[attr-defined]


@contextmanager
def in_process(clock: str = "manual") -> Iterator[TestQueues]:
    """Queues in this process, in memory; `clock` is manual, auto or system."""
    queues = TestQueues(clock)
    with closing(queues), entered(queues):
        yield queues
