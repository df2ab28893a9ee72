"""The parts that all benchmarks share: the ledger, the rounds, the ratios and the result."""

import json
import sys

import pytest

harness = pytest.importorskip("benchmarks.harness", reason="the source archive has no benchmarks")


def test_a_ledger_in_which_each_message_was_pulled_once_is_accepted():
    assert harness.check_ledger(["a", "b"], ["b", "a"]) is None


@pytest.mark.parametrize(
    ("pushed", "pulled"),
    [
        (["a", "b"], ["a"]),
        (["a"], ["a", "a"]),
        (["a", "b"], ["a", "a"]),
        (["a"], ["b"]),
        (["a", "a"], ["a", "a"]),
        ([None], [None]),
    ],
)
def test_a_message_that_was_lost_pulled_twice_or_never_pushed_voids_the_run(pushed, pulled):
    with pytest.raises(harness.Void):
        harness.check_ledger(pushed, pulled)


@pytest.mark.parametrize("answer", [False, None, ValueError("refused")])
def test_a_delete_that_deleted_nothing_voids_the_run(answer):
    with pytest.raises(harness.Void):
        harness.check_deletes([True, answer])


def test_a_void_run_ends_with_a_failure_and_no_figures(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench"])

    def lose_one():
        raise harness.Void("one was lost")

    with pytest.raises(SystemExit, match="VOID: one was lost") as ended:
        harness.run_benchmark(lose_one)
    assert ended.value.code != 0
    assert capsys.readouterr().out == ""


def test_a_benchmark_is_quick_on_request_and_keeps_its_own_options(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--events", "5"])
    monkeypatch.setenv("BENCHMARK_QUICK", "0")
    seen = []
    harness.run_benchmark(lambda: seen.append((harness.is_quick(), sys.argv[1:])), has_options=True)
    assert seen == [(True, ["--events", "5"])]


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("--evnets", 2)])
def test_help_and_an_unknown_option_measure_nothing(monkeypatch, capsys, word, status):
    monkeypatch.setattr(sys, "argv", ["bench", word])
    with pytest.raises(SystemExit) as ended:
        harness.run_benchmark(lambda: pytest.fail("measured"))
    assert ended.value.code == status
    shown = capsys.readouterr()
    assert "--quick" in shown.out + shown.err
    assert status == 0 or f"unrecognized arguments: {word}" in shown.err


def test_rounds_are_interleaved_and_every_other_one_runs_in_reverse_order():
    seen: list[str] = []

    def contestant(name):
        def run():
            seen.append(name)
            return len(seen)

        return run

    figures = harness.interleave(2, {"a": contestant("a"), "b": contestant("b")})
    assert seen == ["a", "b", "b", "a"]
    assert figures == {"a": [1, 4], "b": [2, 3]}


def test_a_ratio_is_the_median_of_the_ratios_within_each_round():
    assert harness.ratio([1, 20, 3], [2, 2, 3]) == 1


def test_a_target_may_be_a_minimum_or_a_maximum():
    assert harness.Target("speed", 0.3, 0.2).met
    assert not harness.Target("cost", 1.6, 1.5, at_least=False).met


def test_an_error_in_one_thread_is_raised():
    def fail(number):
        if number == 2:
            raise harness.Void("lost in a thread")

    with pytest.raises(harness.Void, match="thread"):
        harness.timed_in_threads(4, fail)


def test_the_last_line_is_the_whole_result_as_json(capsys):
    harness.finish("memory", [harness.Target("speed", 0.25, 0.2)], {"machine": "this one"})
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "bench": "memory",
        "targets": [{"name": "speed", "value": 0.25, "goal": 0.2, "met": True}],
        "machine": "this one",
    }
