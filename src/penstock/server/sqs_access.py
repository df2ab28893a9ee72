"""Who may ask, and for whom: the caller behind a request to the SQS endpoint."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.server.http import Request
from penstock.server.sqs_store import Caller
from penstock.wire import sqs_errors as faults
from penstock.wire.sqs_address import Directory, Owner, is_account
from penstock.wire.sqs_errors import Refusal

_CALLERS_MAX: Final = 1_024
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}", re.ASCII)
_CREDENTIAL: Final = re.compile(r"Credential=([^/,\s]{1,128})/[0-9]{8}/([a-z0-9-]{1,40})/")


class Access:
    """Finds the caller of a request."""

    def __init__(
        self,
        directory: Directory,
        scheme: str,
        keys: Mapping[str, str],
        allow_hosts: Iterable[str],
    ) -> None:
        self._directory = directory
        self._scheme = scheme
        self._callers: dict[tuple[str, str], Caller] = {}

    def caller(self, request: Request) -> Caller:
        """Who asks. Raises Refusal."""
        headers = request.headers
        authorization = headers.get("authorization", "")
        host = headers.get("host", "localhost")
        scope = authorization[: authorization.find(",")]
        try:
            return self._callers[scope, host]
        except KeyError:
            pass
        if _HOST.fullmatch(host) is None:
            raise Refusal(faults.INVALID_ADDRESS, "The Host header is not valid.")
        caller = self._read(authorization or request.query, host)
        if len(self._callers) >= _CALLERS_MAX:
            self._callers.clear()
        self._callers[scope, host] = caller
        return caller

    def _read(self, text: str, host: str) -> Caller:
        default = self._directory.default
        base_url = f"{self._scheme}://{host}"
        found = _CREDENTIAL.search(text)
        if found is None:
            return Caller(default, "", base_url, anonymous=True)
        key, region = found.groups()
        owner = Owner(key if is_account(key) else default.account, region)
        return Caller(owner, self._directory.suffix(owner), base_url)
