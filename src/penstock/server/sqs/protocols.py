"""The protocols of the SQS endpoint over HTTP: they decode requests and encode responses.

A request with an X-Amz-Target header is JSON; any other is Query. A Query response is XML, or JSON
for a GET whose Accept header names it; at LocalStack's path for looking, for a POST, too.
"""

from typing import Final, Protocol

from penstock.server.http import Request, first_lines, response
from penstock.server.sqs.peek import form_of, is_peek
from penstock.wire.sqs import errors as faults
from penstock.wire.sqs import json as sqs_json
from penstock.wire.sqs import query as sqs_query
from penstock.wire.sqs.address import read_path
from penstock.wire.sqs.errors import Refusal
from penstock.wire.sqs.model import Action, Shape

_JSON_TYPE: Final = f"Content-Type: {sqs_json.CONTENT_TYPE}\r\n".encode()


class SqsProtocol(Protocol):
    """One protocol: how a request is decoded and its response encoded."""

    def decode(self, request: Request, base_url: str) -> tuple[Action, Shape]:
        """The action of a request and its parameters. Raises Refusal."""
        ...

    def encode(
        self, action: Action, result: Shape | None, request_id: str, loop_time_s: float
    ) -> bytes:
        """The response of an action that succeeded."""
        ...

    def encode_refusal(self, refusal: Refusal, request_id: str, loop_time_s: float) -> bytes:
        """The response of a request that was refused."""
        ...


class JsonProtocol:
    """JSON 1.0."""

    def decode(self, request: Request, base_url: str) -> tuple[Action, Shape]:
        return sqs_json.decode(request.headers.get("x-amz-target", ""), request.body)

    def encode(
        self, action: Action, result: Shape | None, request_id: str, loop_time_s: float
    ) -> bytes:
        body = sqs_json.encode(result)
        return b"%sx-amzn-RequestId: %s\r\n%sContent-Length: %d\r\n\r\n%s" % (
            first_lines(200, loop_time_s),
            request_id.encode(),
            _JSON_TYPE,
            len(body),
            body,
        )

    def encode_refusal(self, refusal: Refusal, request_id: str, loop_time_s: float) -> bytes:
        body, code = sqs_json.encode_refusal(refusal)
        head = f"x-amzn-RequestId: {request_id}\r\nContent-Type: {sqs_json.CONTENT_TYPE}\r\n"
        head += f"x-amzn-query-error: {code}\r\n"
        return response(refusal.fault.status, head.encode(), body, loop_time_s)


class QueryProtocol:
    """The Query protocol, answered in XML or in JSON."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def decode(self, request: Request, base_url: str) -> tuple[Action, Shape]:
        url = f"{base_url}{request.path}" if read_path(request.path) else None
        if request.method == "GET":
            if "Action=" not in request.query:
                raise Refusal(faults.NO_OPERATION, "")
            return sqs_query.decode(request.query.encode("latin-1"), url)
        if request.method != "POST":
            raise Refusal(faults.UNKNOWN_OPERATION, "Use GET or POST.")
        form = request.body
        if request.query:
            form = b"&".join(filter(None, (form, request.query.encode("latin-1"))))
        return sqs_query.decode(form, url)

    def encode(
        self, action: Action, result: Shape | None, request_id: str, loop_time_s: float
    ) -> bytes:
        write = sqs_query.encode_as_json if self._as_json else sqs_query.encode
        return self._response(200, write(action, result, request_id), request_id, loop_time_s)

    def encode_refusal(self, refusal: Refusal, request_id: str, loop_time_s: float) -> bytes:
        if refusal.fault is faults.NO_OPERATION:
            head = f"x-amzn-RequestId: {request_id}\r\nContent-Type: text/xml\r\n"
            return response(404, head.encode(), b"<UnknownOperationException/>\n", loop_time_s)
        if refusal.fault is faults.QUEUE_DOES_NOT_EXIST:
            # The Query protocol has another text for this error than JSON.
            plain, there = "The specified queue does not exist", "for this wsdl version"
            refusal.message = refusal.message.replace(f"{plain}.", f"{plain} {there}.", 1)
        as_json = self._as_json
        write = sqs_query.encode_refusal_as_json if as_json else sqs_query.encode_refusal
        return self._response(
            refusal.fault.status, write(refusal, request_id), request_id, loop_time_s
        )

    def _response(self, status: int, body: bytes, request_id: str, loop_time_s: float) -> bytes:
        content_type = "application/json" if self._as_json else sqs_query.CONTENT_TYPE
        head = f"x-amzn-RequestId: {request_id}\r\nContent-Type: {content_type}\r\n"
        return response(status, head.encode(), body, loop_time_s)


class PeekProtocol(QueryProtocol):
    """The Query protocol at LocalStack's path for looking at a queue: see `server.sqs.peek`.

    A request without an action is a receive.
    """

    def decode(self, request: Request, base_url: str) -> tuple[Action, Shape]:
        if request.method not in ("GET", "POST"):
            raise Refusal(faults.UNKNOWN_OPERATION, "Use GET or POST.")
        form = form_of(request)
        if sqs_query.action_of(form) is None:
            form += b"&Action=ReceiveMessage"
        action, parameters = sqs_query.decode(form, None)
        if action.name != "ReceiveMessage":
            raise Refusal(faults.UNKNOWN_OPERATION, f"{request.path} is for ReceiveMessage only.")
        return action, parameters

    def encode(
        self, action: Action, result: Shape | None, request_id: str, loop_time_s: float
    ) -> bytes:
        write = sqs_query.encode_as_elements if self._as_json else sqs_query.encode
        return self._response(200, write(action, result, request_id), request_id, loop_time_s)


class HeadProtocol(QueryProtocol):
    """A HEAD request: it is always refused, and its response has no body."""

    def encode_refusal(self, refusal: Refusal, request_id: str, loop_time_s: float) -> bytes:
        head = f"x-amzn-RequestId: {request_id}\r\n"
        return response(refusal.fault.status, head.encode(), b"", loop_time_s)


_JSON: Final = JsonProtocol()
_XML: Final = QueryProtocol(as_json=False)
_QUERY_JSON: Final = QueryProtocol(as_json=True)
_PEEK_XML: Final = PeekProtocol(as_json=False)
_PEEK_JSON: Final = PeekProtocol(as_json=True)
_HEAD: Final = HeadProtocol(as_json=False)


def protocol_of(request: Request) -> SqsProtocol:
    """The protocol of a request."""
    headers = request.headers
    if request.method == "POST" and (
        "x-amz-target" in headers or headers.get("content-type") == sqs_json.CONTENT_TYPE
    ):
        return _JSON
    if request.method != "HEAD" and is_peek(request):
        return _PEEK_JSON if "application/json" in headers.get("accept", "") else _PEEK_XML
    if request.method == "GET" and "application/json" in headers.get("accept", ""):
        return _QUERY_JSON
    return _XML if request.method != "HEAD" else _HEAD
