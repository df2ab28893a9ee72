"""Mirrors to each other kind of service: a Redis server, our own SQS endpoint, another store.

The primary is a store in this process, the mirror is a real server. Each test runs the same
story; what a kind of service cannot do is left out of the comparison, and named.
"""

from typing import Any

import pytest

import penstock
from penstock.backends.mirror.follow import MirrorFollower
from penstock.url import load_backend, read_url
from tests.backends.redis.servers import RedisServer
from tests.server.conftest import end_daemon, until
from tests.server.sqs.conftest import serve

CONNECT: Any = penstock.connect
FOLLOWER: Any = MirrorFollower


@pytest.fixture(
    params=["file", pytest.param("redis", marks=pytest.mark.service("redis-server")), "sqs"]
)
def target(request, quick_path, monkeypatch):
    """The URL of a mirror, and what of its queues can be compared."""
    if request.param == "file":
        yield f"file:{quick_path / 'other'}"
        end_daemon(quick_path / "other")
    elif request.param == "redis":
        server = RedisServer()
        yield server.url
        server.close()
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with serve("--store", "memory:") as server:
            yield f"sqs://us-east-1?endpoint={server.url}"


@pytest.fixture
def primary(quick_path):
    with CONNECT(f"file:{quick_path / 'store'}?embedded=1") as queues:
        yield queues


@pytest.fixture
def mirror(quick_path, primary, target):
    """Starts the mirror, again if it was closed."""
    opened = []

    def start():
        url = read_url(target)
        follower = FOLLOWER(str(quick_path / "store"), load_backend(url).open_service(url, None))
        opened.append(follower)
        follower.start()
        return follower

    yield start
    for follower in opened[-1:]:
        follower.close()


def bodies(queues, name):
    """All visible messages, in order, which are back in their places afterwards."""
    claims: list[Any] = []
    while some := queues.pull_many(name, 100, visibility_timeout=30):
        claims += some
    for claim in claims:
        queues.release(claim)
    return [claim.body for claim in claims]


def drained_by_group(queues, name):
    """The bodies of each group, in order; they are deleted."""
    found: dict[str, list[bytes]] = {}
    while claim := queues.pull(name):
        found.setdefault(claim.group, []).append(claim.body)
        queues.delete(claim)
    return found


def counts(queues, name):
    stats = queues.stats(name)
    return stats.visible, stats.delayed, stats.in_flight


def same(primary, mirrored, name):
    return counts(mirrored, name) == counts(primary, name)


def test_every_kind_of_service_mirrors_a_store(primary, mirror, target):
    primary.create("orders", visibility_timeout=60)
    primary.push("orders", b"before", attributes={"kind": "test", "raw": b"\xff"})
    follower = mirror()
    primary.push_many("orders", [b"%d" % i for i in range(700)])
    primary.push("orders", b"later", delay=600)
    held = primary.pull_many("orders", 20)
    follower.catch_up()
    with CONNECT(target) as mirrored:
        assert mirrored.list() == ["orders"]
        until(lambda: same(primary, mirrored, "orders"))
        for claim in held[:10]:
            primary.delete(claim)
        primary.release(held[10])
        follower.catch_up()
        until(lambda: same(primary, mirrored, "orders"))
        expected = [each.body for each in primary.peek("orders", 1_000)]
        assert bodies(mirrored, "orders") == expected
        primary.create("other")
        primary.push("other", b"x")
        primary.purge("orders")
        primary.remove("other")
        follower.catch_up()
        assert mirrored.list() == ["orders"]
        until(lambda: mirrored.stats("orders").messages == 0)
    assert (follower.progress.refused, follower.progress.unmatched) == (0, 0)


def test_every_kind_of_service_keeps_a_fifo_queue_in_order(primary, mirror, target):
    primary.create("line.fifo")
    for i in range(30):
        primary.push("line.fifo", b"%d" % i, group="ab"[i % 2], dedup_id=str(i))
    follower = mirror()
    for _ in range(7):
        primary.delete(primary.pull("line.fifo"))
    claim = primary.pull("line.fifo")
    follower.catch_up()
    primary.delete(claim)
    primary.delete(primary.pull("line.fifo"))
    follower.catch_up()
    follower.close()
    follower = mirror()
    primary.push("line.fifo", b"after a restart", group="a", dedup_id="again")
    follower.catch_up()
    with CONNECT(target) as mirrored:
        until(lambda: same(primary, mirrored, "line.fifo"))
        assert mirrored.describe("line.fifo").settings.fifo
        expected = drained_by_group(primary, "line.fifo")
        assert drained_by_group(mirrored, "line.fifo") == expected
        assert len(expected["a"]) + len(expected["b"]) == 22
    assert follower.progress.refused == 0


def test_dead_letters_reach_every_kind_of_service(primary, mirror, target):
    primary.create("orders", dead_letter="dead", max_receives=1)
    primary.push_many("orders", [b"0", b"1", b"2"])
    follower = mirror()
    primary.release(primary.pull("orders"))
    follower.catch_up()
    with CONNECT(target) as mirrored:
        until(lambda: same(primary, mirrored, "dead") and same(primary, mirrored, "orders"))
        assert bodies(mirrored, "dead") == [b"0"]
        primary.redrive("dead")
        follower.catch_up()
        until(lambda: same(primary, mirrored, "dead") and same(primary, mirrored, "orders"))
        assert bodies(mirrored, "orders") == [b"1", b"2", b"0"]
    assert (follower.progress.refused, follower.progress.unmatched) == (0, 0)


def test_what_only_time_causes_reaches_every_kind_of_service(primary, mirror, target):
    """Nobody uses the store any more: a claim ends, a TTL, and a claim after which it is dead."""
    primary.create("orders", visibility_timeout=1, dead_letter="dead", max_receives=2)
    primary.push("orders", b"dead")
    primary.release(primary.pull("orders"))
    assert primary.pull("orders").body == b"dead"
    primary.push("orders", b"back", priority=1)
    assert primary.pull("orders").body == b"back"
    primary.push("orders", b"delayed", delay=1)
    primary.push("orders", b"short", ttl=1)
    follower = mirror()
    with CONNECT(target) as mirrored:

        def has_all():
            follower.step()
            return counts(mirrored, "orders") == (2, 0, 0) and counts(mirrored, "dead") == (1, 0, 0)

        until(has_all)
        assert sorted(bodies(mirrored, "orders")) == [b"back", b"delayed"]
        assert bodies(mirrored, "dead") == [b"dead"]
        # All that there is was durable, and is what the mirror compares itself with.
        until(lambda: not follower.step())
        assert follower.progress.behind_bytes == 0
        assert follower.progress.position == primary.service._engine.journal.end_position


def test_a_mirror_that_was_killed_duplicates_nothing_at_any_kind_of_service(
    primary, mirror, target
):
    primary.create("orders")
    follower = mirror()
    primary.push_many("orders", [b"%d" % i for i in range(100)])
    follower.step()
    # What a kill leaves: the state as it was last saved, before the pushes.
    follower._file.close()
    follower._reader.close()
    follower._target.close()
    follower = mirror()
    primary.push("orders", b"last")
    follower.catch_up()
    with CONNECT(target) as mirrored:
        until(lambda: same(primary, mirrored, "orders"))
        assert bodies(mirrored, "orders") == [b"%d" % i for i in range(100)] + [b"last"]
