"""Which tests of a parallel run stay together, and which come first."""

import pytest

from tests.conftest import JVM_OF_THEIR_OWN, LONGEST, group_of, rank_of
from tools.tidy import ROOT


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/spark/test_sink.py::test_a_row", "spark"),
        ("tests/spark/test_warm.py::test_a_session", "jvm"),
        ("tests/docs/test_documents.py::test_it[a::b]", "jvm"),
        ("tests/conformance/test_rabbitmq.py::TestIt::test_a", "rabbitmq"),
        ("tests/backends/rabbitmq/test_faults.py::test_a", "rabbitmq"),
        ("tests/server/console/test_browser.py::test_a", "console"),
        ("tests/core/test_due.py::test_it", "tests/core/test_due.py"),
        ("tests/server/test_x.py::TestIt::test_a[1]", "tests/server/test_x.py::TestIt"),
        ("tests/server/test_x.py::test_a[http://a::b]", "tests/server/test_x.py"),
    ],
)
def test_tests_that_share_fixtures_are_in_one_group(nodeid, group):
    assert group_of(nodeid) == group


def test_the_longest_groups_exist_and_come_first():
    assert rank_of("tests/spark/test_sink.py::test_a_row") == 0
    assert rank_of("tests/docs/test_make.py::test_it") == 1
    assert rank_of("tests/conformance/test_rabbitmq.py::test_a_row") == 2
    assert rank_of("tests/server/console/test_browser.py::test_a") == 3
    paths = [name.partition("::")[0] for name in LONGEST[4:]]
    assert [path for path in (*paths, *JVM_OF_THEIR_OWN) if not (ROOT / path).exists()] == []
    ranks = [rank_of(f"{name}::test_it") for name in (*LONGEST[4:], "tests/core/test_due.py")]
    assert ranks == [4, 5, 6, 7]
