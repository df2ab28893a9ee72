"""A shop that charges each order once, and one that seems to.

Both receive orders from a queue, charge the card and delete the message; tests of one message pass
for both. `test_shop.py` shows which of them charges twice.
"""

import json


class CardCompany:
    """What is charged; a real one would be a service elsewhere."""

    def __init__(self):
        self.charges = []

    def charge(self, order, amount):
        self.charges.append((order, amount))


class HastyShop:
    """Charges whatever it is given."""

    def __init__(self, cards):
        self.cards = cards

    def handle(self, message):
        order = json.loads(message.body)
        self.cards.charge(order["id"], order["amount"])


class CarefulShop:
    """Remembers what it has charged; a real one does so in the same transaction."""

    def __init__(self, cards):
        self.cards = cards
        self.done = set()

    def handle(self, message):
        order = json.loads(message.body)
        if order["id"] not in self.done:
            self.cards.charge(order["id"], order["amount"])
            self.done.add(order["id"])
