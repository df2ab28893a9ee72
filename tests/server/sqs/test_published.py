"""The published checks of Amazon SQS's rules, of our own endpoint on every kind of store."""

import pytest

from penstock.testing.sqs import CHECKS, CheckedServer, Failed, run_check

# What Amazon documents and our endpoint does not keep, with the reason.
DIFFERENT = {
    "an_attempt_id_is_kept_for_five_minutes": (
        "an attempt id is valid for as long as the claims of its receive, which may be longer"
    ),
}


@pytest.fixture(scope="module", params=["json", "query"])
def protocol(request):
    return request.param


@pytest.fixture(scope="module")
def target(plain, protocol):
    """The checks make queues of their own, so that all of one store can share a server."""

    def advance(seconds):
        plain.clock.advance(seconds=seconds)

    target = CheckedServer(plain.url, protocol, advance=advance, texts=True)
    yield target
    target.close()


@pytest.mark.parametrize("name", CHECKS)
def test_the_endpoint_keeps_a_rule_of_amazon_sqs(target, name):
    if name in DIFFERENT:
        with pytest.raises(Failed):
            run_check(CHECKS[name], target)
    else:
        run_check(CHECKS[name], target)
