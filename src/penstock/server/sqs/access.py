"""Who may ask, and for whom: the caller behind a request to the SQS endpoint.

With keys, every request must be signed by one of them. Without, any signature will do and only says
which account and region are meant; then the one thing to keep out is a web page that its visitor's
browser lets talk to this machine. Browsers give themselves away by `Origin` and `Sec-Fetch-Site`,
and a page that has its own name point here (DNS rebinding) by a Host that is no name of this
machine.
"""

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from time import time
from typing import Final

from penstock.server.http import Request
from penstock.server.sqs.lookup import Caller
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs.address import Owner, QueueDirectory, is_account
from penstock.wire.sqs.errors import Refusal
from penstock.wire.sqs.sigv4 import BadSignature, Signed, Verifier, is_signed

_CALLERS_MAX: Final = 1_024
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)
_CREDENTIAL: Final = re.compile(
    r"Credential=([^/,&\s%]{1,128})(?:/|%2F)[0-9]{8}(?:/|%2F)([a-z0-9-]{1,40})(?:/|%2F)",
    re.IGNORECASE,
)
# Names that no page on the web can have.
_LOCAL_ENDINGS: Final = (".localhost", ".internal", ".local", ".test")


class Access:
    """Finds the caller of a request, or refuses it."""

    def __init__(
        self,
        directory: QueueDirectory,
        scheme: str,
        keys: Mapping[str, str],
        allow_hosts: Iterable[str],
    ) -> None:
        self._directory = directory
        self._scheme = scheme
        self._verifier = Verifier(keys) if keys else None
        self._allow_hosts = frozenset(host.lower() for host in allow_hosts)
        self._callers: dict[tuple[str, str], Caller] = {}

    def caller(self, request: Request) -> Caller:
        """Who asks. Raises Refusal."""
        if self._verifier is not None:
            return self._verified(request, self._verifier)
        headers = request.headers
        host = headers.get("host", "localhost")
        if "origin" in headers or "sec-fetch-site" in headers:
            self.check_no_page(request)
        authorization = headers.get("authorization", "")
        # Up to the comma: the credential. What follows differs with every request.
        credential = authorization[: authorization.find(",")] if authorization else request.query
        try:
            return self._callers[credential, host]
        except KeyError:
            pass
        self.check_no_page(request)
        found = _CREDENTIAL.search(credential)
        if found is None:
            # Nothing is signed: the URL alone says whose queue is meant.
            return self._caller(self._directory.default, host)
        caller = self._caller(self._owner(found[1], found[2]), host)
        if authorization:
            if len(self._callers) >= _CALLERS_MAX:
                self._callers.clear()
            self._callers[credential, host] = caller
        return caller

    def _owner(self, access_key: str, region: str) -> Owner:
        account = access_key if is_account(access_key) else self._directory.default.account
        return Owner(account, region)

    def _caller(self, owner: Owner, host: str) -> Caller:
        base_url = f"{self._scheme}://{host}"
        confined = self._verifier is not None
        return Caller(owner, self._directory.suffix(owner), base_url, confined)

    def _verified(self, request: Request, verifier: Verifier) -> Caller:
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
            access_key, region = verifier.verify(signed, time())
        except BadSignature:
            raise Refusal(
                faults.SIGNATURE,
                "The request signature we calculated does not match the signature you provided. "
                "Check your AWS Secret Access Key and signing method. Consult the service "
                "documentation for details.",
            ) from None
        host = headers.get("host", "localhost")
        if _HOST.fullmatch(host) is None:
            raise Refusal(faults.INVALID_ADDRESS, "The Host header is not valid.")
        return self._caller(self._owner(access_key, region), host)

    def check_no_page(self, request: Request) -> None:
        """Refuses what a web page had its visitor's browser send. Raises Refusal."""
        headers = request.headers
        if "origin" in headers or headers.get("sec-fetch-site", "none") not in (
            "none",
            "same-origin",
        ):
            raise Refusal(faults.ACCESS_DENIED, "Web pages may not use this endpoint.")
        host = headers.get("host", "localhost")
        found = _HOST.fullmatch(host)
        if found is None:
            raise Refusal(faults.INVALID_ADDRESS, "The Host header is not valid.")
        if not self._is_ours(found[1].lower()):
            raise Refusal(
                faults.ACCESS_DENIED,
                f"The host {found[1]} could be a web page's. If it is a name of this server, start "
                f"it with --allow-host {found[1]}, or with keys.",
            )

    def is_from_here(self, request: Request, peer: str) -> bool:
        """Whether a page of figures may be shown: to this machine, but not to its web pages.

        Without keys everybody who can reach the server may do everything, and see this too.
        """
        try:
            self.check_no_page(request)
        except Refusal:
            return False
        return self._verifier is None or _is_loopback(peer)

    def _is_ours(self, name: str) -> bool:
        if "." not in name or name.endswith(_LOCAL_ENDINGS) or name in self._allow_hosts:
            return True
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def _is_loopback(peer: str) -> bool:
    try:
        return ip_address(peer).is_loopback
    except ValueError:
        return False


def _form(request: Request) -> str:
    return f"{request.query}&{request.body[:4_096].decode('latin-1')}"
