"""The connection to an SQS endpoint: its address, the credentials, the timeouts.

Every exception of the SDK becomes a PenstockError here.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from ipaddress import ip_address
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import exceptions as faults
from botocore.parsers import ResponseParserError

from penstock.backends.sqs.errors import error_of
from penstock.errors import (
    BackendLost,
    EngineClosed,
    InvalidField,
    PenstockError,
    RequestError,
)
from penstock.url import BackendUrl, without_password
from penstock.wire.sqs.address import is_account, is_region

TIMEOUT_S: Final = 30
CONNECT_S: Final = 10.0
ATTEMPTS_MAX: Final = 3
POLL_S_MAX: Final = 20
# How many messages one request may bring or take.
MESSAGES_MAX: Final = 10
# Each pull that waits has a connection of its own; other requests must find one free.
CONNECTIONS_MAX: Final = 10_000
# For an endpoint on this machine, if there are no credentials: it accepts any.
_ANY: Final = "penstock"
# A field that the answer must have: the SDK reads a web page, for example, as an empty answer.
_NEEDED: Final = {
    "get_queue_url": "QueueUrl",
    "create_queue": "QueueUrl",
    "send_message": "MessageId",
    "get_queue_attributes": "Attributes",
}
_NO_CREDENTIALS: Final = (
    faults.NoCredentialsError,
    faults.PartialCredentialsError,
    faults.CredentialRetrievalError,
    faults.NoAuthTokenError,
    faults.TokenRetrievalError,
    faults.SSOError,
    faults.ConfigParseError,
    faults.ProfileNotFound,
)


class SqsTarget(NamedTuple):
    """The parts of an `sqs:` URL; `None` means that the user's AWS settings decide."""

    region: str | None
    url: str | None
    profile: str | None
    account: str | None
    timeout_s: float

    @property
    def on_loopback(self) -> bool:
        """Whether the endpoint is on this machine, and so not Amazon's."""
        host = urlsplit(self.url or "").hostname
        if host is None or host == "localhost":
            return host is not None
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False


def read_endpoint(url: BackendUrl) -> SqsTarget:
    """Reads an `sqs://REGION?…` URL. Raises InvalidField."""
    url.check_options({"endpoint", "profile", "account", "timeout"})
    region = url.rest.removeprefix("//").rstrip("/")
    if region and not is_region(region):
        raise InvalidField(
            f"url: {url.shown!r} has no valid region; use sqs://REGION such as sqs://eu-west-1, "
            "with ?endpoint=URL for an endpoint that is not Amazon's"
        )
    endpoint = url.options.get("endpoint")
    if endpoint is not None:
        try:
            parts = urlsplit(endpoint)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            shown = without_password(endpoint)
            raise InvalidField(f"url: endpoint={shown!r} is not of the form http://HOST:PORT")
    account = url.options.get("account")
    if account is not None and not is_account(account):
        raise InvalidField(f"url: account={account!r} is not twelve digits")
    timeout_s = float(url.whole_number("timeout", TIMEOUT_S) or 1)
    return SqsTarget(region or None, endpoint, url.options.get("profile"), account, timeout_s)


class SqsClient:
    """One SDK client, used by one event loop."""

    def __init__(self, endpoint: SqsTarget) -> None:
        self._endpoint = endpoint
        self._stack = AsyncExitStack()
        self._sdk: Any = None
        self.shown = endpoint.url or f"sqs://{endpoint.region or ''}"
        self.account = endpoint.account
        self.closed = False

    async def open(self) -> None:
        """Finds region and credentials; sends no request yet. Raises RequestError."""
        endpoint = self._endpoint
        try:
            session = AioSession(profile=endpoint.profile)
            region = endpoint.region or session.get_config_variable("region")
            region = region or os.environ.get("AWS_REGION")
            if not region:
                raise InvalidField(
                    "url: no region is named, by sqs://REGION or AWS_REGION or a profile"
                )
            given = await self._credentials(session)
            self._sdk = await self._stack.enter_async_context(
                session.create_client(
                    "sqs",
                    region_name=region,
                    endpoint_url=endpoint.url,
                    config=AioConfig(
                        connect_timeout=min(CONNECT_S, endpoint.timeout_s),
                        read_timeout=POLL_S_MAX + endpoint.timeout_s,
                        max_pool_connections=CONNECTIONS_MAX,
                        retries={"mode": "standard", "total_max_attempts": ATTEMPTS_MAX},
                    ),
                    **given,
                )
            )
        except Exception as error:
            await self._stack.aclose()
            raise self._translate(error, None) from None
        self.shown = endpoint.url or f"sqs://{region}"

    async def _credentials(self, session: Any) -> dict[str, str]:
        if self._endpoint.on_loopback:
            # For an endpoint on loopback no role of an Amazon machine is needed, and asking for
            # one takes seconds.
            session.get_component("credential_provider").remove("iam-role")
        if await session.get_credentials() is not None:
            return {}
        if not self._endpoint.on_loopback:
            raise RequestError(
                "credentials: none were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or name a profile with ?profile=NAME"
            )
        return {"aws_access_key_id": _ANY, "aws_secret_access_key": _ANY}

    async def call(
        self, action: str, queue: str | None = None, wait_s: int = 0, **parameters: Any
    ) -> Mapping[str, Any]:
        """Sends a request of the SDK and returns its answer; errors name the `queue`.

        Raises PenstockError, BackendLost if no answer came in time.
        """
        if self.closed:
            raise EngineClosed("this service was closed")
        timeout_s = self._endpoint.timeout_s + wait_s
        try:
            async with asyncio.timeout(timeout_s):
                answer: Mapping[str, Any] = await getattr(self._sdk, action)(**parameters)
        except TimeoutError:
            raise BackendLost(f"{self.shown}: no answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            if self.closed:
                raise EngineClosed("this service was closed while this waited") from None
            raise
        except Exception as error:
            raise self._translate(error, queue) from None
        if action in _NEEDED and _NEEDED[action] not in answer:
            raise self.malformed_answer(f"it has no {_NEEDED[action]}")
        return answer

    def malformed_answer(self, why: str) -> BackendLost:
        """The error for an answer that does not have the form of SQS's."""
        return BackendLost(f"{self.shown}: the answer is not that of an SQS endpoint: {why}")

    def _translate(self, error: Exception, queue: str | None) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        if self.closed:
            return EngineClosed("this service was closed")
        if isinstance(error, faults.ClientError):
            detail = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code, text = str(detail.get("Code", "")), str(detail.get("Message", ""))
            return error_of(code, text, status, queue)
        reason = " ".join(str(error).split())
        if isinstance(error, _NO_CREDENTIALS):
            return RequestError(f"credentials: {reason}")
        if isinstance(error, faults.ParamValidationError | faults.ValidationError | ValueError):
            return InvalidField(f"request: {reason}")
        if isinstance(error, ResponseParserError | AttributeError | LookupError | TypeError):
            # The SDK could not read the answer.
            return self.malformed_answer(reason)
        return BackendLost(f"{self.shown}: {reason}")

    async def close(self) -> None:
        """Ends every connection."""
        self.closed = True
        await self._stack.aclose()
