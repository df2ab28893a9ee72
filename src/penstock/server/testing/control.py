"""The control interface of a server for tests, as JSON over HTTP.

    GET  /_penstock/clock     the time and the mode of an account's clock
    POST /_penstock/clock     {"advance": "12h"}, {"advance": "next"}, {"mode": "auto"},
                              {"to": "2027-01-01T00:00:00Z"}
    POST /_penstock/reset     {} removes all queues of the account
    POST /_penstock/await     {"queue": "orders", "match": {"id": 7}, "until": "deleted"}
    GET  /_penstock/stories   what happened to the messages of each queue, in sentences
    GET  /_penstock/chaos     the faults that were made, in order
    POST /_penstock/chaos     {"seed": 7}, {"seed": 7, "only": [3, 12]}, {"seed": null}
    GET  /_penstock/queues    how many messages each queue holds, in which state
    GET  /_penstock/audit     the checks of the audit that do not hold: none, ever

Each takes "account", in the body or in the query; without it, the account is that of the server. A
web page can use none of this: a change needs a JSON body, and a page's request is refused. With
keys, a request needs one of them and its secret (HTTP Basic).
"""

import asyncio
import hmac
from base64 import b64decode
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET, UnsetType

from penstock.clock import duration_ms
from penstock.errors import InvalidField, PenstockError, QueueNotFound, UnavailableError
from penstock.server.console.visitor import Refused
from penstock.server.http import HttpConnection, Request, response
from penstock.server.testing.accounts import TestedAccount, TestedAccounts
from penstock.server.testing.chaos import FaultPlan
from penstock.server.testing.clock import check_mode
from penstock.server.testing.judge import judge
from penstock.server.testing.observed import UNTIL, SeenMessage
from penstock.service import check_name
from penstock.wire.sqs.address import Owner, QueueAddress

PREFIX: Final = "/_penstock/"
_HEADERS: Final = b"Content-Type: application/json\r\nCache-Control: no-store\r\n"
_AWAIT_S_MAX: Final = 60.0
_MESSAGES_SHOWN_MAX: Final = 1_000
_SEEDS: Final = 2**63
_encode: Final = msgspec.json.Encoder().encode


