"""Row 25: no message, whatever it holds, becomes code; only registered tasks run."""

import ast
import marshal
import os
import pickle
import re
from pathlib import Path

import pytest

from penstock.service import Push, Stats
from penstock.tasks.control import failed_tasks
from tools import tidy

ROOT = Path(tidy.__file__).parent.parent
MADE = "made-by-a-message"


class _Touch:
    """What a pickle can do: it calls any function when it is loaded."""

    def __reduce__(self):
        return os.system, (f"touch {MADE}",)


EXECUTABLE = {
    "pickle 0": pickle.dumps(_Touch(), 0),
    "pickle 5": pickle.dumps(_Touch(), 5),
    "marshal": marshal.dumps(compile(f"open({MADE!r}, 'w')", "x", "exec")),
    "source": f"open({MADE!r}, 'w')".encode(),
    "yaml": f"!!python/object/apply:os.system ['touch {MADE}']".encode(),
    "task": f'{{"task":"os.system","args":{{"command":"touch {MADE}"}}}}'.encode(),
    "argument": f'{{"task":"work","args":{{"name":"os.system(touch {MADE})"}}}}'.encode(),
    "step": b'{"task":"work","args":{"name":"x"},"then":[{"task":"os.system","args":{"command":'
    + f'"touch {MADE}"'.encode()
    + b'},"queue":"tasks","first":"x"}]}',
}


