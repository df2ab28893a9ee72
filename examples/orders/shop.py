"""A shop with a queue of orders and a dead-letter queue, on the API of Amazon SQS.

    penstock serve
    python shop.py

It prints:

    packed: book
    cannot pack: lamp without an address
    cannot pack: lamp without an address
    packed: chair
    in the dead-letter queue: lamp
    packed after the mend: lamp
"""

import json
import os
from typing import Any

import boto3

MAX_RECEIVES = 2


def connect() -> Any:
    """The client of AWS_ENDPOINT_URL_SQS, or else of `penstock serve` on this machine."""
    return boto3.client(
        "sqs",
        endpoint_url=os.environ.get("AWS_ENDPOINT_URL_SQS", "http://127.0.0.1:9324"),
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )


def make_queues(sqs: Any) -> tuple[str, str]:
    """Makes `orders` and its dead-letter queue; their URLs."""
    dead = sqs.create_queue(QueueName="orders-dead")["QueueUrl"]
    shown = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])
    policy = {
        "deadLetterTargetArn": shown["Attributes"]["QueueArn"],
        "maxReceiveCount": MAX_RECEIVES,
    }
    attributes = {"VisibilityTimeout": "30", "RedrivePolicy": json.dumps(policy)}
    return sqs.create_queue(QueueName="orders", Attributes=attributes)["QueueUrl"], dead


def place(sqs: Any, url: str, item: str, address: str) -> None:
    """Sends an order."""
    sqs.send_message(QueueUrl=url, MessageBody=json.dumps({"item": item, "address": address}))


def pack(order: dict[str, str]) -> None:
    """The work. Raises ValueError for an order that cannot be packed."""
    if not order["address"]:
        raise ValueError(f"{order['item']} without an address")
    print("packed:", order["item"])


def work(sqs: Any, url: str) -> None:
    """Packs orders until none is left. One that fails is visible again at once."""
    while messages := sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=1).get("Messages"):
        for message in messages:
            receipt = {"QueueUrl": url, "ReceiptHandle": message["ReceiptHandle"]}
            try:
                pack(json.loads(message["Body"]))
            except ValueError as error:
                print("cannot pack:", error)
                sqs.change_message_visibility(**receipt, VisibilityTimeout=0)
            else:
                sqs.delete_message(**receipt)


def mend(sqs: Any, dead: str) -> None:
    """Packs what is in the dead-letter queue, now that the address is known."""
    for message in sqs.receive_message(QueueUrl=dead).get("Messages", []):
        order = json.loads(message["Body"])
        print("in the dead-letter queue:", order["item"])
        print("packed after the mend:", order["item"])
        sqs.delete_message(QueueUrl=dead, ReceiptHandle=message["ReceiptHandle"])


def main() -> None:
    """Three orders, one of them without an address."""
    sqs = connect()
    orders, dead = make_queues(sqs)
    for item, address in (("book", "1 Main St"), ("lamp", ""), ("chair", "2 Main St")):
        place(sqs, orders, item, address)
    work(sqs, orders)
    mend(sqs, dead)


if __name__ == "__main__":
    main()
