"""The accounts of a server for tests: each has a clock, a store in memory and an endpoint.

So tests that run at the same time share a server and nothing else: one that moves its clock by
twelve hours, or asks for faults, is alone in its account. An account is that of the access key, if
it is twelve digits; a request that is signed otherwise belongs to the account that its queue's URL
names, or to the account of the server.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from penstock.backends.engine.loop import LoopEngine
from penstock.errors import InvalidField, Overloaded
from penstock.server.http import HttpConnection, Request, response
from penstock.server.lines import ServerLines
from penstock.server.sqs.endpoint import open_endpoint
from penstock.server.sqs.lookup import QueueLookup, Windows
from penstock.server.sqs.messages import WAIT_S_MAX
from penstock.server.testing.chaos import ChaoticLoopService, FaultPlan
from penstock.server.testing.clock import MovableClock
from penstock.server.testing.observed import ObservedStore
from penstock.settings import ServerSettings
from penstock.wire.sqs.address import Owner, QueueDirectory, is_account

# A test's account is reset when the test ends.
ACCOUNTS_MAX: Final = 1_000
_SWEEP_S: Final = 1.0
_CREDENTIAL: Final = re.compile(r"Credential=([0-9]{12})(?:/|%2F)", re.IGNORECASE | re.ASCII)
_IN_URL: Final = re.compile(rb"/([0-9]{12})/")
_URL_BYTES_MAX: Final = 4_096
_FULL: Final = b'{"error":"accounts: the server has %d, as many as it takes; reset some"}\n'


class TestedAccount:
    """One account: its clock, its store, and the SQS endpoint on it."""

    # Not a test, though pytest collects classes that begin like this.
    __test__ = False

    def __init__(
        self, settings: ServerSettings, account: str, scheme: str, lines: ServerLines
    ) -> None:
        self.owner = Owner(account, settings.region)
        # What ends each request to the control interface that awaits something.
        self.awaited: set[Callable[[], None]] = set()
        self.clock = MovableClock(settings.clock or "system")
        self.store = ObservedStore(self.clock)
        self.service = LoopEngine(self.store.engine)
        self.chaotic = ChaoticLoopService(self.service, self.clock)
        if settings.chaos is not None:
            self.chaotic.use(FaultPlan(settings.chaos))
        self.directory = QueueDirectory(self.owner)
        windows = Windows(settings.deleted_window_ms, settings.purged_window_ms)
        self.lookup = QueueLookup(
            self.chaotic, self.directory, windows, strict_receipts=settings.strict_receipts
        )
        self.access, self.endpoint = open_endpoint(self.lookup, settings, scheme, lines)
        self._unsubscribe = self.clock.subscribe(self.endpoint.time_moved)

    def reset(self) -> None:
        """Removes its queues and what was noted of them, and ends its faults."""
        self.chaotic.use(None)
        self.chaotic.is_paused = False
        self.store.reset()
        self.lookup.deleted_at_ms.clear()

    async def close(self) -> None:
        """Ends its waits, and releases its store."""
        self._unsubscribe()
        self.endpoint.end_waits()
        await self.endpoint.close()
        await self.service.close()


class TestedAccounts:
    """All accounts of a server; one is made when its first request comes."""

    __test__ = False

    def __init__(self, settings: ServerSettings, scheme: str, lines: ServerLines) -> None:
        self._settings = settings
        self._scheme = scheme
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self.home = TestedAccount(settings, settings.account, scheme, lines)
        self._others: dict[str, TestedAccount] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    @property
    def all(self) -> list[TestedAccount]:
        """Every account that was used."""
        return [self.home, *self._others.values()]

    def account(self, account: str) -> TestedAccount:
        """The account of this number. Raises InvalidField, or Overloaded if there are too many."""
        if account == self.home.owner.account:
            return self.home
        found = self._others.get(account)
        if found is None:
            if not is_account(account):
                raise InvalidField(f"account: {account[:40]!r} is not twelve digits")
            if len(self._others) >= ACCOUNTS_MAX:
                raise Overloaded(
                    f"accounts: the server has {ACCOUNTS_MAX}, as many as it takes; reset some"
                )
            found = self._others[account] = TestedAccount(
                self._settings, account, self._scheme, self._lines
            )
        return found

    @property
    def keys(self) -> Mapping[str, str]:
        """The keys that sign requests now."""
        return self._settings.keys

    def use_keys(self, keys: Mapping[str, str]) -> None:
        """Checks signatures with these keys from now on, in every account."""
        self._settings = msgspec.structs.replace(self._settings, keys=dict(keys))
        for each in self.all:
            each.access.use_keys(keys)

    def end_waits(self) -> None:
        """Answers every request that waits, and refuses further ones of the SQS API."""
        for each in self.all:
            each.endpoint.end_waits()
            for give_up in tuple(each.awaited):
                give_up()

    def answer(self, request: Request, connection: HttpConnection) -> bytes | None:
        """The response of the account that a request belongs to; None if it is sent later."""
        try:
            account = self._account_of(request)
        except Overloaded:
            return response(503, b"", _FULL % ACCOUNTS_MAX, self._loop.time())
        account.clock.note_request()
        return account.endpoint.answer(request, connection)

    def _account_of(self, request: Request) -> TestedAccount:
        found = _CREDENTIAL.search(request.headers.get("authorization", "") or request.query)
        if found is not None:
            return self.account(found[1])
        for text in (request.path.encode("latin-1"), request.body[:_URL_BYTES_MAX]):
            named = _IN_URL.search(text)
            if named is not None:
                return self._others.get(named[1].decode(), self.home)
        return self.home

    def reset(self, account: str) -> None:
        """Removes an account, with its clock; of the server's own, everything but its clock.

        Raises InvalidField.
        """
        if not is_account(account):
            raise InvalidField(f"account: {account[:40]!r} is not twelve digits")
        if account == self.home.owner.account:
            self.home.reset()
            return
        found = self._others.pop(account, None)
        if found is not None:
            found.reset()
            closing = self._loop.create_task(found.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _sweep(self) -> None:
        """Ends waits that have lasted too long in real time: no client may hang for ever."""
        for each in self.all:
            each.endpoint.end_waits_since(self._loop.time() - WAIT_S_MAX)
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    async def close(self) -> None:
        """Closes all accounts but the server's own, which `Running` closes."""
        self._sweeper.cancel()
        await asyncio.gather(*self._closing, *(each.close() for each in self._others.values()))
