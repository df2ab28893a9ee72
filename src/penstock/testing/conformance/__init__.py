"""The delivery contract as a suite of behaviours that every backend runs.

In a test module of the backend:

    class TestMine(ConformanceSuite):
        @pytest.fixture
        def clock(self):  # only if the backend accepts a clock
            return ManualClock()

        @pytest.fixture
        def queues(self, clock):
            with penstock.connect("mine:", clock=clock) as queues:
                yield queues

A backend lists the behaviours that it does not have in its `LACKS` table, with the reason; tests of
these behaviours are skipped with that reason, and no others are. Without a clock the suite waits in
real time, `SCALE` seconds for each second of its own time. Choose a scale well above the backend's
response time: a multiple of 0.2 if the backend counts in whole seconds. A test that fails because
its own steps took too long is run again with a larger scale. `RETENTION_MIN` is the shortest
retention that a queue of the backend may have.
"""

from pathlib import Path

try:
    import pytest
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "the conformance suite is run by pytest, which is not installed: pip install pytest"
    ) from missing

# Before the parts are imported, so that a failing assertion shows the compared values.
for _part in Path(__file__).parent.glob("*.py"):
    if _part.stem != "__init__":
        pytest.register_assert_rewrite(f"{__name__}.{_part.stem}")

from penstock.testing.conformance.batches import BatchContract  # noqa: E402
from penstock.testing.conformance.claims import ClaimContract  # noqa: E402
from penstock.testing.conformance.content import ContentContract  # noqa: E402
from penstock.testing.conformance.crowd import CrowdContract  # noqa: E402
from penstock.testing.conformance.dead_letters import DeadLetterContract  # noqa: E402
from penstock.testing.conformance.fifo import FifoContract  # noqa: E402
from penstock.testing.conformance.input import InputContract  # noqa: E402
from penstock.testing.conformance.order import OrderContract  # noqa: E402
from penstock.testing.conformance.pausing import PauseContract  # noqa: E402
from penstock.testing.conformance.queues import QueueContract  # noqa: E402
from penstock.testing.conformance.seam import BEHAVIOURS, Contract, behaviour  # noqa: E402
from penstock.testing.conformance.waiting import WaitingContract  # noqa: E402

__all__ = ["BEHAVIOURS", "ConformanceSuite", "Contract", "behaviour"]


class ConformanceSuite(
    OrderContract,
    ClaimContract,
    ContentContract,
    FifoContract,
    DeadLetterContract,
    BatchContract,
    WaitingContract,
    QueueContract,
    PauseContract,
    CrowdContract,
    InputContract,
):
    """The whole contract; subclass it and define the fixture `queues`."""
