"""AWS Signature Version 4, verified: who signed a request, and that nothing in it was changed.

    string to sign = "AWS4-HMAC-SHA256" ⏎ date ⏎ scope ⏎ sha256(canonical request)
    canonical request = method ⏎ path ⏎ query ⏎ headers ⏎ ⏎ names of headers ⏎ sha256(body)

Every failure raises the same `BadSignature`, so that the answer does not say what was wrong. A
request that can be read in two ways (a parameter given twice, a `+` in a query, dots in a path) is
refused even if its signature is right: the signature is the same for both readings.
"""

import hmac
import re
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from hmac import compare_digest
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SKEW_S_MAX: Final = 15 * 60
EXPIRES_S_MAX: Final = 7 * 24 * 3_600
SERVICE: Final = "sqs"
_KEYS_MAX: Final = 1_024

_HEADER: Final = re.compile(
    rf"{ALGORITHM}\s+Credential=([^,\s]+),\s*SignedHeaders=([^,\s]+),\s*Signature=([0-9a-f]{{64}})",
    re.ASCII,
)
_SCOPE: Final = re.compile(
    r"([!-.0-~]{1,128})/([0-9]{8})/([a-z0-9-]{1,40})/([a-z0-9]+)/aws4_request", re.ASCII
)
_DATE: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z", re.ASCII)
_SPACES: Final = re.compile(r" {2,}")


class BadSignature(Exception):
    """The request has no signature that is valid for it, for a known key, and now."""


class Signed(NamedTuple):
    """The parts of a request that its signature covers; header names are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes | bytearray


class SignatureClaims(NamedTuple):
    """What a signature claims about itself, before it is verified."""

    access_key: str
    day: str
    region: str
    date: str
    expires_s: int | None
    header_names: list[str]
    signature: str
    canonical_query: str

    @property
    def scope(self) -> str:
        """The date, region and service that the signature is for."""
        return f"{self.day}/{self.region}/{SERVICE}/aws4_request"


class Verifier:
    """Checks signatures against known keys."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._secrets = dict(secrets)
        self._signing_keys: dict[tuple[str, str, str], bytes] = {}

    def verify(self, request: Signed, now_s: float) -> tuple[str, str]:
        """The access key and the region a request was signed with. Raises BadSignature."""
        claimed = read_claimed(request)
        _check_time(claimed, now_s)
        _check_headers(claimed, request)
        to_sign = _string_to_sign(claimed, request)
        secret = self._secrets.get(claimed.access_key)
        # An unknown key takes as long as a known one, so that the time does not reveal which exist.
        key = self._signing_key(claimed, secret if secret is not None else "")
        expected = hmac.new(key, to_sign, sha256).hexdigest()
        if not compare_digest(expected, claimed.signature) or secret is None:
            raise BadSignature
        return claimed.access_key, claimed.region

    def _signing_key(self, claimed: SignatureClaims, secret: str) -> bytes:
        known = self._signing_keys.get((claimed.access_key, claimed.day, claimed.region))
        if known is not None:
            return known
        key = f"AWS4{secret}".encode()
        for part in (claimed.day, claimed.region, SERVICE, "aws4_request"):
            key = hmac.new(key, part.encode(), sha256).digest()
        if secret:
            if len(self._signing_keys) >= _KEYS_MAX:
                self._signing_keys.clear()
            self._signing_keys[claimed.access_key, claimed.day, claimed.region] = key
        return key


def is_signed(request: Signed) -> bool:
    """Whether the request claims to be signed in this way."""
    return "x-amz-signature=" in request.query.lower() or request.headers.get(
        "authorization", ""
    ).startswith(ALGORITHM)


