"""The blocking and the asyncio client have the same methods with the same parameters."""

import asyncio
import inspect
import math
import pickle

import pytest

import penstock
import penstock.aio
from penstock import ManualClock, RequestError
from penstock.client import Queues
from penstock.errors import InvalidField
from penstock.public import to_ms

METHODS = [name for name, _ in inspect.getmembers(Queues, inspect.isfunction) if name[0] != "_"]
# These are not awaited: one client returns an iterator for `for`, the other one for `async for`.
LOOPS = ("consume",)
# The methods that a `with` statement calls, and those that `async with` calls.
ASYNC_NAMES = {"__enter__": "__aenter__", "__exit__": "__aexit__"}


@pytest.fixture
def queues():
    with penstock.connect("memory:", clock=ManualClock()) as queues:
        queues.create("q")
        yield queues


def test_the_blocking_and_the_asyncio_client_have_the_same_methods():
    awaited = inspect.getmembers(penstock.aio.AsyncQueues, inspect.isfunction)
    assert [name for name, _ in awaited if name[0] != "_"] == METHODS
    assert {"push", "pull", "extend", "release", "delete"} < set(METHODS)


@pytest.mark.parametrize("method", [*METHODS, *ASYNC_NAMES])
def test_a_method_has_the_same_parameters_in_both_clients(method):
    blocking = inspect.signature(getattr(Queues, method))
    awaited = inspect.signature(getattr(penstock.aio.AsyncQueues, ASYNC_NAMES.get(method, method)))
    assert list(awaited.parameters.values()) == list(blocking.parameters.values())
    if method not in ("__enter__", *LOOPS):
        assert awaited.return_annotation == blocking.return_annotation


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_same_docstring_in_both_clients(method):
    awaited = getattr(penstock.aio.AsyncQueues, method)
    assert getattr(Queues, method).__doc__ == awaited.__doc__
    assert awaited.__doc__


@pytest.mark.parametrize("method", [method for method in METHODS if method not in LOOPS])
def test_a_method_is_awaited_in_the_asyncio_client_only(method):
    assert inspect.iscoroutinefunction(getattr(penstock.aio.AsyncQueues, method))
    assert not inspect.iscoroutinefunction(getattr(Queues, method))


def test_connect_has_the_same_parameters_in_both_clients():
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
def test_a_value_that_is_not_a_number_of_seconds_is_refused_by_name(seconds):
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
def test_a_url_that_is_not_text_is_refused(url):
    with pytest.raises(InvalidField, match="url"):
        penstock.connect(url)


@pytest.mark.parametrize("items", [None, 7, object()], ids=["None", "7", "object"])
def test_push_many_and_delete_many_refuse_a_single_value(queues, items):
    for use in (queues.delete_many, lambda bad: queues.push_many("q", bad)):
        with pytest.raises(RequestError):
            use(items)
    assert queues.stats("q").messages == 0


def test_push_many_refuses_a_single_text_or_bytes(queues):
    for bodies in ("abc", b"abc"):
        with pytest.raises(InvalidField, match="bodies"):
            queues.push_many("q", bodies)
    assert queues.stats("q").messages == 0


def test_a_redrive_of_more_messages_than_one_step_moves_takes_them_all(queues):
    queues.create("to")
    queues.push_many("q", ["x"] * 2_500)
    assert queues.redrive("q", to="to") == 2_500
    assert queues.stats("to").visible == 2_500


def test_other_tasks_run_between_the_steps_of_an_awaited_redrive():
    async def count_turns():
        turns = 0

        async def take_turns():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with await penstock.aio.connect("memory:") as queues:
            await queues.create("q")
            await queues.create("to")
            await queues.push_many("q", [b"x"] * 5_000)
            turning = asyncio.create_task(take_turns())
            assert await queues.redrive("q", to="to") == 5_000
            turning.cancel()
        return turns

    assert asyncio.run(count_turns()) >= 4


def test_a_redrive_of_several_steps_stops_at_its_limit(queues):
    queues.create("to")
    queues.push_many("q", ["x"] * 2_500)
    assert queues.redrive("q", to="to", limit=1_700) == 1_700
    assert (queues.stats("q").visible, queues.stats("to").visible) == (800, 1_700)


def test_a_closed_connection_is_refused_with_an_error_that_says_closed(queues):
    other = penstock.connect("memory:")
    other.create("q")
    other.close()
    with pytest.raises(penstock.UnavailableError, match="closed"):
        other.push("q", "x")
    with pytest.raises(penstock.UnavailableError, match="closed"):
        other.stats("q")


def test_an_error_of_create_names_the_argument_that_was_given(queues):
    for argument, value in (
        ("max_messages", 0),
        ("max_bytes", "much"),
        ("max_body_bytes", -1),
        ("max_in_flight", 1.5),
        ("visibility_timeout", -1),
        ("retention", None),
        ("priority_age", 0),
        ("priority_age", 366 * 86_400 + 1),
        ("priority_age", "soon"),
    ):
        for use in (queues.create, queues.configure):
            with pytest.raises(InvalidField, match=f"^{argument}: "):
                use("q", **{argument: value})


def test_a_fifo_queue_is_refused_a_priority_age_by_an_error_that_says_why(queues):
    for use in (queues.create, queues.configure):
        queues.create("line.fifo")
        with pytest.raises(InvalidField, match=r"^priority_age: a fifo queue has no priorities"):
            use("line.fifo", priority_age=5)


