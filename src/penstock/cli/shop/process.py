"""One process of the shop: `python -m penstock.cli.shop.process ROLE CLIENT URL DIRECTORY`.

producer   sends orders; one in a hundred is poison
orders     a consumer: takes orders, sends a mail for each, and now and then ends itself with
           SIGKILL while it holds some; a poison order ends it each time
mail       a consumer that deletes mails
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Final

from penstock.cli.shop.clients import NotAnswered, ShopClient, open_client
from penstock.cli.shop.ledger import ShopLedger

PAUSE_S: Final = 0.06
_RETRY_S: Final = 0.2
_POISON_OF: Final = 100
_CRASHES_OF: Final = 120
# Well within the visibility timeout of the shop's queues.
_HOLD_S: Final = 2.0


class ShopProcess:
    """What the roles share: the client, the ledger, and whether the shop is closing."""

    def __init__(self, role: str, client: ShopClient, directory: Path) -> None:
        self.client = client
        self.ledger = ShopLedger(directory / "ledger", role)
        self._closing = directory / "closing"
        self._parent = os.getppid()

    @property
    def is_closing(self) -> bool:
        """Whether the shop takes no more orders, and nothing crashes without a reason any more."""
        return self._closing.exists() or self._is_alone

    @property
    def _is_alone(self) -> bool:
        """Whether the demo was killed, and nobody will end this process."""
        return os.getppid() != self._parent

    def send(self, queue: str, order: str, **content: object) -> bool:
        """Sends once; False if that was not answered."""
        self.ledger.write("try", order)
        try:
            self.client.send(queue, {"order": order, **content})
        except NotAnswered:
            time.sleep(_RETRY_S)
            return False
        self.ledger.write("sent", order)
        return True

    def produce(self) -> None:
        """Sends orders until the shop closes."""
        number = 0
        while not self.is_closing:
            number += 1
            is_poison = random.randrange(_POISON_OF) == 0
            items = [{"sku": f"A-{random.randrange(900)}", "count": random.randint(1, 3)}]
            self.send("orders", f"order-{os.getpid()}-{number}", poison=is_poison, items=items)
            time.sleep(PAUSE_S)

    def consume(self, queue: str) -> None:
        """Takes messages until it is ended."""
        while not self._is_alone:
            try:
                deliveries = self.client.receive(queue)
            except NotAnswered:
                time.sleep(_RETRY_S)
                continue
            began_s = time.monotonic()
            for each in deliveries:
                if time.monotonic() - began_s > _HOLD_S:
                    break  # what is left comes back, before its claims run out in use
                order = str(each.content["order"])
                self.ledger.write("got", order, each.message)
                if queue == "orders":
                    self._crash_sometimes(is_poison=bool(each.content.get("poison")))
                    if not self.send("mail", f"mail-for-{order}-{each.message}"):
                        continue  # it comes back, and is tried again
                self.ledger.write("end", order, each.message)
                try:
                    if self.client.delete(queue, each):
                        self.ledger.write("done", order, each.message)
                except NotAnswered:
                    time.sleep(_RETRY_S)

    def _crash_sometimes(self, *, is_poison: bool) -> None:
        if is_poison or (not self.is_closing and random.randrange(_CRASHES_OF) == 0):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Runs one role."""
    role, client, endpoint, directory = sys.argv[1:]
    path = Path(directory)
    process = ShopProcess(role, open_client(client, endpoint, path / "store"), path)
    if role == "producer":
        process.produce()
    else:
        process.consume(role)


if __name__ == "__main__":
    main()
