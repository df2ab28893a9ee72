"""The report's page shows what the tables hold, in a real browser, and runs no foreign script."""

import pytest

pytest.importorskip("pyspark", reason="service not installed: penstock[spark]")

import json
import re
import runpy
import sys

import duckdb
from deltalake import DeltaTable

import penstock
from penstock import cli
from penstock.clock import ManualClock
from penstock.core.events import AnyEvent, Claimed, Pushed, QueueCreated
from penstock.service import QueueSettings
from penstock.spark.audit import audit
from penstock.spark.bronze import ingest
from penstock.spark.lake import Lake
from penstock.spark.progress import StepStatus
from penstock.spark.report import LINES_MAX, make_report, read_current, render, step_ms
from tests.browser import Browser
from tests.server.conftest import until
from tests.spark.conftest import watched_steps
from tests.spark.journals import write_store
from tests.spark.shop import QueueUse, make_store
from tools.tidy import ROOT

pytestmark = [
    pytest.mark.service("default-jre-headless"),
    pytest.mark.service("chromium"),
    pytest.mark.service("chromium-driver"),
    # Making the lake takes a minute, and several on a busy machine.
    pytest.mark.timeout(600),
]
T = 1_789_459_200_000
EVIL = "</script><script>document.title='run'</script><img src=x onerror=document.title='run'>"


@pytest.fixture(scope="module")
def lake(spark, tmp_path_factory):
    """A lake of two journals: half an hour of a shop, and one whose claims overlap."""
    root = tmp_path_factory.mktemp("report")
    many = [QueueUse(f"extra-{n}", 0.05, 1, 100, {}, ["one", "two"]) for n in range(4)]
    shop = make_store(root / "shop", hours=0.5, more=many)
    evil = write_store(
        root / "evil",
        [
            [QueueCreated(T, 1, EVIL, QueueSettings())],
            [Pushed(T, 1, 1, b"", group=EVIL), Claimed(T, 1, 1, 1, T + 30_000, holder=EVIL)],
            [Claimed(T, 1, 1, 2, T + 30_000, holder=EVIL)],
        ],
    )
    stores = ["--journal", str(shop), "--journal", str(evil)]
    assert cli.main(["pipeline", "run", *stores, "--lake", str(root / "lake")]) == 0
    return root / "lake"


PROGRESS: list[StepStatus] = []


@pytest.fixture(scope="module")
def page(lake):
    page = lake.parent / "report.html"
    with watched_steps() as shown:
        assert cli.main(["pipeline", "report", "--lake", str(lake), "--output", str(page)]) == 0
    PROGRESS.extend(shown)
    return page