def test_an_awaited_error_of_create_names_the_argument_that_was_given():
    async def complaint():
        async with await penstock.aio.connect("memory:") as queues:
            with pytest.raises(InvalidField, match=r"^max_messages: "):
                await queues.create("q", max_messages=0)
            await queues.create("q")
            with pytest.raises(InvalidField, match=r"^max_bytes: "):
                await queues.configure("q", max_bytes=0)

    asyncio.run(complaint())


def test_the_error_of_a_full_queue_names_the_setting_and_its_value(queues):
    queues.create("few", max_messages=1, max_in_flight=1)
    queues.push("few", "x")
    with pytest.raises(penstock.QueueFull, match="max_messages=1"):
        queues.push("few", "x")
    queues.configure("few", max_messages=2)
    queues.push("few", "y")
    assert queues.pull("few")
    with pytest.raises(penstock.errors.InFlightLimit, match="max_in_flight=1"):
        queues.pull("few")


def test_one_dedup_id_for_many_messages_is_refused(queues):
    with pytest.raises(InvalidField, match="dedup_id: one for all would keep only the first"):
        queues.push_many("q", ["a", "b"], dedup_id="x")
    assert queues.stats("q").messages == 0


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        ({"delay": 1}, r"bodies\[1\]: there is no body"),
        ({"body": "x", "colour": 1}, r"bodies\[1\]: there is no 'colour'; an item has body, delay"),
        ({"body": "x", "delay": "soon"}, "delay: expected a number of seconds"),
    ],
)
def test_an_item_with_a_wrong_option_is_refused_before_anything_is_pushed(queues, item, complaint):
    with pytest.raises(InvalidField, match=complaint):
        queues.push_many("q", ["fine", item])
    assert queues.stats("q").messages == 0


def test_options_of_an_item_replace_those_of_all(queues):
    items = ["plain", {"body": "later", "delay": 9}, {"body": "first", "priority": 9}]
    assert len(queues.push_many("q", items, priority=1, ttl=60)) == 3
    assert [claim.body for claim in queues.pull_many("q")] == [b"first", b"plain"]
    assert queues.stats("q").delayed == 1


def test_the_results_of_a_refused_batch_survive_pickling(queues):
    with pytest.raises(penstock.BatchRefused) as caught:
        queues.push_many("q", ["a", "x" * 2**21])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert [type(each) for each in again.results] == [type(each) for each in caught.value.results]


def test_deleting_many_of_which_one_is_stale_raises_and_deletes_the_others(queues):
    queues.push_many("q", ["a", "b"])
    kept, lost = queues.pull_many("q")
    queues.release(lost)
    with pytest.raises(penstock.BatchRefused, match="1 of 2 items were refused") as caught:
        queues.delete_many([kept, lost])
    assert caught.value.results[0] is True
    assert isinstance(caught.value.results[1], penstock.StaleReceipt)
    assert queues.stats("q").messages == 1


def test_a_name_that_ends_in_fifo_makes_a_fifo_queue(queues):
    assert queues.create("x.fifo").settings.fifo
    assert queues.create("x.fifo", fifo=True).settings.fifo
    assert queues.create("y.fifo@scope").settings.fifo
    assert not queues.create("fifo").settings.fifo
    with pytest.raises(InvalidField, match=r"fifo: a name that ends in \.fifo"):
        queues.create("z.fifo", fifo=False)
    assert "z.fifo" not in queues.list()


def test_a_dead_letter_queue_that_is_created_with_a_queue_is_named_in_the_reply(queues):
    assert queues.create("a", dead_letter="q", max_receives=1).also_created == []
    assert queues.create("b", dead_letter="b-daed", max_receives=1).also_created == ["b-daed"]
    assert queues.create("b", dead_letter="b-daed", max_receives=1).also_created == []
    assert queues.configure("q", dead_letter="c", max_receives=1).also_created == ["c"]
    assert queues.describe("b").also_created == []


def test_a_dead_letter_queue_in_use_is_removed_by_force_only(queues):
    queues.create("orders", dead_letter="q", max_receives=1)
    with pytest.raises(
        penstock.errors.QueueInUse, match="'q' is the dead-letter queue of 'orders'"
    ):
        queues.remove("q")
    queues.remove("q", force=True)
    queues.remove("orders")
    assert queues.list() == []


def test_a_redrive_of_a_queue_that_is_no_dead_letter_queue_is_refused(queues):
    with pytest.raises(InvalidField, match="'q' is the dead-letter queue of no queue"):
        queues.redrive("q")
    queues.create("orders", dead_letter="q", max_receives=1)
    assert queues.redrive("q") == 0
    queues.create("to")
    assert queues.redrive("orders", to="to") == 0


def test_an_awaited_redrive_of_a_queue_that_is_no_dead_letter_queue_is_refused():
    async def complaint():
        async with await penstock.aio.connect("memory:") as queues:
            await queues.create("q")
            with pytest.raises(InvalidField, match="'q' is the dead-letter queue of no queue"):
                await queues.redrive("q")
            await queues.create("orders", dead_letter="q", max_receives=1)
            assert await queues.redrive("q") == 0
            with pytest.raises(penstock.errors.QueueInUse):
                await queues.remove("q")

    asyncio.run(complaint())