@pytest.mark.parametrize("protocol", ["pickle 0", "pickle 5"])
def test_the_pickles_of_these_tests_do_run_a_program_where_they_are_loaded(
    protocol, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pickle.loads(EXECUTABLE[protocol])
    assert os.listdir() == [MADE]


@pytest.mark.parametrize("kind", EXECUTABLE)
def test_a_message_that_holds_a_program_is_kept_as_failed_and_runs_nothing(
    app, kind, tmp_path, monkeypatch
):
    """Row 25: pickle, marshal, source and YAML in a body are only bytes."""
    monkeypatch.chdir(tmp_path)
    ran = []

    @app.task
    def work(name: str) -> str:
        ran.append(name)
        return name

    app.push(Push("tasks", EXECUTABLE[kind]))
    app.run_until_empty()
    assert os.listdir() == []
    assert app.service.execute(Stats("tasks")).messages == 0
    failed = app.run_steps(failed_tasks(["tasks"]))
    assert len(failed) == (0 if kind == "argument" else 1)
    assert len(ran) == (1 if kind in ("argument", "step") else 0)


# Modules that import by a computed name, or look a name up: who gives the name, in each.
IMPORTING = {
    "penstock/__init__.py": "names that are imported when they are used first",
    "penstock/cli/parser.py": "the table of commands",
    "penstock/cli/pipeline.py": "the table of commands",
    "penstock/functions/runner.py": "the handler that the command line names",
    "penstock/server/daemon.py": "uvloop, written in the source",
    "penstock/tasks/worker/options.py": "the command line of the worker",
    "penstock/testing/__init__.py": "names that are imported when they are used first",
    "penstock/url.py": "the table of URL schemes",
}
FIELDS = "names of fields, which are written in the source"
FLAGS = "names of command-line options, which are written in the source"
LOOKING_UP = {
    "penstock/__init__.py": "the same",
    "penstock/backends/engine/engine.py": FIELDS,
    "penstock/backends/mirror/target.py": FIELDS,
    "penstock/backends/rabbitmq/queues.py": FIELDS,
    "penstock/backends/redis/queues.py": FIELDS,
    "penstock/backends/sqs/client.py": "the actions of SQS, written in the source",
    "penstock/cli/__init__.py": FLAGS,
    "penstock/cli/inspect.py": FIELDS,
    "penstock/cli/lake/watch.py": FLAGS,
    "penstock/cli/push_from.py": FLAGS,
    "penstock/cli/queue_settings.py": FLAGS,
    "penstock/cli/serve.py": FLAGS,
    "penstock/cli/session.py": FLAGS,
    "penstock/cli/shop/clients.py": "the methods of a client, written in the source",
    "penstock/cli/show.py": FIELDS,
    "penstock/cli/tasks.py": FIELDS,
    "penstock/cli/worker.py": FIELDS,
    "penstock/consumer/options.py": FIELDS,
    "penstock/core/shard.py": FIELDS,
    "penstock/errors.py": "every error of that module",
    "penstock/functions/runner.py": "the handler that the command line names",
    "penstock/public.py": FIELDS,
    "penstock/server/frames/tcp.py": "constants of sockets, written in the source",
    "penstock/server/metrics.py": FIELDS,
    "penstock/server/reload.py": FIELDS,
    "penstock/server/sqs/endpoint.py": FIELDS,
    "penstock/server/sqs/home.py": FIELDS,
    "penstock/service.py": FIELDS,
    "penstock/settings.py": FIELDS,
    "penstock/tasks/options.py": FIELDS,
    "penstock/tasks/worker/options.py": "the command line of the worker",
    "penstock/testing/__init__.py": "names that are imported when they are used first",
    "penstock/wire/frames/bodies.py": FIELDS,
    "penstock/wire/sqs/attributes.py": FIELDS,
    "penstock/wire/sqs/errors.py": "every error of that module",
    "penstock/wire/sqs/query.py": FIELDS,
    "penstock/shared.py": FIELDS,
}
CODE_MODULES = {"importlib", "runpy", "code", "codeop", "imp", "pkgutil", "zipimport"}
# Of importlib, what loads no module.
HARMLESS = {"importlib.util.find_spec", "importlib.resources.files", "importlib.metadata"}


LOOKUPS = ("getattr", "setattr", "delattr", "globals", "locals", "vars")
WORDS = {*tidy.DANGEROUS_MODULES, *tidy.DANGEROUS_CALLS, *CODE_MODULES, *LOOKUPS} - {"compile"}
# To parse every module would take seconds; what is searched for is named in the text.
NAMED = re.compile(rf"\b({'|'.join(map(re.escape, sorted(WORDS)))})\b|(?<!re\.)\bcompile\(")


def imported_names(node):
    """`a.b` for `import a.b`, `a.b.c` for `from a.b import c`."""
    match node:
        case ast.Import(names=names):
            return {alias.name for alias in names}
        case ast.ImportFrom(module=str(module), names=names):
            return {f"{module}.{alias.name}" for alias in names}
    return set()


def computed_lookup(node):
    """Whether the node looks up a name that is not written in the source."""
    match node:
        case ast.Call(func=ast.Name(id="getattr" | "setattr" | "delattr"), args=[_, name, *_]):
            return not isinstance(name, ast.Constant)
        case ast.Call(func=ast.Name(id="globals" | "locals")):
            return True
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=name):
            return not isinstance(name, ast.Constant)
    return False


def test_no_code_of_the_package_loads_code_that_a_message_could_name():
    """Row 25: pickle, marshal, eval, unsafe YAML, import or getattr named by a message: 0."""
    dangerous: list[tidy.Offence] = []
    importing, looking_up = set(), set()
    paths = sorted((ROOT / "src").rglob("*.py"))
    assert len(paths) > 200
    for path in paths:
        text = path.read_text()
        if not NAMED.search(text):
            continue
        dangerous += tidy.dangerous_code(path.relative_to(ROOT).as_posix(), text)
        name = path.relative_to(ROOT / "src").as_posix()
        for node in tidy.nodes_of(text):
            for found in imported_names(node):
                if found.partition(".")[0] in CODE_MODULES and found not in HARMLESS:
                    importing.add(name)
            if computed_lookup(node):
                looking_up.add(name)
    assert dangerous == []
    assert importing == set(IMPORTING)
    assert looking_up == set(LOOKING_UP)
