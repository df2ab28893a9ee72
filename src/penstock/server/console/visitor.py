"""Who visits the console, and what they may do.

A browser adds to each request of a page where that page comes from; what another site's page sends
is refused, and so is a host whose name a network could give to another site. A change also needs a
header that only this console's own page sends: a form or a link cannot have it.

    no keys, on loopback     everybody on this machine may look and change
    no keys, elsewhere       everybody who can reach the server may look
    keys                     nobody sees anything before signing in with one of the keys

A sign-in is a random token in a cookie that scripts cannot read and other sites cannot send.
"""

import hmac
import re
import secrets
from collections.abc import Mapping
from time import monotonic
from typing import Final, NamedTuple

from penstock.server.http import Request
from penstock.server.sqs.access import Access
from penstock.wire.sqs.errors import Refusal

CSRF_HEADER: Final = "x-penstock-console"
COOKIE: Final = "penstock_console"
SESSION_S: Final = 12 * 60 * 60
_SESSIONS_MAX: Final = 1_000
# Guessing a secret is refused long before it has a chance.
_FAILURES_MAX: Final = 10
_FAILURES_S: Final = 60.0
_COOKIE: Final = re.compile(rf"(?:^|;\s*){COOKIE}=([A-Za-z0-9_-]{{43}})(?:;|$)")
_NAME_CHARS_MAX: Final = 128


class Refused(Exception):
    """The request is answered with this status and the sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Visitor(NamedTuple):
    """The sender of a request to the console."""

    # How the lines in the server's output name them.
    name: str
    may_look: bool
    may_change: bool
    # The key they signed in with.
    key: str | None = None


class Visitors:
    """Recognises visitors, and signs them in."""

    def __init__(
        self, access: Access, keys: Mapping[str, str], scheme: str, *, on_loopback: bool
    ) -> None:
        self._access = access
        self._keys = keys
        self._scheme = scheme
        self._on_loopback = on_loopback
        # By token: the key, and when the session ends.
        self._sessions: dict[str, tuple[str, float]] = {}
        self._failures: list[float] = []

    @property
    def has_keys(self) -> bool:
        """Whether visitors must sign in."""
        return bool(self._keys)

    def use_keys(self, keys: Mapping[str, str]) -> None:
        """Uses these keys from now on; sessions of keys that are gone or changed end."""
        self._sessions = {
            token: session
            for token, session in self._sessions.items()
            if keys.get(session[0]) == self._keys.get(session[0])
        }
        self._keys = keys

    def check_page(self, request: Request) -> None:
        """Refuses a host that is not this server's. Raises Refused.

        The page holds nothing, so a link on another site may lead to it.
        """
        if not self._keys:
            # With keys a foreign name gets nothing: the cookie of a session is not sent to it.
            try:
                self._access.refuse_foreign_host(request)
            except Refusal as refusal:
                raise Refused(403, str(refusal)) from None
            # A page of such a host would be of the console's own origin. Browsers send the header
            # to no such host, and no page can set it: only programs such as `penstock top` do.
            host = request.headers.get("host", "localhost")
            if "sec-fetch-site" not in request.headers and self._access.may_be_given_away(host):
                name = host.rpartition(":")[0] or host
                raise Refused(
                    403,
                    f"The name {name} could be given to a web page. Use localhost or an address, "
                    f"or start the server with --allow-host {name}, or with keys.",
                )

    def check_same_origin(self, request: Request) -> None:
        """Refuses what another site's page sent. Raises Refused."""
        self.check_page(request)
        headers = request.headers
        own = f"{self._scheme}://{headers.get('host', '')}"
        origin = headers.get("origin")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") or (
            origin is not None and origin.lower() != own.lower()
        ):
            raise Refused(403, "Another site's page may not use the console.")

    def check_change(self, request: Request) -> None:
        """Refuses a change that this console's page did not send. Raises Refused."""
        self.check_same_origin(request)
        headers = request.headers
        if headers.get(CSRF_HEADER) != "1" or headers.get("content-type") != "application/json":
            raise Refused(403, f"A change needs the header {CSRF_HEADER}: 1 and a JSON body.")

    def visitor(self, request: Request, peer: str) -> Visitor:
        """Who sent the request."""
        if not self._keys:
            who = f"somebody at {peer}" if peer else "somebody"
            return Visitor(who, may_look=True, may_change=self._on_loopback)
        key = self._key_of(request)
        if key is None:
            return Visitor("somebody", may_look=False, may_change=False)
        return Visitor(f"{key} at {peer}", may_look=True, may_change=True, key=key)

    def _key_of(self, request: Request) -> str | None:
        found = _COOKIE.search(request.headers.get("cookie", ""))
        session = None if found is None else self._sessions.get(found[1])
        if session is None or session[1] < monotonic():
            return None
        return session[0]

    def sign_in(self, key: object, secret: object) -> str:
        """The line of a cookie for whoever knows the secret of a key. Raises Refused."""
        now_s = monotonic()
        self._failures = [at_s for at_s in self._failures if at_s > now_s - _FAILURES_S]
        if len(self._failures) >= _FAILURES_MAX:
            raise Refused(403, "Too many wrong keys were tried; wait a minute.")
        if type(key) is not str or type(secret) is not str or len(key) > _NAME_CHARS_MAX:
            raise Refused(400, "key, secret: expected text")
        known = self._keys.get(key, secrets.token_hex())
        is_right = hmac.compare_digest(known.encode(), secret.encode("utf-8", "replace"))
        if not is_right or key not in self._keys:
            self._failures.append(now_s)
            raise Refused(403, "The key or its secret is wrong.")
        self._sessions = {token: kept for token, kept in self._sessions.items() if kept[1] > now_s}
        if len(self._sessions) >= _SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(32)
        self._sessions[token] = key, now_s + SESSION_S
        return self._cookie(token, SESSION_S)

    def sign_out(self, request: Request) -> str:
        """Ends the session of a request; the line that removes its cookie."""
        found = _COOKIE.search(request.headers.get("cookie", ""))
        if found is not None:
            self._sessions.pop(found[1], None)
        return self._cookie("", 0)

    def _cookie(self, token: str, age_s: int) -> str:
        secure = "; Secure" if self._scheme == "https" else ""
        return (
            f"Set-Cookie: {COOKIE}={token}; Path=/console; Max-Age={age_s}; HttpOnly; "
            f"SameSite=Strict{secure}\r\n"
        )
