"""Ten lines that find the shop which charges twice: `pytest examples/testing`."""

import json

import pytest
from shop import CardCompany, CarefulShop, HastyShop

from penstock.testing import chaos


@pytest.mark.parametrize("kind", [HastyShop, CarefulShop])
@chaos(seeds=200)
def test_every_order_is_charged_once(chaos, kind):
    chaos.calm.create("orders", visibility_timeout=30)
    for number in range(5):
        chaos.calm.push("orders", json.dumps({"id": number, "amount": 100}))
    cards = CardCompany()
    chaos.consume("orders", kind(cards).handle)
    assert sorted(cards.charges) == [(number, 100) for number in range(5)]
