"""The caller of a request to the SQS endpoint: which account and region, and what it may do.

With keys, every request must be signed by one of them. Without keys any signature is accepted, and
only its account and region are used. Then web pages must be refused, because a page can make the
browser of its visitor send requests to this machine:

- A request of a page with the header `Origin` or `Sec-Fetch-Site` is refused.
- A request of a page whose own name resolves to this machine (DNS rebinding) is refused because its
  Host is not a name of this machine.
- Some requests of pages have neither header: images and other GETs to a Host that browsers do not
  trust, and forms. A browser does not let a page add a header to those without asking the server
  first. So a request may change something only if it has an `Authorization` or an `X-Amz-…` header;
  every SDK sends one. A signature in the query string is enough only for a Host that browsers
  trust, where every request of theirs has `Sec-Fetch-Site`: a page can write such a signature, too.
"""

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from time import time
from typing import Final

from penstock.journal.room import HOLDER_BYTES_MAX
from penstock.server.http import HttpConnection, Request
from penstock.server.sqs.first_use import GET_URL
from penstock.server.sqs.lookup import Caller
from penstock.server.sqs.peek import is_peek
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs.address import Owner, QueueDirectory, is_account
from penstock.wire.sqs.errors import Refusal
from penstock.wire.sqs.json import CONTENT_TYPE as JSON_TYPE
from penstock.wire.sqs.model import ACTIONS, READ_ONLY_ACTIONS
from penstock.wire.sqs.query import action_of
from penstock.wire.sqs.sigv4 import BadSignature, Signed, Verifier, is_signed

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)
_CREDENTIAL: Final = re.compile(
    r"Credential=([^/,&\s%]{1,128})(?:/|%2F)[0-9]{8}(?:/|%2F)([a-z0-9-]{1,40})(?:/|%2F)",
    re.IGNORECASE,
)
# The largest form without such a header that is parsed; actions that only read are far smaller.
_FORM_WITHOUT_HEADER_BYTES_MAX: Final = 64 * 1024
# Endings of names that public DNS does not have, so that no web page can have them.
_LOCAL_ENDINGS: Final = (".localhost", ".internal", ".local", ".test")


class Access:
    """Finds the caller of a request, or refuses the request."""

    def __init__(
        self,
        directory: QueueDirectory,
        scheme: str,
        keys: Mapping[str, str],
        allow_hosts: Iterable[str],
        *,
        creates_on_use: bool = False,
    ) -> None:
        """With `creates_on_use` asking for a queue's URL is an action that changes something."""
        self._read_only = READ_ONLY_ACTIONS - ({GET_URL} if creates_on_use else set())
        self._directory = directory
        self._scheme = scheme
        self._verifier = Verifier(keys) if keys else None
        self._allow_hosts = frozenset(host.lower() for host in allow_hosts)

    def use_keys(self, keys: Mapping[str, str]) -> None:
        """Checks signatures with these keys from now on; they were checked before, too."""
        self._verifier = Verifier(keys) if keys else None

    def caller(self, request: Request, connection: HttpConnection) -> Caller:
        """The caller of a request. Raises Refusal.

        A connection is mostly used by one client, whose caller is found once: what every request of
        it has in common is compared with what the last one had.
        """
        headers = request.headers
        host = headers.get("host", "localhost")
        authorization = headers.get("authorization", "")
        verifier = self._verifier
        signer: tuple[str, str] | None = None
        if verifier is not None:
            signer = self._signer(request, verifier)
        else:
            if "origin" in headers or "sec-fetch-site" in headers:
                self.refuse_web_page(request)
            if (
                not authorization
                and "x-amz-target" not in headers
                and not _is_presigned_by_no_browser(request, host)
            ):
                _check_may_change(request, self._read_only)
        agent = headers.get("user-agent", "")
        same = (host, agent, signer, self)
        caller: Caller
        if connection.caller is not None:
            credential, known, caller = connection.caller
            if authorization.startswith(credential) and same == known:
                return caller
        if signer is None:
            self.refuse_web_page(request)
        elif _HOST.fullmatch(host) is None:
            raise Refusal(faults.INVALID_ADDRESS, "The Host header is not valid.")
        # The part before the comma is the credential; the rest differs in every request.
        credential = authorization[: authorization.find(",") + 1]
        scope = signer or _scope_in(credential or authorization or request.query)
        # Not signed: only the queue's URL says whose queue it is.
        owner = self._directory.default if scope is None else self._owner(*scope)
        caller = Caller(
            owner,
            self._directory.suffix(owner),
            f"{self._scheme}://{host}",
            signer is not None,
            _holder(scope, agent, connection.peer_address),
        )
        if credential:
            connection.caller = credential, same, caller
        return caller

    def _owner(self, access_key: str, region: str) -> Owner:
        account = access_key if is_account(access_key) else self._directory.default.account
        return Owner(account, region)

    def _signer(self, request: Request, verifier: Verifier) -> tuple[str, str]:
        """The access key and the region of a request that is signed rightly. Raises Refusal."""
        headers = request.headers
        signed = Signed(request.method, request.path, request.query, headers, request.body)
        if not is_signed(signed):
            if "authorization" in headers or "SignatureVersion" in _form(request):
                raise Refusal(
                    faults.INVALID_SECURITY,
                    "The request was not made over HTTPS or did not use SigV4 for signing.",
                )
            raise Refusal(faults.MISSING_TOKEN, "Request is missing Authentication Token.")
        try:
            return verifier.verify(signed, time())
        except BadSignature:
            raise Refusal(
                faults.SIGNATURE,
                "The request signature we calculated does not match the signature you provided. "
                "Check your AWS Secret Access Key and signing method. Consult the service "
                "documentation for details.",
            ) from None

    def refuse_web_page(self, request: Request) -> None:
        """Refuses a request that a browser marks as sent by a web page. Raises Refusal."""
        headers = request.headers
        if "origin" in headers or headers.get("sec-fetch-site", "none") not in (
            "none",
            "same-origin",
        ):
            raise Refusal(faults.ACCESS_DENIED, "Web pages may not use this endpoint.")
        self.refuse_foreign_host(request)

    def refuse_foreign_host(self, request: Request) -> None:
        """Refuses a request to a host that may not be this server (DNS rebinding). Raises Refusal.

        Its name could be that of a web page.
        """
        headers = request.headers
        host = headers.get("host", "localhost")
        parts = _HOST.fullmatch(host)
        if parts is None:
            raise Refusal(faults.INVALID_ADDRESS, "The Host header is not valid.")
        if not self._is_own_name(parts[1].lower()):
            raise Refusal(
                faults.ACCESS_DENIED,
                f"The host {parts[1]} could be a web page's. If it is a name of this server, start "
                f"it with --allow-host {parts[1]}, or with keys.",
            )

    def may_be_given_away(self, host: str) -> bool:
        """Whether whoever controls the names of the network can give this one to a web page.

        Nobody can do that with an address, with `localhost`, and with a name that was allowed.
        """
        parts = _HOST.fullmatch(host)
        name = "" if parts is None else parts[1].lower()
        if name in self._allow_hosts or name == "localhost" or name.endswith(".localhost"):
            return False
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return True
        return False

    def may_see_pages(self, request: Request, peer: str) -> bool:
        """Whether the sender may see the server's health and figures: web pages may not.

        With keys, only this machine may. Without keys, everyone who can reach the server may use
        all of it, so these pages too.
        """
        try:
            self.refuse_web_page(request)
        except Refusal:
            return False
        return self._verifier is None or _is_loopback(peer)

    def _is_own_name(self, name: str) -> bool:
        if name in self._allow_hosts:
            return True
        try:
            address = ip_address(name.strip("[]"))
        except ValueError:
            return "." not in name or name.endswith(_LOCAL_ENDINGS)
        # Browsers connect 0.0.0.0 and [::] to this machine, but do not treat them as local.
        mapped = getattr(address, "ipv4_mapped", None)
        return not (mapped or address).is_unspecified


