"""A journal whose beginning was dropped still has the name and settings of every queue."""

import pytest

from penstock.core.events import Pushed, QueueCreated, QueueStated
from penstock.core.replay import apply_if_new
from penstock.core.shard import ShardState
from penstock.journal.reader import JournalReader
from penstock.service import (
    ConfigureQueue,
    CreateQueue,
    DeleteQueue,
    ListQueues,
    Purge,
    Push,
    QueueSettings,
)
from tests.backends.engine.random_store import small_slices
from tests.backends.engine.test_upkeep import ReopenedStore


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch):
    small_slices(monkeypatch)


@pytest.fixture
def old(quick_path):
    """A store after many snapshots, which have dropped the beginning of its journal."""
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("orders", {"visibility_ms": 7_000}), CreateQueue("other"))
    created_at_ms = store.clock.now_ms()
    store(CreateQueue("gone"), DeleteQueue("gone"))
    store.clock.advance(seconds=5)
    store(ConfigureQueue("other", {"retention_ms": 90_000_000}))
    for turn in range(8):
        store(*[Push("other", bytes(2_000))] * 12)
        store(Push("orders", b"order %d" % turn))
        store(Purge("other"))
        store.run_pass()
    assert store.engine.journal.first_position > 0
    store.engine.journal.sync()
    yield store, created_at_ms
    store.engine.close()


def events_of(store):
    with JournalReader(store.root / "store" / "journal") as reader:
        return [each.event for each in reader.events(reader.first_offset)]


def test_the_rest_of_the_journal_states_every_queue_with_its_settings_and_dates(old):
    store, created_at_ms = old
    events = events_of(store)
    assert not any(isinstance(event, QueueCreated) for event in events)
    stated = {each.name: each for each in events if isinstance(each, QueueStated)}
    assert stated.keys() == {"orders", "other"}
    assert stated["orders"].settings.visibility_ms == 7_000
    assert stated["orders"].created_at_ms == created_at_ms
    assert stated["other"].settings.retention_ms == 90_000_000
    assert stated["other"].configured_at_ms == created_at_ms + 5_000
    # Every queue in an event of a message is one of them.
    pushed = {event.queue for event in events if isinstance(event, Pushed)}
    assert pushed <= {each.queue for each in stated.values()}


def test_a_queue_stated_event_changes_nothing_when_the_store_is_opened_again(old):
    store, _ = old
    before = store.engine.shard.snapshot()
    store.reopen()
    assert store.engine.shard.snapshot() == before
    assert store(ListQueues()) == ["orders", "other"]


def test_a_pass_that_drops_nothing_states_no_queues(quick_path):
    store = ReopenedStore(quick_path, archive=None)
    store(CreateQueue("orders"), Push("orders", b"one"))
    store.run_pass()
    store.engine.journal.sync()
    assert not any(isinstance(event, QueueStated) for event in events_of(store))
    store.engine.close()


def test_a_queue_whose_creation_was_lost_gets_its_name_from_a_queue_stated_event():
    shard = ShardState()
    settings = QueueSettings(visibility_ms=9_000)
    stated = QueueStated(50, 3, "orders", settings, 5, 8)
    assert apply_if_new(shard, stated) is False
    queue = shard.names["orders"]
    assert (queue.number, queue.settings, queue.created_at_ms) == (3, settings, 5)
    assert queue.configured_at_ms == 8
    # A second statement, and one of a queue that was removed since, change nothing.
    before = shard.snapshot()
    apply_if_new(shard, stated)
    apply_if_new(shard, QueueStated(60, 2, "removed", settings, 1, 1))
    assert shard.snapshot() == before
