"""The rules of spread queues without a network: routers and shards take steps in random order."""

import random
from contextlib import suppress
from typing import cast

import pytest

from penstock.backends.engine.engine import Engine
from penstock.clock import ManualClock
from penstock.cluster.placement import shards_of
from penstock.cluster.spread_rules import (
    NOTE,
    NotPlaced,
    QueuePlaces,
    Spread,
    SpreadChanged,
    SpreadGuard,
    next_spread,
    places_at,
    places_by,
    places_in,
    push_key,
    spread_of,
    with_new_version,
    with_note,
    without_note,
    without_past,
)
from penstock.core.visible import FifoOrder
from penstock.service import (
    Batch,
    ConfigureQueue,
    CreateQueue,
    Delete,
    DeleteQueue,
    DescribeQueue,
    Pull,
    Push,
    QueueSettings,
    Stats,
)
from tests.conftest import FULL

SHARDS = 5
GROUPS = [f"g{number}" for number in range(6)]


class Shards:
    """Five shards with one FIFO queue, whose note is changed in its home shard first."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.clock = ManualClock(1_700_000_000_000)
        self.engines: list[Engine] = []
        self.guards: list[SpreadGuard] = []
        for number in range(SHARDS):
            engine = Engine(clock=self.clock)
            engine.shard.number = number
            self.engines.append(engine)
            self.guards.append(SpreadGuard(engine.shard, SHARDS))
        self.home = shards_of("line", SHARDS, 1)[0]
        settings = {"fifo": True, "dedup_per_group": True}
        self.engines[self.home].submit(CreateQueue("line", settings))
        self.seen: dict[str, list[str]] = {group: [] for group in GROUPS}
        # Copies of the home shard's settings that have not arrived yet.
        self.copies: list[tuple[int, QueueSettings]] = []
        self.steps = [self.change, self.copy, self.copy, self.consume, self.consume]

    def ask(self, shard, command, version=0):
        before = self.version(shard)
        self.guards[shard].check(command, version, self.clock.now_ms())
        reply = self.engines[shard].submit(command)
        self.guards[shard].configured("line")
        # A shard with an older note again would accept pushes that now belong to other shards.
        assert self.version(shard) >= before, f"shard {shard} has an older note than before"
        return reply

    def version(self, shard):
        """The version of the note that a shard has; 0 for none."""
        queue = self.engines[shard].shard.names.get("line")
        return 0 if queue is None else spread_of(queue.settings).version

    def describe(self):
        return self.ask(self.home, DescribeQueue("line"))

    def change(self):
        info = self.describe()
        old = spread_of(info.settings)
        new = next_spread(old, self.some_places(), self.clock.now_ms())
        if self.random.random() < 0.2:
            new = with_new_version(old, self.clock.now_ms())
        if not old.version and new.shards == 1:
            return
        changes = {"annotations": with_note(info.settings.annotations, new)}
        self.ask(self.home, ConfigureQueue("line", changes), old.version)
        settings = self.describe().settings
        for shard in places_in("line", new, SHARDS):
            if shard != self.home:
                self.copies.append((shard, settings))

    def some_places(self):
        """So many shards from the home shard on, or any shards."""
        if self.random.random() < 0.5:
            return self.random.randint(1, SHARDS)
        numbers = self.random.sample(range(SHARDS), self.random.choice([1, 1, 2, 3]))
        return places_at("line", numbers, SHARDS)

    def copy(self):
        """One of the copies arrives, in random order; one may arrive twice."""
        if not self.copies:
            return
        at = self.random.randrange(len(self.copies))
        shard, settings = self.copies[at]
        if self.random.random() < 0.9:
            del self.copies[at]
        if "line" not in self.engines[shard].shard.names:
            wanted = {"fifo": True, "dedup_per_group": True, "annotations": settings.annotations}
            self.ask(shard, CreateQueue("line", wanted))
            return
        # A copy that is older than the shard's note is refused.
        with suppress(SpreadChanged):
            changes = {"annotations": settings.annotations}
            self.ask(shard, ConfigureQueue("line", changes), spread_of(settings).version)

    def consume(self):
        shard = self.random.randrange(SHARDS)
        engine = self.engines[shard]
        if "line" in engine.shard.names:
            for claim in engine.submit(Pull("line", self.random.randint(1, 3))):
                self.seen[claim.group or ""].append(claim.body.decode())
                engine.submit(Delete("line", claim.proof))

    def check_whole(self):
        for group in GROUPS:
            having = [
                engine.shard.number
                for engine in self.engines
                if "line" in engine.shard.names
                and cast(FifoOrder, engine.shard.names["line"].order).has_group(group)
            ]
            assert len(having) <= 1, f"{group} is in {having}"


class GroupSender:
    """A router that pushes the messages of a group in order, by the last spread that it read."""

    def __init__(self, shards, group, name):
        self.shards = shards
        self.group = group
        self.name = name
        self.next = 0
        self.places: QueuePlaces | None = None
        self.offers: list[int] = []

    def step(self):
        """Asks one shard; a push may take several steps, with steps of others in between."""
        shards = self.shards
        body = f"{self.name} {self.next}"
        push = Push("line", body.encode(), group=self.group, dedup_id=body)
        if not self.offers and shards.random.random() < 0.1:
            # It reads the spread before a shard refuses its push.
            self.places = places_by(shards.describe(), SHARDS)
        if not self.offers:
            self.offers = [shards.home]
            if self.places is not None:
                self.offers = self.places.places_of(self.group)
        version = 0 if self.places is None else self.places.version
        try:
            shards.ask(self.offers.pop(0), push, version)
        except NotPlaced:
            return
        except SpreadChanged:
            self.places = places_by(shards.describe(), SHARDS)
        else:
            # Sometimes the answer is lost, and the same push is sent again.
            self.next += shards.random.random() < 0.8
        self.offers = []


@pytest.mark.parametrize("seed", range(200 if FULL else 15))
def test_a_group_is_in_one_shard_and_in_order_while_the_spread_changes(seed):
    shards = Shards(seed)
    senders = [GroupSender(shards, group, name) for group in GROUPS for name in "xyz"]
    for _ in range(1_500):
        if shards.random.random() < 0.7:
            shards.random.choice(senders).step()
        elif shards.random.random() < 0.05:
            shards.change()
        else:
            shards.random.choice(shards.steps[1:])()
        shards.clock.advance(ms=shards.random.randint(0, 3))
        shards.check_whole()
    while shards.copies:
        shards.copy()
    for _ in range(3_000):
        shards.consume()
    for sender in senders:
        # The last push may have been accepted and its answer lost.
        taken = [each for each in shards.seen[sender.group] if each[0] == sender.name]
        assert taken == [f"{sender.name} {number}" for number in range(len(taken))]
        assert sender.next <= len(taken) <= sender.next + 1
    assert sum(sender.next for sender in senders) > 100


def test_a_shard_with_another_note_refuses_everything_but_receipts_and_descriptions():
    shards = Shards(1)
    guard, engine = shards.guards[shards.home], shards.engines[shards.home]
    for command in (Push("line", b"x", group="g"), Pull("line"), Stats("line")):
        with pytest.raises(SpreadChanged):
            guard.check(command, 77, 0)
    with pytest.raises(SpreadChanged):
        guard.check(Batch([Push("line", b"x", group="g")]), 77, 0)
    guard.check(Batch([Delete("line", "any")]), 77, 0)
    guard.check(Delete("line", "any"), 77, 0)
    guard.check(DescribeQueue("line"), 77, 0)
    # A copy of the queue in a shard that is no longer used is deleted only if it is empty.
    engine.submit(Push("line", b"x", group="g"))
    with pytest.raises(NotPlaced):
        guard.check(DeleteQueue("line"), 77, 0)
    guard.check(DeleteQueue("line"), 0, 0)


def test_a_copy_of_the_note_never_replaces_a_newer_one():
    shards = Shards(3)
    annotations = {}
    for version, spread in ((5, Spread(5, 3)), (6, Spread(6, 4, (3,)))):
        annotations[version] = with_note({}, spread)
    other = shards_of("line", SHARDS, 2)[1]
    settings = {"fifo": True, "dedup_per_group": True, "annotations": annotations[6]}
    shards.ask(other, CreateQueue("line", settings))
    older = ConfigureQueue("line", {"annotations": annotations[5]})
    with pytest.raises(SpreadChanged):
        shards.ask(other, older, 5)
    assert shards.version(other) == 6
    # The same copy may arrive twice.
    shards.ask(other, ConfigureQueue("line", {"annotations": annotations[6]}), 6)
    assert shards.version(other) == 6


def test_versions_increase_also_when_a_queue_is_created_again():
    first = next_spread(Spread(), 4, 1_700_000_000_000)
    versions = [first.version]
    old = first
    for make in (with_new_version, without_past, lambda old, now_ms: next_spread(old, 2, now_ms)):
        old = make(old, 1_700_000_000_000)
        versions.append(old.version)
    versions.append(next_spread(Spread(), 3, 1_700_000_010_000).version)
    assert versions == sorted(set(versions))
    assert old.before == (4,)


def test_a_key_is_offered_to_its_earlier_shards_first_and_to_its_current_one_last():
    for keys in range(200):
        key = f"key{keys}"
        places = QueuePlaces("q", QueueSettings(), Spread(5, 4, (1, 3)), 8)
        offers = places.places_of(key)
        assert offers[-1] in places.current
        assert set(offers) <= set(places.all_shards)
        assert len(offers) == len(set(offers)) <= 3
        settled_places = places._replace(spread=Spread(6, 4))
        assert settled_places.places_of(key) == offers[-1:]


def test_callers_do_not_see_the_note_and_it_is_removed_with_the_spread():
    shards = Shards(2)
    shards.change()
    while not spread_of(shards.describe().settings).version:
        shards.change()
    info = shards.describe()
    assert NOTE in info.settings.annotations
    assert without_note(info).settings.annotations == {}
    assert with_note(info.settings.annotations, Spread(9, 1)) == {}


def test_a_push_without_a_valid_key_has_no_place():
    fifo = QueueSettings(fifo=True)
    assert push_key(fifo, Push("q", b"x")) is None
    assert push_key(fifo, Push("q", b"x", group=5)) is None  # type: ignore[arg-type]
    assert push_key(QueueSettings(), Push("q", b"x", group="g")) is None
    assert push_key(QueueSettings(), Push("q", b"x", dedup_id=5)) is None  # type: ignore[arg-type]
    by_content = QueueSettings(dedup_by_content=True)
    assert push_key(by_content, Push("q", b"x")) == push_key(by_content, Push("q", b"x"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "junk",
        "5",
        '["1", 2]',
        "[0, 2]",
        "[1, 0]",
        "[1, -1]",
        "[1, 2, [0]]",
        "[1, []]",
        "[1, [-1]]",
        "[1, [2, 2]]",
        "[1, [0], [[]]]",
        f"[{2**32}, 2]",
        "[1, 2, [3], 4, 5]" + "]",
    ],
)
def test_a_text_that_is_not_a_valid_note_gives_no_spread(text):
    """A client may set annotations to anything."""
    assert spread_of(QueueSettings(annotations={NOTE: text})) == Spread()
    engine = Engine(clock=ManualClock())
    engine.submit(CreateQueue("orders", {"annotations": {NOTE: text}}))
    guard = SpreadGuard(engine.shard, SHARDS)
    guard.check(Push("orders", b"x"), 0, 0)
    guard.check(ConfigureQueue("orders", {}), 0, 0)


def test_a_note_that_was_written_is_read():
    for spread in (Spread(7, 3, (2, 5), 99), Spread(8, (4,), (2, (1, 0)), 99)):
        assert spread_of(QueueSettings(annotations=with_note({}, spread))) == spread


def test_a_queue_that_is_back_in_its_home_shard_has_no_note():
    home = shards_of("line", SHARDS)[0]
    other = (home + 2) % SHARDS
    moved = next_spread(Spread(), places_at("line", [other], SHARDS), 1_700_000_000_000)
    assert with_note({}, moved)
    assert places_in("line", moved, SHARDS) == [home, other]
    back = next_spread(moved, places_at("line", [home], SHARDS), 1_700_000_000_000)
    assert places_in("line", back, SHARDS) == [other, home]
    assert with_note({}, without_past(back, 1_700_000_000_000)) == {}
