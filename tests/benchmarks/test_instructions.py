"""The counting of instructions: a run in which nothing was counted is void."""

import pytest

instructions = pytest.importorskip(
    "benchmarks.instructions", reason="the source archive has no benchmarks"
)


def test_the_instructions_are_read_from_what_callgrind_wrote(tmp_path):
    path = tmp_path / "counted.1"
    path.write_text("version: 1\nevents: Ir\nfn=(1) main\n0 12\n\ntotals: 313457\n")
    assert instructions._collected(path) == 313_457


@pytest.mark.parametrize("text", ["", "totals: 0\n", "summary: 12\n"])
def test_a_run_without_instructions_is_void(tmp_path, text):
    path = tmp_path / "counted.2"
    path.write_text(text)
    with pytest.raises(instructions.Void, match=r"nothing in counted\.2"):
        instructions._collected(path)