def _scope_in(credential: str) -> tuple[str, str] | None:
    """The access key and the region that a request names, if it does."""
    found = _CREDENTIAL.search(credential)
    return None if found is None else (found[1], found[2])


def _holder(scope: tuple[str, str] | None, agent: str, peer: str) -> str:
    """Who sends a request, for the claims it makes: access key, software, address."""
    key = "" if scope is None else scope[0]
    software = agent.partition(" ")[0] or "unknown"
    room = HOLDER_BYTES_MAX - len(peer) - len(" ()")
    # What the client says of itself is cut; its address is not.
    said = f"{key[:24]} {software}".strip()[:room]
    return "".join(each if " " <= each <= "~" else "?" for each in f"{said} ({peer})")


def _is_presigned_by_no_browser(request: Request, host: str) -> bool:
    """Whether a request is signed in its query, and a browser would have sent more headers.

    To these hosts every browser sends `Sec-Fetch-Site` with whatever a page, a link in another
    program or its user asks for, or `Origin` and `Sec-WebSocket-Key`: Chromium, Firefox and WebKit
    were tried. Its value does not count: it is `none` if a page has the browser guess what its user
    visits next (speculation rules). No page can drop a header whose name begins with `Sec-`.
    """
    if "x-amz-signature=" not in request.query.lower():
        return False
    if any(name.startswith("sec-") for name in request.headers):
        return False
    parts = _HOST.fullmatch(host)
    if parts is None:
        return False
    name = parts[1].lower().strip("[]")
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)


def _check_may_change(request: Request, read_only: frozenset[str]) -> None:
    """Refuses a change by a request that a web page could have sent. Raises Refusal.

    Its action is only read if it has no header that a page cannot send.
    """
    headers = request.headers
    if any(name.startswith("x-amz-") for name in headers):
        return
    if headers.get("content-type") == JSON_TYPE:
        return
    action: str | None = None
    if request.method == "GET":
        action = action_of(request.query.encode("latin-1"))
    elif len(request.body) <= _FORM_WITHOUT_HEADER_BYTES_MAX:
        form = b"&".join(filter(None, (request.body, request.query.encode("latin-1"))))
        action = action_of(form)
    else:
        raise _change_without_header("A form of this size")
    if action == "ReceiveMessage" and is_peek(request):
        return
    if action in ACTIONS and action not in read_only:
        raise _change_without_header(action)


def _change_without_header(what: str) -> Refusal:
    return Refusal(
        faults.ACCESS_DENIED,
        f"{what} needs a header that a web page cannot send: sign the request in an Authorization "
        "header as every SDK does, or send any X-Amz-... header. Without one, a request may only "
        "look (List... and Get... actions), unless it is presigned for localhost and sent by no "
        "browser; a server with keys takes every presigned request whose signature is right.",
    )


def _is_loopback(peer: str) -> bool:
    try:
        return ip_address(peer).is_loopback
    except ValueError:
        return False


def _form(request: Request) -> str:
    return f"{request.query}&{request.body[:4_096].decode('latin-1')}"
