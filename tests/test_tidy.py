"""Each style rule can fail; `make test` applies them to the tree."""

import pytest

from tools import tidy

SRC = "src/penstock/example.py"
TEST = "tests/test_example.py"
DOC = "docs/example.md"


def offences_of(rule, path, text):
    return [offence.text for offence in rule(path, text)]


def test_every_file_that_git_tracks_is_looked_at():
    assert {"pyproject.toml", "src/penstock/__init__.py", TIDY} <= set(tidy.files())


TIDY = "tests/test_tidy.py"

BAD = [
    (tidy.banned_identifiers, SRC, "def next_job(): ..."),
    (tidy.banned_identifiers, SRC, "class JobQueue: ..."),
    (tidy.banned_identifiers, SRC, "def push(lease_ms): ..."),
    (tidy.banned_identifiers, SRC, "acks = 0"),
    (tidy.banned_identifiers, SRC, "self.record = 1"),
    (tidy.banned_identifiers, SRC, "for handle in things: ..."),
    (tidy.banned_identifiers, SRC, "import logging as log"),
    (tidy.banned_identifiers, SRC, "class QueueManager: ..."),
    (tidy.banned_identifiers, SRC, "class WALWriter: ..."),
    (tidy.banned_identifiers, SRC, "with open(path) as log: ..."),
    (tidy.banned_identifiers, "src/penstock/journal/record.py", ""),
    (tidy.banned_prose, DOC, "The lease ends after 30 seconds."),
    (tidy.banned_prose, DOC, "# Jobs"),
    (tidy.banned_prose, DOC, "Write it to the WAL first."),
    (tidy.empty_names, "src/penstock/utils.py", ""),
    (tidy.empty_names, SRC, "class BaseQueue: ..."),
    (tidy.unfinished_marks, SRC, "x = 1  # TODO: two"),
    (tidy.unfinished_marks, DOC, "FIXME"),
    (tidy.unfinished_marks, TEST, "# XXX"),
    (tidy.long_functions, SRC, "def f():\n" + "    x = 1\n" * 70),
    (tidy.long_functions, TEST, "class T:\n  async def f():\n" + "    x = 1\n" * 70),
    (tidy.long_modules, SRC, "x = 1\n" * 601),
    (tidy.long_modules, SRC, '"""What it is.\n\nIt is long.\n"""\n' + "x = 1\n" * 601),
    (tidy.long_modules, TEST, "x = 1\n" * 801),
    (tidy.banner_comments, SRC, "# ----------\n"),
    (tidy.banner_comments, SRC, "# ==== pushing ====\n"),
    (tidy.banner_comments, SRC, "x = 1\n    ##########\n"),
    (tidy.banner_comments, SRC, "# pushing ----------\n"),
    (tidy.module_docstrings, SRC, "x = 1"),
    (tidy.module_docstrings, SRC, '"""Queue"""'),
    (tidy.module_docstrings, SRC, '"""What may be pulled next"""'),
    (tidy.module_docstrings, SRC, '"""what may be pulled next."""'),
    (tidy.commanding_docstrings, SRC, 'def f():\n    """Return the name."""'),
    (tidy.prints, SRC, "print('hello')"),
    (tidy.prints, SRC, "def f():\n    breakpoint()"),
    (tidy.prints, "src/penstock/cli/__init__.py", "print('hello')"),
    (tidy.prints, SRC, "sys.stderr.write(text)"),
    (tidy.prints, SRC, "log = logging.getLogger('penstock.engine')"),
    (tidy.dangerous_code, SRC, "import pickle"),
    (tidy.dangerous_code, SRC, "from marshal import loads"),
    (tidy.dangerous_code, SRC, "import shelve as s"),
    (tidy.dangerous_code, SRC, "eval(body)"),
    (tidy.dangerous_code, SRC, "exec(body)"),
    (tidy.dangerous_code, SRC, "yaml.load(body)"),
    (tidy.dangerous_code, SRC, "yaml.unsafe_load(body)"),
    (tidy.build_output, "src/penstock/__pycache__/queue.cpython-311.pyc", ""),
    (tidy.build_output, "src/penstock.egg-info/PKG-INFO", ""),
    (tidy.build_output, "dist/penstock-0.1.0-py3-none-any.whl", ""),
    (tidy.machine_paths, DOC, "ReadRegister in /root/.cache for it."),
    (tidy.machine_paths, DOC, "cd /home/anna/penstock"),
    (tidy.machine_paths, SRC, 'path = "/work/main/data"'),
    (tidy.machine_paths, "pyproject.toml", 'url = "https://files.pythonhosted.org/x"'),
    (tidy.machine_paths, "Makefile", "pip install --extra-index-url $(HOST) x"),
    (tidy.test_names, TEST, "def test_push(): ..."),
    (tidy.private_imports, TEST, "from penstock.cluster.router import Router, _pushed_back"),
    (tidy.test_names, TEST, "class TestX:\n    async def test_push_works(self): ..."),
    (tidy.sleeps, TEST, "def test_a_b_c():\n    time.sleep(1)"),
    (tidy.sleeps, TEST, "async def test_a_b_c():\n    await asyncio.sleep(0.1)"),
    (tidy.sleeps, TEST, "def f():\n    def g():\n        sleep(seconds)"),
    (tidy.dropped_errors, SRC, "try:\n    f()\nexcept PenstockError:\n    g()"),
    (
        tidy.dropped_errors,
        SRC,
        "try:\n    f()\nexcept (errors.PenstockError, OSError) as e:\n    g()",
    ),
    (tidy.opened_files, SRC, "open('x')"),
    (tidy.opened_files, SRC, "os.open(path, os.O_RDONLY)"),
    (tidy.opened_files, SRC, "path.open('ab')"),
    (tidy.opened_files, SRC, "(root / 'x').write_text('x')"),
    (tidy.opened_files, SRC, "root.mkdir(parents=True)"),
    (tidy.dropped_errors, SRC, "with suppress(PenstockError, TimeoutError):\n    f()"),
    (tidy.idle_permissions, tidy.SLEEPS, "tests/test_gone.py::test_a: it had to"),
    (tidy.idle_permissions, tidy.DROPPED_ERRORS, "src/penstock/errors.py::error_class: no"),
]

