"""The two faces are one: the same words with the same parameters, blocking and awaited."""

import inspect
import math

import pytest

import penstock
import penstock.aio
from penstock import InvalidField, ManualClock, RequestError
from penstock.client import Queues, to_ms

WORDS = [name for name, _ in inspect.getmembers(Queues, inspect.isfunction) if name[0] != "_"]
# What a `with` statement calls is spelt differently for each face.
TWINS = {"__enter__": "__aenter__", "__exit__": "__aexit__"}


@pytest.fixture
def queues():
    with penstock.connect("memory:", clock=ManualClock()) as queues:
        queues.create("q")
        yield queues


def test_both_faces_have_the_same_words():
    awaited = inspect.getmembers(penstock.aio.AsyncQueues, inspect.isfunction)
    assert [name for name, _ in awaited if name[0] != "_"] == WORDS
    assert {"push", "pull", "extend", "release", "delete"} < set(WORDS)


@pytest.mark.parametrize("word", [*WORDS, *TWINS])
def test_a_word_has_the_same_parameters_on_both_faces(word):
    blocking = inspect.signature(getattr(Queues, word))
    awaited = inspect.signature(getattr(penstock.aio.AsyncQueues, TWINS.get(word, word)))
    assert list(awaited.parameters.values()) == list(blocking.parameters.values())
    if word != "__enter__":
        assert awaited.return_annotation == blocking.return_annotation


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_explained_alike_on_both_faces(word):
    awaited = getattr(penstock.aio.AsyncQueues, word)
    assert getattr(Queues, word).__doc__ == awaited.__doc__
    assert awaited.__doc__


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_awaited_on_the_asyncio_face_and_not_on_the_other(word):
    assert inspect.iscoroutinefunction(getattr(penstock.aio.AsyncQueues, word))
    assert not inspect.iscoroutinefunction(getattr(Queues, word))


def test_connecting_takes_the_same_parameters_on_both_faces():
    blocking = inspect.signature(penstock.connect).parameters
    awaited = inspect.signature(penstock.aio.connect).parameters
    assert list(awaited.values()) == list(blocking.values())


@pytest.mark.parametrize(
    ("seconds", "expected_ms"),
    [(0, 0), (1, 1_000), (0.5, 500), (0.0004, 0), (0.0006, 1), (43_200, 43_200_000)],
)
def test_seconds_become_whole_milliseconds(seconds, expected_ms):
    assert to_ms("field", seconds) == expected_ms


@pytest.mark.parametrize(
    "seconds",
    [None, True, "1", b"1", [1], -1, -0.001, math.nan, math.inf, -math.inf, 10**400, 1e308],
    ids=ascii,
)
def test_what_is_no_number_of_seconds_is_refused_by_name(seconds):
    with pytest.raises(InvalidField, match="field"):
        to_ms("field", seconds)


@pytest.mark.parametrize(
    "url",
    ["", "memory", "nowhere:", "memory:x", "memory:?colour=red", "memory:?history=-1", "http://["],
)
def test_a_url_that_names_no_backend_is_refused(url):
    with pytest.raises(InvalidField, match="url"):
        penstock.connect(url)


@pytest.mark.parametrize("url", [None, 7, b"memory:", ["memory:"]], ids=str)
def test_a_url_that_is_no_text_is_refused(url):
    with pytest.raises(InvalidField, match="url"):
        penstock.connect(url)


@pytest.mark.parametrize("items", [None, 7, object()], ids=["None", "7", "object"])
def test_many_of_what_cannot_be_counted_is_refused(queues, items):
    for use in (queues.batch, queues.delete_many, lambda bad: queues.push_many("q", bad)):
        with pytest.raises(RequestError):
            use(items)
    assert queues.stats("q").messages == 0


def test_text_is_not_taken_for_many_bodies(queues):
    for bodies in ("abc", b"abc"):
        with pytest.raises(InvalidField, match="bodies"):
            queues.push_many("q", bodies)
    assert queues.stats("q").messages == 0


def test_a_redrive_of_more_than_one_step_moves_everything(queues):
    queues.create("to")
    queues.push_many("q", ["x"] * 2_500)
    assert queues.redrive("q", to="to") == 2_500
    assert queues.stats("to").visible == 2_500


def test_a_redrive_with_a_limit_beyond_one_step_stops_at_it(queues):
    queues.create("to")
    queues.push_many("q", ["x"] * 2_500)
    assert queues.redrive("q", to="to", limit=1_700) == 1_700
    assert (queues.stats("q").visible, queues.stats("to").visible) == (800, 1_700)


def test_a_closed_connection_says_so(queues):
    other = penstock.connect("memory:")
    other.create("q")
    other.close()
    with pytest.raises(penstock.UnavailableError, match="closed"):
        other.push("q", "x")
    with pytest.raises(penstock.UnavailableError, match="closed"):
        other.stats("q")
