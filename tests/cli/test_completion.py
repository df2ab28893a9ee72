"""The scripts of `penstock completion`, in the shells that they are for."""

import os
import shlex
import subprocess

import pytest

import penstock
from penstock.cli.parser import COMMANDS
from tests.cli.conftest import EXECUTABLE

BASH = """
eval "$(penstock completion bash)"
while IFS= read -r line; do
    COMP_LINE=$line COMP_POINT=${#line} COMPREPLY=()
    _penstock
    echo "${COMPREPLY[*]}"
done
"""
FISH = """
penstock completion fish | source
while read -l line
    echo (complete -C $line | string replace -r '\\t.*' '')
end
"""
ZSH = """
autoload -Uz compinit && compinit -u -D
eval "$(penstock completion zsh)"
# Completion works in the line editor only; here its functions say what they were given.
compadd() { [[ $1 == -- ]] && shift; print -rn -- "${(@M)@:#$PREFIX*} " }
_describe() {
    local -a all=("${(@P)@[-1]}")
    all=("${(@)all%%:*}")
    print -rn -- "${(@M)all:#$PREFIX*} "
}
_files() { print -rn -- FILES }
while IFS= read -r line; do
    words=(${(s: :)line}); [[ $line == *' ' ]] && words+=('')
    CURRENT=$#words PREFIX=$words[-1]
    _penstock
    print
done
"""
SHELLS = {
    "bash": ["bash", "--norc", "-c", BASH],
    "fish": ["fish", "--no-config", "-c", FISH],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "shop"
    with penstock.connect(f"file:{path}?embedded=1") as queues:
        for name in ("orders", "orders-dead", "mail"):
            queues.create(name)
    return f"file:{path}"


@pytest.fixture(
    params=["bash", pytest.param("fish", marks=pytest.mark.service("fish"))], ids=["bash", "fish"]
)
def complete(request, tmp_path):
    def ask(*lines):
        path = f"{EXECUTABLE.parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            SHELLS[request.param],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True, text=True, timeout=60, check=True,
            cwd=tmp_path, env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
        )  # fmt: skip
        return [sorted(line.split()) for line in done.stdout.splitlines()]

    return ask


def test_commands_actions_options_and_choices_are_completed(complete, tmp_path):
    (tmp_path / "orders.jsonl").touch()
    assert complete(
        "penstock pu",
        "penstock --json pu",
        "penstock daemon st",
        "penstock peek --st",
        "penstock peek orders --state d",
        "penstock pipeline audit --la",
        "penstock push q --from or",
        "penstock completion ",
    ) == [
        ["pull", "purge", "push"],
        ["pull", "purge", "push"],
        ["status", "stop"],
        ["--state"],
        ["delayed"],
        ["--lake"],
        ["orders.jsonl"],
        ["bash", "fish", "zsh"],
    ]


def test_names_of_queues_are_those_of_the_store_in_the_line(complete, url):
    assert complete(
        f"penstock --url {url} peek o",
        f"penstock peek --url {url} m",
        f"penstock redrive orders-dead --url {url} --to m",
        # A store whose path is a word of the commands is not taken for one.
        "penstock --url file:list pee",
    ) == [["orders", "orders-dead"], ["mail"], ["mail"], ["peek"]]


@pytest.mark.parametrize(
    "shell",
    [
        "bash",
        pytest.param("fish", marks=pytest.mark.service("fish")),
        pytest.param("zsh", marks=pytest.mark.service("zsh")),
    ],
)
def test_every_command_is_in_the_script_and_the_shell_can_read_it(run_main, shell, tmp_path):
    done = run_main("completion", shell)
    assert all(command in done.out for command in COMMANDS)
    (tmp_path / "script").write_text(done.out)
    checked = subprocess.run(
        [shell, "-n", str(tmp_path / "script")], capture_output=True, check=True
    )
    assert checked.stderr == b""


@pytest.mark.service("zsh")
def test_zsh_is_given_the_same_words(url, tmp_path):
    lines = ["penstock pu", "penstock daemon st", "penstock peek q --state d",
             f"penstock --url {url} peek o", "penstock push q --from x"]  # fmt: skip
    path = f"{EXECUTABLE.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["zsh", "-f", "-c", ZSH], input="".join(f"{line}\n" for line in lines),
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert [sorted(line.split()) for line in done.stdout.splitlines()] == [
        ["pull", "purge", "push"],
        ["status", "stop"],
        ["delayed"],
        ["orders", "orders-dead"],
        ["FILES"],
    ]


def test_an_unknown_shell_is_a_mistake_that_names_the_known_ones(run_main):
    done = run_main("completion", "fisch")
    assert "fisch is none of bash, fish, zsh; did you mean fish?" in done.err
    assert done.status == 2
    assert shlex.split(done.out) == []
