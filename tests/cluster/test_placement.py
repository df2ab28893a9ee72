"""The placement of queues, shards and messages, and the URL of a cluster."""

from collections import Counter

import pytest

from penstock.cluster import placement
from penstock.cluster.address import read_address, read_node_name
from penstock.core.receipts import MessageIds
from penstock.errors import InvalidField
from penstock.url import read_url

NODES = ["a", "b", "c", "d"]


def test_queues_spread_evenly_over_the_shards():
    counts = Counter(placement.first_shard(f"queue-{n}", 16) for n in range(16_000))
    assert len(counts) == 16
    assert max(counts.values()) < 1.2 * min(counts.values())


def test_the_shard_of_a_queue_never_changes():
    """Every later version must find stored queues in these shards."""
    names = ("orders", "orders.fifo", "a", "zebra@eu")
    assert [placement.first_shard(name, 64) for name in names] == GOLDEN_SHARDS


GOLDEN_SHARDS = [43, 1, 54, 50]


def test_a_shard_that_is_added_takes_its_share_from_all_others_and_nothing_else_moves():
    names = [f"queue-{n}" for n in range(8_000)]
    before = [placement.grown_shard(name, 4, 4) for name in names]
    assert before == [placement.first_shard(name, 4) for name in names]
    for shards in range(5, 13):
        after = [placement.grown_shard(name, 4, shards) for name in names]
        moved = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
        assert {other for _, other in moved} == {shards - 1}
        assert {one for one, _ in moved} == set(range(shards - 1))
        assert 0.8 < len(moved) / (len(names) / shards) < 1.2
        before = after
    counts = Counter(before)
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_the_shard_of_a_queue_in_a_cluster_that_has_grown_never_changes():
    """Every later version must move queues to these shards."""
    names = ("orders", "orders.fifo", "a", "zebra@eu", "b", "c")
    assert [placement.grown_shard(name, 4, 64) for name in names] == GOLDEN_GROWN


GOLDEN_GROWN = [50, 55, 60, 14, 9, 43]


def test_a_spread_queue_has_as_many_shards_as_it_was_given():
    for spread in (1, 3, 8, 20):
        found = placement.shards_of("orders", 8, spread)
        assert len(set(found)) == len(found) == min(spread, 8)
        assert found[0] == placement.first_shard("orders", 8)
        assert placement.shard_for("group", found) in found


def test_when_a_node_leaves_only_its_own_shards_move():
    for shard in range(64):
        before = placement.ranked(shard, NODES)
        after = placement.ranked(shard, [node for node in NODES if node != "c"])
        assert after == [node for node in before if node != "c"]


def test_every_node_is_first_for_some_shards():
    firsts = Counter(placement.ranked(shard, NODES)[0] for shard in range(64))
    assert set(firsts) == set(NODES)


def test_a_pinned_shard_belongs_to_its_node_while_that_is_live():
    assert placement.ranked(3, NODES, "d")[0] == "d"
    assert placement.ranked(3, ["a", "b"], "d") == placement.ranked(3, ["a", "b"])


def test_the_shard_of_a_message_is_in_its_id():
    identity = b"12345"
    for shard in (0, 7, 300, 4095):
        shown = MessageIds(placement.shard_identity(identity, shard)).show(99)
        assert placement.shard_of_id(shown, identity) == shard
        assert placement.shard_of_id(shown, b"other") is None
    for bad in (None, 5, "", "x" * 36, "8f600669-8e00-8030-9000-0000"):
        assert placement.shard_of_id(bad, identity) is None


def test_each_shard_has_a_key_of_its_own():
    keys = {placement.shard_key(b"k" * 32, shard) for shard in range(100)}
    assert len(keys) == 100


def test_elsewhere_has_every_name_whose_home_is_another_shard():
    names = [f"queue-{n}" for n in range(100)]
    for shard in range(4):
        elsewhere = placement.Elsewhere(shard, 4)
        for name in names:
            home = placement.first_shard(name, 4)
            assert (name in elsewhere) == (home != shard)
            if home != shard:
                assert elsewhere[name] == home


BAD_URLS = {
    "cluster:": "cluster:nats://",
    "cluster:redis://127.0.0.1:1": "cluster:nats://",
    "cluster:nats://": "cluster:nats://",
    "cluster:nats://127.0.0.1": "HOST:PORT",
    "cluster:nats://127.0.0.1:x": "HOST:PORT",
    "cluster:nats://127.0.0.1:1,": "HOST:PORT",
    "cluster:nats://127.0.0.1:1?shards=0": "shards=0",
    "cluster:nats://127.0.0.1:1?shards=99999": "shards=99999",
    "cluster:nats://127.0.0.1:1?shards=-1": "shards",
    "cluster:nats://127.0.0.1:1?replicas=9": "replicas=9",
    "cluster:nats://127.0.0.1:1?name=a.b": "name=",
    "cluster:nats://127.0.0.1:1?colour=red": "colour",
    "cluster:nats://u:secret@10.0.0.1:1": "tls://",
    "cluster:tls://10.0.0.1:1": "credentials",
    "cluster:nats://127.0.0.1:1,u:secret@example.org:1": "tls://",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_bad_url_is_refused_by_an_error_that_says_what_and_no_password(url):
    with pytest.raises(InvalidField, match=BAD_URLS[url]) as caught:
        read_address(read_url(url))
    assert "secret" not in str(caught.value)


def test_a_user_in_the_first_server_is_used_for_all():
    address = read_address(read_url("cluster:nats://u:p@127.0.0.1:1,127.0.0.1:2"))
    assert address.servers == ("nats://u:p@127.0.0.1:1", "nats://u:p@127.0.0.1:2")
    assert address.shown == "cluster:nats://127.0.0.1:1,127.0.0.1:2"


def test_servers_off_this_machine_need_tls_and_credentials_or_insecure():
    guarded = read_address(read_url("cluster:tls://u:p@example.org:4222?ca=ca.pem"))
    assert guarded.uses_tls
    assert not read_address(read_url("cluster:nats://10.0.0.1:1?insecure=1")).uses_tls


def test_a_shown_url_has_no_password():
    url = read_url("cluster:nats://u:secret@127.0.0.1:1,u:secret@127.0.0.1:2?node=a")
    assert "secret" not in url.shown
    assert read_node_name(url) == "a"
    with pytest.raises(InvalidField, match="node="):
        read_node_name(read_url("cluster:nats://127.0.0.1:1?node=a.b"))