GOOD = [
    (tidy.banned_identifiers, SRC, "backlog = catalog = logger = handler = recorded = 0"),
    (tidy.banned_identifiers, SRC, "import logging\nlogging.getLogger().handlers"),
    (tidy.banned_identifiers, SRC, "from contextlib import AbstractContextManager"),
    (tidy.banned_identifiers, SRC, "message.ack()"),
    (tidy.banned_identifiers, "src/penstock/wire/sqs/json.py", "receipt_handle = 1"),
    (tidy.banned_identifiers, "src/penstock/backends/sqs/service.py", "class ReceiptHandle: ..."),
    (tidy.banned_identifiers, "src/penstock/wire/carrot.py", "ACK = 1; NACK = 2"),
    (tidy.banned_identifiers, "src/penstock/cluster/log.py", "class ReplicatedLog: ..."),
    (tidy.banned_identifiers, TEST, "record = 1"),
    (tidy.banned_prose, DOC, "The field is `ReceiptHandle`.\n```\njob\n```\nA replicated log."),
    (tidy.banned_prose, tidy.GLOSSARY, "Not a lease."),
    (tidy.empty_names, SRC, "base = 1\nclass Database: ..."),
    (tidy.long_functions, SRC, "def f():\n" + "    x = 1\n" * 69),
    (tidy.long_modules, SRC, "x = 1\n" * 600),
    (tidy.long_modules, SRC, '"""What it is.\nLong, as one table.\n"""\n' + "x = 1\n" * 601),
    (tidy.long_modules, TEST, "x = 1\n" * 800),
    (tidy.banner_comments, SRC, '"""\n# ----------\n"""\nx = "# ===="  # a -- b\n# +----+\n'),
    (tidy.module_docstrings, SRC, '"""What may be pulled next.\n\nMore.\n"""'),
    (tidy.module_docstrings, TEST, "x = 1"),
    (tidy.commanding_docstrings, SRC, 'def f():\n    """Returns the name."""\ndef g(): ...'),
    (tidy.commanding_docstrings, TEST, 'def f():\n    """Return the name."""'),
    (tidy.prints, "src/penstock/output.py", "sys.stdout.write(text)"),
    (tidy.prints, SRC, "logging.getLogger('aiormq')"),
    (tidy.prints, SRC, '"""print(this)"""\nself.print(1)'),
    (tidy.dangerous_code, SRC, "import re\nre.compile('x')\nyaml.safe_load(x)\nself.exec(1)"),
    (tidy.build_output, "src/penstock/core/build.py", ""),
    (tidy.machine_paths, DOC, "https://example.com/home/anna and docs/root/x, /var/lib/penstock"),
    (tidy.private_imports, TEST, "from penstock import __version__\nfrom os import _exit"),
    (tidy.private_imports, SRC, "from penstock.cluster.router import _pushed_back"),
    (tidy.test_names, TEST, "def test_an_old_receipt_changes_nothing(): ...\ndef helper(): ..."),
    (tidy.sleeps, TEST, "async def test_a_b_c():\n    await asyncio.sleep(0)"),
    (tidy.sleeps, SRC, "time.sleep(1)"),
    (tidy.dropped_errors, SRC, "try:\n    f()\nexcept PenstockError as e:\n    g(e)"),
    (tidy.dropped_errors, SRC, "try:\n    f()\nexcept PenstockError:\n    g()\n    raise"),
    (tidy.opened_files, SRC, "os.open(os.devnull, os.O_RDWR)"),
    (tidy.opened_files, SRC, "segments.open(path, writable=True)"),
    (tidy.opened_files, "src/penstock/files.py", "open('x')"),
    (tidy.opened_files, TEST, "open('x')"),
    (tidy.dropped_errors, SRC, "with suppress(QueueNotFound):\n    f()  # not PenstockError"),
    (tidy.dropped_errors, TEST, "with suppress(PenstockError):\n    f()"),
    (tidy.idle_permissions, tidy.SLEEPS, "# a comment\n\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_rule_finds_what_it_forbids(rule, path, text):
    assert offences_of(rule, path, text)


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_a_rule_leaves_good_text_alone(rule, path, text):
    assert offences_of(rule, path, text) == []


def test_every_rule_is_shown_able_to_fail():
    assert {rule for rule, _, _ in BAD} == set(tidy.RULES)


def test_an_offence_names_the_word_to_use_instead():
    assert offences_of(tidy.banned_identifiers, SRC, "lease = 1") == [
        "name 'lease': not 'lease' but claim"
    ]


def test_a_file_that_is_not_python_is_an_offence_and_not_a_crash():
    assert [str(offence) for offence in tidy.check_file(SRC, "def")] == [
        f"{SRC}:1: not Python: invalid syntax"
    ]


def test_only_a_listed_function_may_sleep(monkeypatch):
    listed = tidy.permissions(
        "# why\ntests/test_example.py::test_a_b_c: a child process has no clock"
    )
    monkeypatch.setattr(tidy, "sleeping_tests", lambda: listed)
    assert offences_of(tidy.sleeps, TEST, "def test_a_b_c():\n    time.sleep(1)") == []
    assert offences_of(tidy.sleeps, TEST, "def test_d_e_f():\n    time.sleep(1)")


def test_a_permission_to_sleep_without_a_reason_is_an_offence():
    offences = offences_of(tidy.idle_permissions, tidy.SLEEPS, "tests/test_gone.py::test_a_b_c:")
    assert "tests/test_gone.py::test_a_b_c gives no reason" in offences


def test_a_class_name_that_two_modules_use_is_an_offence():
    one, two = "src/penstock/one.py", "src/penstock/two.py"
    text = "class Queue:\n    class Inner: ..."
    (found,) = tidy.unique_classes({one: "x = 1\nclass Inner: ...", two: text})
    assert str(found) == f"{two}:2: class Inner has the name of the one in {one}:2"
    assert len(list(tidy.unique_classes({one: "class _In: ...", two: "class _In: ..."}))) == 1
    assert len(list(tidy.unique_classes({one: "class Queue: ...", TEST: text}))) == 1
    assert list(tidy.unique_classes({one: "class Queue: ...", DOC: text})) == []
    twice = {one: "class Queue: ...\nclass Queue: ..."}
    assert len(list(tidy.unique_classes(twice))) == 1


def test_a_verb_that_names_more_functions_than_its_limit_is_an_offence(monkeypatch):
    monkeypatch.setattr(tidy, "VERB_LIMITS", {"settle": 1})
    one, two = "src/penstock/one.py", "src/penstock/two.py"
    (found,) = tidy.single_meanings({one: "def settle(): ...", two: "x = 1\ndef _settle(): ..."})
    assert str(found).startswith(f"{two}:2: settle is the name of 2 functions, at most 1")
    assert (
        list(tidy.single_meanings({one: "def settle(): ...", two: "def settle_due(): ..."})) == []
    )
    assert list(tidy.single_meanings({one: "def settle(): ...", TEST: "def settle(): ..."})) == []


def test_only_a_listed_function_may_drop_errors_of_every_kind():
    path, text = "src/penstock/carrot.py", "def __exit__():\n    suppress(PenstockError)"
    assert offences_of(tidy.dropped_errors, path, text) == []
    assert offences_of(tidy.dropped_errors, path, text.replace("__exit__", "other"))