def test_a_report_shows_its_progress_section_by_section(page):
    names = list(dict.fromkeys(each.name for each in PROGRESS))
    assert names[-1] == "report"
    assert "audit" in names
    parts = [each.part for each in PROGRESS if each.name == "report" and each.part is not None]
    assert parts == sorted(parts)
    assert parts[0] == 0
    assert len(set(parts)) > 6


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def data_of(page):
    """The figures a page holds."""
    [data] = re.findall('id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(data)


def rows(lake, table, query):
    found = DeltaTable(str(lake / table)).to_pyarrow_table()
    assert found is not None
    return duckdb.sql(query.format(table="found", label="store[:8] || '/' || queue")).fetchall()


def shown(browser, page):
    browser.open(page)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


def test_the_page_shows_what_the_tables_hold(lake, page, browser):
    shown(browser, page)
    columns = "messages, visible, delayed, in_flight, oldest_age_ms, pushed, deleted, expired"
    query = f"SELECT {{label}}, {columns} FROM {{table}} ORDER BY 1"
    found = browser.run(
        """return [...document.querySelectorAll("#queues tbody tr")].map(row =>
             arguments[0].map(key => row.querySelector(`[data-key="${key}"]`).dataset.value))""",
        ["queue", *columns.split(", ")],
    )
    expected = [
        ["" if value is None else str(value) for value in row]
        for row in rows(lake, "queue_status", query)
    ]
    assert sorted(found) == sorted(expected)
    assert len(found) == 15

    states = dict(rows(lake, "messages", "SELECT state, count(*) FROM {table} GROUP BY 1"))
    figures = dict(
        browser.run("""return [...document.querySelectorAll("[data-figure]")].map(
        each => [each.dataset.figure, each.title])""")
    )
    assert figures["deleted"] == f"{states['deleted']:,}"
    assert figures["pushed"] == f"{sum(states.values()):,}"

    query = """SELECT {label}, samples, p50_ms, p99_ms FROM {table}
        WHERE measure = 'hold' ORDER BY samples DESC, 1 LIMIT 1"""
    [(name, samples, p50_ms, p99_ms)] = rows(lake, "latency", query)
    browser.run("document.querySelectorAll('#measures button')[1].click()")
    first = browser.texts("#latency tbody tr:first-child td")
    assert first[:2] == [name, f"{samples:,}"]
    assert [seconds(first[3]), seconds(first[5])] == [
        pytest.approx(p50_ms / 1_000, rel=0.05), pytest.approx(p99_ms / 1_000, rel=0.05)
    ]  # fmt: skip

    busy = dict(rows(lake, "hot_queues", "SELECT {label}, sum(events) FROM {table} GROUP BY 1"))
    for row in data_of(page)["hot_queues"]["rows"]:
        assert row["total"] == sum(row["cells"]) == busy[row["name"]]
    assert "and 3 more" in browser.texts("#hot-queues .more")


def seconds(text):
    """A duration as the page writes it."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600}
    return sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+) (ms|s|m|h)", text))


def test_depth_and_age_over_time_agree_with_the_tables(lake, page):
    data = data_of(page)
    axis = data["time"]
    assert axis["step_ms"] == step_ms(axis["to_ms"] - axis["first_ms"], 240)
    query = "SELECT {label}, messages, oldest_age_ms FROM {table}"
    ends = {name: (held, age) for name, held, age in rows(lake, "queue_status", query)}
    query = "SELECT {label}, epoch_ms(minute) + 60000, messages FROM {table}"
    minutes = {(name, at_ms): held for name, at_ms, held in rows(lake, "depth", query)}
    compared = 0
    assert len(data["depth"]) == LINES_MAX + 1
    for series in data["depth"][:-1]:
        held, age_ms = series["messages"], series["age_ms"]
        assert (held[-1], age_ms[-1]) == ends[series["queue"]]
        for at, messages in enumerate(held):
            end_ms = axis["from_ms"] + (at + 1) * axis["step_ms"]
            if (series["queue"], end_ms) in minutes:
                compared += 1
                assert messages == minutes[series["queue"], end_ms]
    assert compared > 50
    others = data["depth"][-1]
    drawn = {series["queue"] for series in data["depth"]}
    assert others["others"] == len({name for name, _ in minutes}) - LINES_MAX
    assert others["messages"][-1] == sum(n for name, (n, _) in ends.items() if name not in drawn)


def test_an_empty_lake_has_an_empty_page(spark, browser, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(make_report(spark, Lake.open(tmp_path / "lake", create=True))[0])
    shown(browser, page)
    assert browser.texts("#verdict strong") == ["Every check holds"]
    assert browser.texts("#span") == ["No events yet"]
    assert browser.texts("#figures b") == ["0"] * 6
    assert browser.texts("#depth .empty") == ["Nothing happened yet."]


def test_a_page_is_current_only_while_its_lake_has_nothing_else(spark, tmp_path):
    two_claims: list[list[AnyEvent]] = [
        [QueueCreated(T, 1, "q", QueueSettings())],
        [Pushed(T, 1, 1, b""), Claimed(T, 1, 1, 1, T + 30_000)],
        [Claimed(T, 1, 1, 2, T + 30_000)],
    ]
    store = write_store(tmp_path / "store", two_claims)
    lake = Lake.open(tmp_path / "lake", create=True)
    ingest(lambda: spark, lake, str(store))
    page = tmp_path / "page.html"
    assert read_current(lake, page) is None
    made, summary = make_report(spark, lake)
    page.write_text(made)
    assert read_current(lake, page) == summary
    assert (summary.events, summary.failed) == (4, ["one holder"])
    # Of a lake that has the same tables, and what is no report or only the beginning of one.
    other = Lake(lake.path, "0" * 16)
    assert read_current(other, page) is None
    for text in ("", made.replace("&quot;events", "&quot;event"), made[: made.index("&quot;ev")]):
        page.write_text(text)
        assert read_current(lake, page) is None
    page.write_text(made)
    write_store(store, [[Pushed(T, 1, 2, b"")]])
    ingest(lambda: spark, lake, str(store))
    assert read_current(lake, page) is None
    assert audit(lambda: spark, lake).events == 5
    assert read_current(lake, page) is None


def test_a_redriven_dead_letter_counts_once_by_its_last_holder(spark, tmp_path):
    """It died twice in the hands of two workers, and was deleted in the end."""
    store = tmp_path / "store"
    clock = ManualClock()
    with penstock.connect(f"file:{store}?embedded=1", clock=clock) as queues:
        queues.create("dead")
        queues.create("orders", dead_letter="dead", max_receives=1)
        queues.push("orders", b"x")
        for holder in ("first", "second"):
            [claim] = queues.pull_many("orders", 1, holder=holder)
            queues.release(claim)
            queues.redrive("dead", to="orders")
            clock.advance(seconds=1)
        [claim] = queues.pull_many("orders", 1)
        queues.delete(claim)
    lake = Lake.open(tmp_path / "lake", create=True)
    ingest(lambda: spark, lake, str(store))
    page = tmp_path / "report.html"
    page.write_text(make_report(spark, lake)[0])
    data = data_of(page)
    [pulled] = data["redelivery"]["claims"]
    assert (pulled["messages"], pulled["deleted"], pulled["dead"]) == (1, 1, 0)
    [died] = data["dead_letters"]["queues"]
    assert (died["queue"], died["messages"], died["released"]) == ("orders", 1, 1)
    assert data["dead_letters"]["holders"] == [{"holder": "second", "messages": 1}]
    moves = DeltaTable(str(lake.path / "dead_letters")).to_pyarrow_table().sort_by("at_ms")
    assert moves["last_holder"].to_pylist() == ["first", "second"]
    [orders] = [row for row in data["queues"]["rows"] if row["queue"] == "orders"]
    assert orders["dead_letters"] == 1
    assert {row["holder"] for row in data["redelivery"]["holders"]} == {"first", "second"}


def test_findings_of_the_audit_are_at_the_top(page, browser):
    shown(browser, page)
    assert browser.texts("#verdict strong") == ["1 of 19 checks failed"]
    [finding] = browser.texts("#verdict .finding")
    assert finding.startswith("one holder ")
    [message_id] = re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", finding)
    assert message_id.endswith("000000000001")
    assert "Claimed claim 2" in finding


def test_no_text_of_a_lake_is_executed_by_the_browser(page, browser, tmp_path):
    """Row 29: neither the texts of messages nor those that the pipeline makes of them."""

    def spoil(part):
        if isinstance(part, dict):
            return {name: spoil(each) for name, each in part.items()}
        if isinstance(part, list):
            return [spoil(each) for each in part]
        return EVIL + part if isinstance(part, str) else part

    spoilt = tmp_path / "spoilt.html"
    spoilt.write_text(render(spoil(data_of(page))))
    for each in (page, spoilt):
        shown(browser, each)
        assert browser.run("return document.scripts.length") == 2
        assert browser.run("return document.images.length") == 0
        assert browser.run("return document.title") != "run"
        assert any(EVIL in name for name in browser.texts("#queues td:first-child"))
    # The content security policy is the second defence: an injected script would not run.
    browser.run("""const made = document.createElement("script");
        made.textContent = "document.title = 'run'"; document.body.append(made)""")
    assert browser.run("return document.title") != "run"
    assert "Content Security Policy" in browser.complaints()[0]


def test_light_and_dark_follow_the_system_until_one_is_chosen(page, browser):
    paper = "return getComputedStyle(document.body).backgroundColor"
    browser.prefer("light")
    shown(browser, page)
    light = browser.run(paper)
    browser.prefer("dark")
    dark = browser.run(paper)
    assert dark != light
    # The page gets the event after the style has changed.
    until(lambda: browser.texts("#theme") == ["Light"])
    browser.run("document.getElementById('theme').click()")
    assert browser.run(paper) == light
    shown(browser, page)
    assert browser.run(paper) == light
    browser.run("document.getElementById('theme').click(); localStorage.clear()")
    assert browser.run(paper) == dark


def test_charts_can_be_read_with_the_keyboard(page, browser):
    shown(browser, page)
    press = """const node = document.querySelector(arguments[0]); node.focus();
        node.dispatchEvent(new KeyboardEvent("keydown", {key: arguments[1]}))"""
    data = data_of(page)
    browser.run(press, "#depth .card", "End")
    lines = browser.texts("#tip div")
    assert len(lines) == len(data["depth"])
    series = data["depth"][0]
    assert f"{series['queue']}{series['messages'][-1]:,}" in lines
    browser.run(press, "#depth .card", "Escape")
    assert browser.run("return document.getElementById('tip').hidden")
    browser.run(press, "#hot-queues .card", "ArrowRight")
    row = data["hot_queues"]["rows"][0]
    assert browser.texts("#tip b") == [row["name"]]
    assert browser.texts("#tip div span:last-child") == [f"{row['cells'][0]:,}"]
    # A line that is hidden is gone from the chart, and comes back.
    count = "return document.querySelectorAll('#depth .curve').length"
    assert browser.run(count) == len(data["depth"])
    browser.run("document.querySelector('#depth .legend button').click()")
    assert browser.run(count) == len(data["depth"]) - 1


def test_the_example_of_an_analysis_runs_on_any_lake(spark, lake, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["analysis.py", str(lake)])
    found = runpy.run_path(str(ROOT / "examples" / "analysis.py"))
    claims = sum(row["claims"] for row in found["workers"].collect())
    assert [(claims,)] == rows(lake, "attempts", "SELECT count(*) FROM {table}")
    assert "p99_hold_ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            ["--output", "nowhere/report.html"],
            2,
            "--output: 'nowhere/report.html' cannot be written",
        ),
        (["--output", "."], 2, "--output: '.' cannot be written"),
        (["--output", "report.html", "--lake", "."], 6, ".: is not a Penstock lake"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(
    lake, tmp_path, monkeypatch, capsys, words, status, said
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pipeline", "report", "--lake", str(lake), *words]) == status
    assert capsys.readouterr().err.startswith(f"penstock: {said}")
    assert list(tmp_path.iterdir()) == []


def test_the_steps_of_an_axis_are_round_and_few():
    for span_ms in (0, 1, 59_999, 3_600_000, 86_400_000, 400 * 86_400_000):
        step = step_ms(span_ms, 240)
        assert span_ms // step + 1 <= 240
        assert 86_400_000 % step == 0 or step % 86_400_000 == 0
