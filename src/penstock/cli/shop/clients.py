"""How the shop's processes reach the server: by boto3, or by Penstock's own client."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import penstock
from penstock.backends.remote.blocking import Remote
from penstock.backends.remote.starting import DaemonEndpoint
from penstock.errors import MissingExtra, RequestError, UnavailableError


class NotAnswered(Exception):
    """The server did not answer: it may have done what was asked, or not."""


class ShopDelivery(NamedTuple):
    """A message that was delivered: its id, its content, and what is needed to delete it."""

    message: str
    content: dict[str, Any]
    receipt: Any


class ShopClient(Protocol):
    """The three requests of the shop. Each raises NotAnswered if there was no answer."""

    def send(self, queue: str, content: dict[str, Any]) -> None:
        """Sends a message."""
        ...

    def receive(self, queue: str) -> list[ShopDelivery]:
        """Receives some messages; waits a second for the first."""
        ...

    def delete(self, queue: str, delivery: ShopDelivery) -> bool:
        """Deletes a message; False if it is not the receiver's any more."""
        ...


CLIENTS: Final = ("boto3", "penstock")


def chosen_client(asked: str | None) -> str:
    """The client that was asked for, or boto3 if it is installed. Raises MissingExtra."""
    has_boto3 = _has_boto3()
    if asked == "boto3" and not has_boto3:
        raise MissingExtra(
            "--client boto3: boto3 is not installed; "
            "install it with pip install 'PATH-OF-THE-CLONE[demo]'"
        )
    return asked or ("boto3" if has_boto3 else "penstock")


def _has_boto3() -> bool:
    try:
        return find_spec("boto3") is not None
    except ValueError:
        return False  # it was said to be missing


def open_client(name: str, endpoint: str, store: Path) -> ShopClient:
    """The client of a process of the shop."""
    return BotoClient(endpoint) if name == "boto3" else StoreClient(store)


class BotoClient:
    """The server as an SQS endpoint, by boto3."""

    def __init__(self, endpoint: str) -> None:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        self._failed = BotoCoreError
        self._refused = ClientError
        self._endpoint = endpoint
        # A push that boto3 repeats by itself would not be in the ledger.
        options = Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10)
        self._sqs = boto3.client(
            "sqs",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="demo",
            aws_secret_access_key="demo",
            config=options,
        )

    def _ask(self, action: str, queue: str, **given: Any) -> Any:
        try:
            url = f"{self._endpoint}/000000000000/{queue}"
            return getattr(self._sqs, action)(QueueUrl=url, **given)
        except self._failed as error:
            raise NotAnswered(str(error)) from None

    def send(self, queue: str, content: dict[str, Any]) -> None:
        self._ask("send_message", queue, MessageBody=json.dumps(content))

    def receive(self, queue: str) -> list[ShopDelivery]:
        reply = self._ask("receive_message", queue, MaxNumberOfMessages=5, WaitTimeSeconds=1)
        return [
            ShopDelivery(each["MessageId"], json.loads(each["Body"]), each["ReceiptHandle"])
            for each in reply.get("Messages", ())
        ]

    def delete(self, queue: str, delivery: ShopDelivery) -> bool:
        try:
            self._ask("delete_message", queue, ReceiptHandle=delivery.receipt)
        except self._refused:
            return False
        return True


class StoreClient:
    """The store's socket, by Penstock's own client, which starts no daemon here."""

    def __init__(self, store: Path) -> None:
        self._queues = penstock.Queues(Remote(DaemonEndpoint(store, starts=False)))

    def send(self, queue: str, content: dict[str, Any]) -> None:
        self._ask(lambda: self._queues.push(queue, json.dumps(content)))

    def receive(self, queue: str) -> list[ShopDelivery]:
        claims = self._ask(lambda: self._queues.pull_many(queue, 5, wait=1))
        return [ShopDelivery(each.id, json.loads(each.body), each) for each in claims]

    def delete(self, queue: str, delivery: ShopDelivery) -> bool:
        try:
            self._ask(lambda: self._queues.delete(delivery.receipt))
        except RequestError:
            return False
        return True

    @staticmethod
    def _ask(request: Any) -> Any:
        try:
            return request()
        except (UnavailableError, penstock.errors.ProtocolError) as error:
            raise NotAnswered(str(error)) from None


def describe_client(name: str) -> str:
    """Which client the shop uses."""
    if name == "boto3":
        return "boto3, over the SQS API"
    why = "" if _has_boto3() else "; with pip install 'PATH-OF-THE-CLONE[demo]' it is boto3"
    return f"Penstock's own client, over the store's socket{why}"
