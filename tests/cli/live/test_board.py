"""The rows of `penstock top`: rates, the last hour, the order and the sentence above."""

import pytest

from penstock.cli.live.board import DELETED, PUSHED, Board, age, few, rate, spark

AT_MS = 1_800_000_000_000


def queue(name, level=0, why="", counts=(0, 0, 0, 0, 0), visible=0, **more):
    return {
        "name": name, "visible": visible, "delayed": 0, "in_flight": 0, "bytes": 0,
        "oldest_at_ms": None, "waiting": 0, "since_ms": AT_MS - 3_600_000, "level": level,
        "why": why, "counts": None if counts is None else list(counts), **more,
    }  # fmt: skip


def board_of(*rows, error="", lacking=None):
    board = Board()
    board.load({
        "at_ms": AT_MS, "point_ms": 60_000, "points": 60, "queues": list(rows),
        "lacking": lacking or {}, "error": error,
    })  # fmt: skip
    return board


def change(at_ms, *rows, **more):
    return {"at_ms": at_ms, "queues": list(rows), **more}


def test_rates_are_differences_of_counts_over_ten_seconds():
    board = board_of(queue("a"))
    for second in range(1, 31):
        counted = queue("a", counts=(5 * second, 0, second, 0, 0))
        board.change(change(AT_MS + 1_000 * second, counted))
    row = board.rows["a"]
    assert row.per_s(PUSHED, board.at_ms) == 5
    assert row.per_s(DELETED, board.at_ms) == 1


def test_until_it_has_looked_for_some_seconds_rates_are_those_of_the_last_minute():
    board = board_of(queue("a", counts=(100, 0, 0, 0, 0), minute=[120, 0, 0, 0, 0]))
    assert board.rows["a"].per_s(PUSHED, AT_MS) == 2


def test_counts_that_begin_anew_are_not_less_than_nothing():
    board = board_of(queue("a", counts=(1_000, 0, 0, 0, 0)))
    board.change(change(AT_MS + 1_000, queue("a", counts=(3, 0, 0, 0, 0))))
    assert board.rows["a"].per_s(PUSHED, board.at_ms) == 0


def test_a_store_that_does_not_count_has_no_rates():
    board = board_of(queue("a", counts=None))
    assert rate(board.rows["a"].per_s(PUSHED, AT_MS)) == "?"
    assert board.totals() == "1 queue · 0 messages"


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([], ("good", "No queues yet.", "penstock create orders makes one.")),
        ([queue("a")], ("good", "Nothing is stuck.", "All 1 queue moves or is empty.")),
        ([queue("a"), queue("b", 1)], ("warn", "Nothing is stuck.", "To look at: b")),
        ([queue("a", 2), queue("b", 1)], ("bad", "1 queue is stuck.", "a · To look at: b")),
        (
            [queue(str(n), 2) for n in range(5)],
            ("bad", "5 queues are stuck.", "0, 1, 2 and 2 more"),
        ),
        (
            [queue("a", dead_letter="b"), queue("b", 1, visible=2)],
            ("warn", "Nothing is stuck.", "2 dead letters"),
        ),
    ],
)  # fmt: skip
def test_one_sentence_says_whether_anything_is_stuck(rows, verdict):
    assert board_of(*rows).verdict() == verdict


def test_an_error_of_the_store_is_the_sentence():
    assert board_of(queue("a"), error="lost").verdict() == (
        "bad", "The store does not answer.", "lost",
    )  # fmt: skip


def test_the_orders_are_those_of_the_console():
    board = board_of(
        queue("a", visible=1, oldest_at_ms=AT_MS - 5, dead_letter="d"),
        queue("b", 2, visible=3, oldest_at_ms=AT_MS - 9),
        queue("c", 1, visible=2),
        queue("d", visible=9, minute=[60, 0, 0, 0, 0]),
    )
    orders = {}
    for board.sort in ("attention", "name", "depth", "age", "rate"):
        orders[board.sort] = "".join(row.name for row in board.shown())
    assert orders == {
        "attention": "bca", "name": "abcd", "depth": "dbca", "age": "bacd", "rate": "dabc",
    }  # fmt: skip
    board.sort, board.search = "attention", "D"
    # A dead-letter queue has a row of its own when it is searched for.
    assert [row.name for row in board.shown()] == ["d"]
    assert board.dead(board.rows["a"]) == "9"
    assert board.dead(board.rows["b"]) == "–"


def test_queues_that_are_gone_leave_and_new_ones_come():
    board = board_of(queue("a"), queue("b"))
    board.change(change(AT_MS + 1, queue("c"), gone=["a"]))
    assert sorted(board.rows) == ["b", "c"]


def test_the_last_hour_moves_on_by_itself():
    board = board_of(queue("a", visible=5, line=[0] * 59 + [5]))
    row = board.rows["a"]
    row.pass_time(AT_MS + 120_000)
    assert row.line[-4:] == [0, 5, 5, 5]
    board.change(change(AT_MS + 121_000, queue("a", visible=9)))
    assert row.line[-2:] == [5, 9]


def test_nothing_is_drawn_for_a_time_of_which_nothing_is_known():
    board = board_of(queue("a", visible=4, since_ms=AT_MS - 120_000))
    assert board.rows["a"].line == [None] * 57 + [4] * 3
    assert spark(board.rows["a"].line, 20) == " " * 19 + "█"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (few(9_999), "9,999"), (few(12_345), "12k"), (few(1_234_567), "1.2M"),
        (few(3 * 10**9), "3G"),
        (rate(0), "–"), (rate(12.4), "12/s"), (rate(2.04), "2/s"), (rate(0.5), "30/m"),
        (rate(0.001), "<1/m"), (age(None, AT_MS), "–"), (age(AT_MS - 59_000, AT_MS), "59s"),
        (age(AT_MS - 90_000, AT_MS), "1.5m"), (age(AT_MS - 36_000_000, AT_MS), "10h"),
        (age(AT_MS + 5, AT_MS), "0s"),
    ],
)  # fmt: skip
def test_figures_are_short_enough_for_their_columns(shown, text):
    assert shown == text
    assert len(shown) <= 6