def read_claimed(request: Signed) -> SignatureClaims:
    """The claims of the request's signature. Raises BadSignature."""
    parameters = _read_query(request.query)
    if "X-Amz-Signature" in parameters:
        if "authorization" in request.headers:
            raise BadSignature
        signature = parameters.pop("X-Amz-Signature")
        expires = parameters.get("X-Amz-Expires", "")
        if parameters.get("X-Amz-Algorithm") != ALGORITHM or not re.fullmatch(
            "[0-9]{1,6}", expires
        ):
            raise BadSignature
        if re.fullmatch("[0-9a-f]{64}", signature) is None:
            raise BadSignature
        credential = parameters.get("X-Amz-Credential", "")
        names = parameters.get("X-Amz-SignedHeaders", "")
        date = parameters.get("X-Amz-Date", "")
        return _claimed(credential, names, signature, date, int(expires), parameters)
    header = _HEADER.fullmatch(request.headers.get("authorization", ""))
    if header is None:
        raise BadSignature
    date = request.headers.get("x-amz-date", "")
    return _claimed(header[1], header[2], header[3], date, None, parameters)


def _claimed(
    credential: str,
    names: str,
    signature: str,
    date: str,
    expires_s: int | None,
    parameters: dict[str, str],
) -> SignatureClaims:
    scope = _SCOPE.fullmatch(credential)
    if scope is None or scope[4] != SERVICE or _DATE.fullmatch(date) is None:
        raise BadSignature
    if scope[2] != date[:8]:
        raise BadSignature
    pairs = sorted((_encoded(name), _encoded(value)) for name, value in parameters.items())
    query = "&".join(f"{name}={value}" for name, value in pairs)
    return SignatureClaims(
        scope[1], scope[2], scope[3], date, expires_s, names.split(";"), signature, query
    )


def _read_query(query: str) -> dict[str, str]:
    parameters: dict[str, str] = {}
    for pair in query.split("&") if query else []:
        name, _, value = pair.partition("=")
        if "+" in pair:
            raise BadSignature
        try:
            plain = unquote_to_bytes(name).decode()
            content = unquote_to_bytes(value).decode()
        except UnicodeDecodeError:
            raise BadSignature from None
        if plain in parameters:
            raise BadSignature
        parameters[plain] = content
    return parameters


def _encoded(text: str) -> str:
    return quote(text, safe="-_.~")


def _check_time(claimed: SignatureClaims, now_s: float) -> None:
    try:
        signed_at = datetime.fromisoformat(claimed.date)
    except ValueError:
        raise BadSignature from None
    age_s = now_s - signed_at.timestamp()
    oldest_s = SKEW_S_MAX
    if claimed.expires_s is not None:
        if not 1 <= claimed.expires_s <= EXPIRES_S_MAX:
            raise BadSignature
        oldest_s = claimed.expires_s
    if not -SKEW_S_MAX <= age_s <= oldest_s:
        raise BadSignature


def _check_headers(claimed: SignatureClaims, request: Signed) -> None:
    """The host and every `x-amz-` header must be signed. Raises BadSignature."""
    names = claimed.header_names
    if names != sorted(set(names)) or "host" not in names:
        raise BadSignature
    for name in request.headers:
        if name.startswith("x-amz-") and name not in names:
            raise BadSignature
    if claimed.expires_s is None and "x-amz-date" not in names:
        raise BadSignature
    if any(name not in request.headers for name in names):
        raise BadSignature


def _string_to_sign(claimed: SignatureClaims, request: Signed) -> bytes:
    path = request.path
    if "//" in path or "/./" in path or "/../" in path or path.endswith(("/.", "/..")):
        raise BadSignature
    body_hash = sha256(request.body).hexdigest()
    if request.headers.get("x-amz-content-sha256", body_hash) != body_hash:
        raise BadSignature
    lines = [request.method, quote(path, safe="/~-_."), claimed.canonical_query]
    for name in claimed.header_names:
        value = _SPACES.sub(" ", request.headers[name].strip())
        lines.append(f"{name}:{value}")
    lines += ["", ";".join(claimed.header_names), body_hash]
    canonical = "\n".join(lines).encode()
    hashed = sha256(canonical).hexdigest()
    return f"{ALGORITHM}\n{claimed.date}\n{claimed.scope}\n{hashed}".encode()
