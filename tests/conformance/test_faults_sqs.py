"""Row 26: each request of a command to an SQS endpoint meets a fault."""

from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.retries.standard import ExponentialBackoff

from penstock.testing.conformance.faults import PORTAL_FAULTS, FaultContract, FaultyClients
from penstock.testing.proxy import http_request
from tests.conftest import FULL
from tests.server.sqs.conftest import Local

PUSHED_TWICE = "the SDK repeats a request that got no answer"


@pytest.fixture(scope="module")
def through_proxy():
    # The SDK would pause for up to a second before each repetition.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.01)
        yield from clients_of_endpoint()


def clients_of_endpoint():
    local = Local(None)
    parts: Any = urlsplit(local.url)
    url = "sqs://us-east-1?endpoint=http://127.0.0.1:{port}"
    with FaultyClients((parts.hostname, parts.port), http_request, url, local.clock) as clients:
        yield clients
    local.close()


class TestSqsUnderFaults(FaultContract):
    REQUESTS_MAX = None if FULL else 5
    FAULTS = PORTAL_FAULTS
    TWICE = dict.fromkeys(("push", "push many", "batch"), PUSHED_TWICE)

    @pytest.fixture
    def clients(self, through_proxy):
        return through_proxy
