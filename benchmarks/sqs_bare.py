"""The practical limit: uvloop, httptools and msgspec without a queue.

It reads the HTTP request and its JSON into a structure, computes the MD5 that an SQS answer must
have, and encodes the answer. It keeps no message, checks nothing and reports no error: the ratio to
it shows the cost of everything else that a server does.
"""

import asyncio
import sys
from collections.abc import Callable
from hashlib import md5
from typing import Any, Final

import httptools
import msgspec
import uvloop

BODY: Final = "x" * 256


class Parameters(msgspec.Struct, rename="pascal"):
    """The parameters of all actions."""

    queue_url: str
    message_body: str = ""
    max_number_of_messages: int = 1
    receipt_handle: str = ""
    entries: list["BareEntry"] = []


class BareEntry(msgspec.Struct, rename="pascal"):
    """One message or receipt of a batch."""

    id: str
    message_body: str = ""
    receipt_handle: str = ""


class Sent(msgspec.Struct, rename={"md5": "MD5OfMessageBody", "message_id": "MessageId"}):
    """The answer to a message."""

    md5: str
    message_id: str


class SentEntry(
    msgspec.Struct, rename={"id": "Id", "md5": "MD5OfMessageBody", "message_id": "MessageId"}
):
    """The answer to a message of a batch."""

    id: str
    md5: str
    message_id: str


class BareReceived(
    msgspec.Struct,
    rename={
        "message_id": "MessageId",
        "receipt": "ReceiptHandle",
        "md5": "MD5OfBody",
        "body": "Body",
    },
):
    """A message in an answer."""

    message_id: str
    receipt: str
    md5: str
    body: str


class BareAnswers:
    """The answers of each action."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(Parameters).decode
        self._encode = msgspec.json.Encoder().encode
        self._count = 0
        self._actions: dict[bytes, Callable[[Parameters], Any]] = {
            b"AmazonSQS.SendMessage": self._send,
            b"AmazonSQS.SendMessageBatch": self._send_batch,
            b"AmazonSQS.ReceiveMessage": self._receive,
            b"AmazonSQS.DeleteMessage": lambda parameters: {},
            b"AmazonSQS.DeleteMessageBatch": self._delete_batch,
        }

    def answer(self, target: bytes, body: bytes) -> bytes:
        """The whole response."""
        answer = self._encode(self._actions[target](self._decode(body)))
        return (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.0\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(answer), answer)
        )

    def _id(self) -> str:
        self._count += 1
        return f"00000000-0000-0000-0000-{self._count:012x}"

    def _send(self, parameters: Parameters) -> Sent:
        return Sent(_digest(parameters.message_body), self._id())

    def _send_batch(self, parameters: Parameters) -> dict[str, list[SentEntry]]:
        return {
            "Successful": [
                SentEntry(entry.id, _digest(entry.message_body), self._id())
                for entry in parameters.entries
            ]
        }

    def _receive(self, parameters: Parameters) -> dict[str, list[BareReceived]]:
        messages = []
        for _ in range(parameters.max_number_of_messages):
            id_ = self._id()
            messages.append(BareReceived(id_, id_, _digest(BODY), BODY))
        return {"Messages": messages}

    def _delete_batch(self, parameters: Parameters) -> dict[str, list[dict[str, str]]]:
        return {"Successful": [{"Id": entry.id} for entry in parameters.entries]}


def _digest(body: str) -> str:
    return md5(body.encode(), usedforsecurity=False).hexdigest()


class Connection(asyncio.Protocol):
    """One client: each request is answered when it is complete."""

    def __init__(self, answers: BareAnswers) -> None:
        self._answer = answers.answer
        self._parser = httptools.HttpRequestParser(self)
        self._target = self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = transport.write  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps the value of X-Amz-Target."""
        if name.lower() == b"x-amz-target":
            self._target = value

    def on_body(self, body: bytes) -> None:
        """A part of the body, most often all of it."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answers."""
        self._write(self._answer(self._target, self._body))
        self._body = b""


async def serve(port: int) -> None:
    """Serves until the process is ended."""
    answers = BareAnswers()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(answers), "127.0.0.1", port, backlog=1_024
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