class Advance(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that moves a clock."""

    advance: str | float | None = None
    to: str | None = None
    mode: str | None = None
    account: str | None = None


class ResetAccount(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that removes all queues of an account."""

    account: str | None = None


class AwaitMessage(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that waits until something has happened in a queue."""

    queue: str
    match: str | dict[str, Any] | None = None
    until: str = "pushed"
    count: int = 1
    timeout: str | float = 5
    region: str | None = None
    account: str | None = None


class UseChaos(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for the faults of a seed, or of some of its numbers, or for none."""

    seed: int | UnsetType | None = UNSET
    paused: bool | None = None
    only: list[int] | None = None
    max: int | None = None
    account: str | None = None


class Awaiting:
    """A request that waits until messages have come to something, or a queue is empty."""

    def __init__(
        self, account: TestedAccount, asked: AwaitMessage, queue: str, connection: HttpConnection
    ) -> None:
        self._account = account
        self._asked = asked
        self._queue = queue
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._is_planned = False

    def result(self) -> dict[str, Any] | None:
        """What was awaited, if it has happened."""
        store, asked = self._account.store, self._asked
        if asked.until == "empty":
            return {"queue": asked.queue} if store.is_empty(self._queue) else None
        found = store.matching(self._queue, asked.match, asked.until)
        if len(found) < asked.count:
            return None
        return {"queue": asked.queue, "messages": [*map(shown, found[:_MESSAGES_SHOWN_MAX])]}

    def begin(self, timeout_s: float) -> None:
        """Answers when it has happened, or when this time has passed."""
        self._account.store.journal.listeners.add(self._changed)
        self._account.awaited.add(self._give_up)
        self._timer = self._loop.call_later(timeout_s, self._give_up)
        self._connection.on_gone = self._end

    def _changed(self) -> None:
        """Called within a command: the state is looked at in the next turn of the loop."""
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_planned = False
        if self._changed not in self._account.store.journal.listeners:
            return
        found = self.result()
        if found is not None:
            self._end()
            self._connection.finish(as_json(200, found, self._loop.time()))

    def _give_up(self) -> None:
        self._end()
        store, asked = self._account.store, self._asked
        if asked.until == "empty":
            told = f"{asked.queue} is not empty"
        else:
            found = len(store.matching(self._queue, asked.match, asked.until))
            told = f"{found} of {asked.count} messages were {asked.until}"
        if self._queue not in store.queues:
            told = f"there is no queue {asked.queue}"
        body = {"error": f"await: {told}", "story": store.story(self._queue)}
        self._connection.finish(as_json(409, body, self._loop.time()))

    def _end(self) -> None:
        self._timer.cancel()
        self._account.store.journal.listeners.discard(self._changed)
        self._account.awaited.discard(self._give_up)


class ControlPages:
    """Answers the control interface."""

    def __init__(self, accounts: TestedAccounts) -> None:
        self._accounts = accounts
        self._loop = asyncio.get_running_loop()
        self._pages: dict[tuple[str, str], Callable[[Request, HttpConnection], Any]] = {
            ("GET", "clock"): lambda asked, _: show_clock(self._named(asked)),
            ("POST", "clock"): lambda asked, _: self._move(_read(asked, Advance)),
            ("POST", "reset"): lambda asked, _: self._reset(_read(asked, ResetAccount)),
            ("POST", "await"): lambda asked, to: self._await(_read(asked, AwaitMessage), to),
            ("GET", "stories"): lambda asked, _: self._stories(asked),
            ("GET", "chaos"): lambda asked, _: _show_chaos(self._named(asked)),
            ("POST", "chaos"): lambda asked, _: self._chaos(_read(asked, UseChaos)),
            ("GET", "queues"): lambda asked, _: _show_queues(self._named(asked)),
            ("GET", "audit"): lambda asked, _: _show_audit(self._named(asked)),
        }

    def answer(self, request: Request, connection: HttpConnection) -> bytes | None:
        """The response, or None if it is sent on the connection later."""
        try:
            self._check(request)
            name = request.path[len(PREFIX) :]
            page = self._pages.get((request.method, name))
            if page is None:
                methods = [method for method, each in self._pages if each == name]
                if methods:
                    raise Refused(405, f"Use {' or '.join(methods)}.")
                names = sorted({each for _, each in self._pages})
                raise Refused(404, f"There are {', '.join(PREFIX + each for each in names)}.")
            found = page(request, connection)
        except Refused as refused:
            return as_json(refused.status, {"error": str(refused)}, self._loop.time())
        except UnavailableError as error:
            return as_json(503, {"error": str(error)}, self._loop.time())
        except PenstockError as error:
            return as_json(400, {"error": str(error)}, self._loop.time())
        return None if found is None else as_json(200, found, self._loop.time())

    def _check(self, request: Request) -> None:
        """Refuses web pages, and whoever has no key if there are keys. Raises Refused."""
        if not self._accounts.home.access.may_see_pages(request, "127.0.0.1"):
            raise Refused(403, "Web pages may not use this interface.")
        if self._accounts.keys and not self._has_key(request):
            raise Refused(
                403, "Send one of the server's keys and its secret: curl --user KEY:SECRET …"
            )

    def _has_key(self, request: Request) -> bool:
        kind, _, text = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "basic":
            return False
        try:
            key, _, secret = b64decode(text, validate=True).decode().partition(":")
        except ValueError:
            return False
        known = self._accounts.keys.get(key)
        return known is not None and hmac.compare_digest(known.encode(), secret.encode())

    def _account(self, account: str | None) -> TestedAccount:
        return self._accounts.home if account is None else self._accounts.account(account)

    def _named(self, request: Request) -> TestedAccount:
        return self._account(_query(request).get("account"))

    def _move(self, asked: Advance) -> dict[str, Any]:
        if asked.advance is None and asked.to is None and asked.mode is None:
            raise InvalidField('clock: expected "advance", "to" or "mode"')
        if asked.advance is not None and asked.to is not None:
            raise InvalidField("clock: advance and to each say how far; give one of them")
        if asked.mode is not None:
            check_mode(asked.mode)
        account = self._account(asked.account)
        clock = account.clock
        step_ms = 0.0
        if asked.advance == "next":
            account.store.go_to_next_due()
        elif asked.advance is not None:
            step_ms = _milliseconds("advance", asked.advance)
        elif asked.to is not None:
            step_ms = _instant_ms(asked.to) - clock.now_ms()
        clock.travel(step_ms, "advance" if asked.to is None else "to")
        if asked.mode is not None:
            clock.set_mode(asked.mode)
        return show_clock(account)

    def _reset(self, asked: ResetAccount) -> dict[str, Any]:
        account = asked.account or self._accounts.home.owner.account
        self._accounts.reset(account)
        return {"account": account}

    def _await(self, asked: AwaitMessage, connection: HttpConnection) -> dict[str, Any] | None:
        account = self._account(asked.account)
        owner = Owner(account.owner.account, asked.region or account.owner.region)
        queue = account.directory.internal_name(QueueAddress(owner, asked.queue))
        check_name(queue)
        if asked.until not in (*UNTIL, "empty"):
            raise InvalidField(f"until: {asked.until!r} is none of {', '.join(UNTIL)}, empty")
        if asked.count < 1:
            raise InvalidField(f"count: {asked.count} is not a number of messages; give 1 or more")
        timeout_ms = _milliseconds("timeout", asked.timeout)
        if not 0 <= timeout_ms <= _AWAIT_S_MAX * 1_000:
            raise InvalidField(
                f"timeout: {timeout_ms / 1_000:g} s is outside 0 to {_AWAIT_S_MAX:g} s of real time"
            )
        awaiting = Awaiting(account, asked, queue, connection)
        found = awaiting.result()
        if found is None:
            awaiting.begin(timeout_ms / 1_000)
        return found

    def _stories(self, request: Request) -> dict[str, Any]:
        account = self._named(request)
        queue = _query(request).get("queue")
        if queue is not None and queue not in account.store.queues:
            raise QueueNotFound(f"queue: there is no queue {queue!r}")
        stories = account.store.stories()
        if queue is not None:
            stories = {queue: stories[queue]}
        return {"now": account.store.moment, "stories": stories}

    def _chaos(self, asked: UseChaos) -> dict[str, Any]:
        seed = asked.seed
        if not isinstance(seed, int) and (asked.only is not None or asked.max is not None):
            raise InvalidField("only, max: they go with a seed")
        if isinstance(seed, int) and not 0 <= seed < _SEEDS:
            raise InvalidField(f"seed: {seed} is outside 0 to {_SEEDS - 1}")
        if seed is UNSET and asked.paused is None:
            raise InvalidField('chaos: expected "seed" or "paused"')
        account = self._account(asked.account)
        if isinstance(seed, int):
            only = None if asked.only is None else frozenset(asked.only)
            account.chaotic.use(FaultPlan(seed, only=only, faults_max=asked.max))
        elif seed is None:
            account.chaotic.use(None)
        account.chaotic.is_paused = bool(asked.paused)
        return _show_chaos(account)


def show_clock(account: TestedAccount) -> dict[str, Any]:
    """The time of an account."""
    now_ms = account.clock.now_ms()
    now = datetime.fromtimestamp(now_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    return {"now": now.replace("+00:00", "Z"), "now_ms": now_ms, "mode": account.clock.mode}


def _show_chaos(account: TestedAccount) -> dict[str, Any]:
    plan = account.chaotic.plan
    if plan is None:
        return {"seed": None, "faults": []}
    return {
        "seed": plan.seed,
        "faults": [{**each._asdict(), "text": str(each).strip()} for each in plan.made],
    }


def _show_queues(account: TestedAccount) -> dict[str, Any]:
    store = account.store
    return {"queues": msgspec.to_builtins(store.depths()), "changes": store.changes}


def _show_audit(account: TestedAccount) -> dict[str, Any]:
    return {"broken": [str(each) for each in judge(account.store)]}


def shown(message: SeenMessage) -> dict[str, Any]:
    """A message as JSON can hold it; a body that is no text is base64 under `body_base64`."""
    found = msgspec.to_builtins(message)
    try:
        found["body"] = message.body.decode()
    except UnicodeDecodeError:
        found["body_base64"] = found.pop("body")
    return dict(found)


def as_json(status: int, body: Any, loop_time_s: float) -> bytes:
    """A response."""
    return response(status, _HEADERS, _encode(body) + b"\n", loop_time_s)


def _query(request: Request) -> dict[str, str]:
    return dict(parse_qsl(request.query, keep_blank_values=True, max_num_fields=20))


def _read(request: Request, kind: type[Any]) -> Any:
    """The body of a request. Raises Refused or InvalidField."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        # A web page cannot send this type without asking first.
        raise Refused(400, "Send a JSON body, with the header Content-Type: application/json.")
    try:
        return msgspec.json.decode(request.body or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(f"body: {error}") from None


def _milliseconds(field: str, given: str | float) -> float:
    """A duration as a text, or a number of seconds. Raises InvalidField."""
    if not isinstance(given, str):
        return given * 1_000
    try:
        return duration_ms(given)
    except InvalidField as error:
        raise InvalidField(f"{field}: {error}") from None


def _instant_ms(text: str) -> float:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidField(f"to: {text[:40]!r} is not a time, as 2027-01-01T00:00:00Z is") from None
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return instant.timestamp() * 1_000
