"""What a person reads who names an app or a store that cannot be used."""

import socket
import sys

import pytest

from penstock.errors import BackendLost
from penstock.tasks import TaskApp, TaskError
from penstock.tasks import app as app_module
from penstock.tasks.worker.options import load_app

HEAD = "from penstock.tasks import TaskApp\napp = TaskApp('memory:')\n"
SOURCES = {
    "syntax": "def f(:\n",
    "option": f"{HEAD}@app.task(retires=3)\ndef f() -> None: ...\n",
    "number": "app = 5\n",
    "stop": "import sys\nsys.exit('stop here')\n",
    "lines": "raise RuntimeError('one\\ntwo')\n",
}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, text in SOURCES.items():
        (tmp_path / f"{name}_shop.py").write_text(text)
    yield tmp_path
    for name in SOURCES:
        sys.modules.pop(f"{name}_shop", None)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("./syntax_shop:app", "app: './syntax_shop:app' is not of the form MODULE:NAME, such as"),
        ("a/b:app", "app: 'a/b:app' is not of the form MODULE:NAME, such as"),
        ("a b:app", "app: 'a b:app' is not of the form MODULE:NAME, such as"),
        (".syntax_shop:app", "app: '.syntax_shop:app' is not of the form MODULE:NAME, such as"),
        ("number_shop:app()", "app: 'number_shop:app()' is not of the form MODULE:NAME, such as"),
        ("number_shop:app", "app: 'app' in 'number_shop' is not a TaskApp; the module has none"),
    ],
)
def test_a_name_that_is_no_app_is_refused_by_one_sentence(directory, target, text):
    with pytest.raises(TaskError) as refused:
        load_app(target)
    assert str(refused.value).startswith(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("syntax", "SyntaxError: ", "(syntax_shop.py, line 1)"),
        ("option", "task: there is no option 'retires'; ", "option_shop.py:3)"),
        ("stop", "SystemExit: stop here (", "stop_shop.py:2)"),
        ("lines", "RuntimeError: one", "lines_shop.py:1)"),
    ],
)
def test_an_import_that_fails_is_reported_with_the_place_in_the_users_own_code(
    directory, name, start, end
):
    with pytest.raises(TaskError) as refused:
        load_app(f"{name}_shop:app")
    text = str(refused.value)
    assert text.startswith(f"app: importing '{name}_shop' failed: {start}")
    assert text.endswith(end)


@pytest.fixture
def refused_url():
    """The URL of a port that is bound, so that nothing else can listen at it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}?timeout=1"


def test_an_app_that_names_no_store_says_which_it_uses_and_how_to_name_one(
    monkeypatch, refused_url
):
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    monkeypatch.setattr(app_module, "DEFAULT_URL", refused_url)
    shown = refused_url.partition("?")[0]
    reason = f"{shown}: cannot connect: Connection refused"
    with pytest.raises(BackendLost) as lost:
        _ = TaskApp().service
    assert str(lost.value) == (
        f"{reason}; the app names no store, so it is a Redis server on this machine: start one, "
        "or name another store with TaskApp(URL), PENSTOCK_URL or --url"
    )
    with pytest.raises(BackendLost) as lost:
        _ = TaskApp(refused_url).service
    assert str(lost.value) == reason
