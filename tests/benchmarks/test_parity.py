"""The pages about parity are those that the results of the last run give."""

import re

import pytest

from penstock.testing.sqs import CHECKS

parity_pages = pytest.importorskip(
    "benchmarks.parity_pages", reason="the source archive has no benchmarks"
)
FOUND = parity_pages.load()
PAGES = parity_pages.pages(FOUND)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_what_the_results_give(path):
    assert path.read_text() == PAGES[path], "run: make parity ARGS=--pages"


def test_every_check_is_a_row_of_one_page():
    rows = [
        row
        for path in parity_pages.ROWS
        for row in re.findall(r"^\| (\w[^|]*) \|(?: [-+JQ·] \|)+$", PAGES[path], re.MULTILINE)
    ]
    assert sorted(rows) == sorted(each.sentence for each in CHECKS.values())


def test_every_check_has_a_result_of_every_server_over_both_protocols():
    for name, server in FOUND["servers"].items():
        assert set(server["checks"]) == set(CHECKS), name
        assert all(set(each) == {"json", "query"} for each in server["checks"].values()), name


def test_the_generated_parts_of_other_pages_are_there():
    sqs, readme = (path for path in PAGES if path.name in ("sqs.md", "README.md"))
    block = PAGES[sqs].partition(parity_pages.BEGIN)[2].partition(parity_pages.END)[0]
    assert "| rules that hold |" in block
    assert parity_pages.readme_row(FOUND) in PAGES[readme]


def result(**status):
    return {"checks": {"a": {over: {"status": each} for over, each in status.items()}}}


@pytest.mark.parametrize(
    ("found", "sign"),
    [
        (result(json="passed", query="passed"), "+"),
        (result(json="passed", query="failed"), "J"),
        (result(json="not run", query="passed"), "Q"),
        (result(json="failed", query="failed"), "-"),
        (result(json="not run", query="not run"), "·"),
    ],
)
def test_a_cell_says_over_which_protocols_a_rule_holds(found, sign):
    assert parity_pages.cell(found, "a") == sign
