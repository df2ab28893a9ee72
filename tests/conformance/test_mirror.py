"""The primary of a mirror holds the contract while it is mirrored, and the mirror follows it."""

from typing import Any

import pytest

import penstock
from penstock.clock import ManualClock
from penstock.testing.conformance import ConformanceSuite
from penstock.testing.conformance.dead_letters import DeadLetterContract
from tests.conftest import FULL

connect: Any = penstock.connect


class TestMirror(ConformanceSuite if FULL else DeadLetterContract):  # type: ignore[misc]
    """Dead letters, and with FULL the whole suite, with a mirror beside them."""

    @pytest.fixture
    def clock(self):
        return ManualClock()

    @pytest.fixture
    def queues(self, clock, quick_path):
        primary = f"file:{quick_path}/store?embedded=1%26durability=os"
        mirror = f"file:{quick_path}/copy?embedded=1%26durability=os"
        url = f"mirror:?primary={primary}&mirror={mirror}"
        with connect(url, clock=clock) as queues:
            yield queues
            assert queues.service.mirror.failure is None
