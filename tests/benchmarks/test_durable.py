"""The benchmark of durable stores compares equal work; a lost message voids the run."""

import sqlite3
from contextlib import closing
from itertools import chain
from pathlib import Path

import pytest

import penstock

durable = pytest.importorskip("benchmarks.durable", reason="the source archive has no benchmarks")
from benchmarks import backlog, durable_beside, harness, stores  # noqa: E402

MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
/dev/vdb /tmp/on\\040disk xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/srv/data", "ext4"), ("/tmp/a", "tmpfs"), ("/tmp/on disk/a", "xfs"), ("/tmpfoo", "ext4")],
)
def test_the_filesystem_of_a_directory_is_the_one_mounted_nearest_above_it(path, kind):
    assert harness.filesystem_of(Path(path), MOUNTS) == kind


def test_the_bytes_that_a_process_writes_are_counted(tmp_path):
    if harness.filesystem_of(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("the temporary directory is in memory")
    before = harness.written_bytes()
    with open(tmp_path / "some", "wb") as file:
        file.write(bytes(1 << 20))
    assert harness.written_bytes() - before >= 1 << 20


@pytest.mark.parametrize("batch", [1, 10])
def test_every_body_is_given_to_exactly_one_thread(batch):
    bodies = [b"%d" % number for number in range(160)]
    shares = durable.split_among(bodies, 4, batch)
    parts = [part for share in shares for part in share]
    assert len(shares) == 4
    assert sorted(parts if batch == 1 else chain(*parts)) == sorted(bodies)


@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.parametrize("name", ["memory", "penstock embedded"])
def test_a_store_that_loses_nothing_passes_the_check(tmp_path, name, batch):
    held = durable.HeldStore(name, tmp_path / "store", "os")
    assert held.cycle(40, 1, batch).messages == 40
    assert held.push(40, 4, batch).rate > 0
    held.close_and_check()
    assert sorted(held.pulled) == sorted(held.pushed)


def test_a_message_lost_before_the_end_voids_the_run(tmp_path):
    held = durable.HeldStore("penstock embedded", tmp_path / "store", "sync")
    held.push(20, 2, 1)
    held.store.queues.purge(stores.QUEUE)
    with pytest.raises(harness.Void, match="20 were never pulled"):
        held.close_and_check()


def test_the_syncs_of_a_group_commit_are_counted(tmp_path):
    held = durable.HeldStore("penstock embedded", tmp_path / "store", "sync")
    measured = held.push(20, 1, 10)
    held.close_and_check()
    assert measured.syncs == 2
    assert measured.appended_bytes > 20 * durable.BODY_BYTES


@pytest.mark.parametrize("durability", ["interval", "none"])
def test_sqlite_is_not_compared_in_a_durability_that_it_does_not_have(durability):
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(NotImplementedError):
        stores.set_synchronous(connection, durability)


def test_without_a_row_there_is_neither_its_ratio_nor_its_target():
    race = durable.StoreRace("a race", durable.push, [])
    here = durable.StoreRow("penstock embedded", "sync")
    gone = durable.StoreRow("beanstalkd", "sync")
    race.rates = {here: [1.0, 2.0]}
    assert race.ratio(here, here) == 1
    assert race.ratio(here, gone) is None
    names = ("lifecycles", "lifecycles_in_tens", "pushes", "pushes_in_tens")
    assert list(durable.race_targets(dict.fromkeys(names, race))) == []


def test_with_all_rows_every_target_is_computed():
    races = durable.races()
    for race in races.values():
        race.rates = {row: [1.0] for row in race.rows}
    assert len(list(durable.race_targets(races))) == 13


def test_the_raw_limit_counts_what_it_synced(tmp_path):
    measured = durable.raw(tmp_path / "raw", 300, 16, 0.05)
    assert measured.messages == measured.syncs * 16
    assert measured.appended_bytes == measured.messages * 300


def test_pauses_are_measured_on_a_store_with_a_backlog(tmp_path):
    with penstock.connect(backlog.url(tmp_path / "store")) as queues:
        queues.create(stores.QUEUE)
        backlog.fill(queues, 50)
    gaps = backlog.pauses(tmp_path / "store", 50, 0.05)
    assert gaps["no pass"]["max_ms"] >= gaps["no pass"]["p50_ms"] > 0


def test_a_backlog_with_fewer_messages_than_were_pushed_voids_the_run(tmp_path):
    with penstock.connect(backlog.url(tmp_path / "store")) as queues:
        queues.create(stores.QUEUE)
        backlog.fill(queues, 50)
    with pytest.raises(harness.Void):
        backlog.pauses(tmp_path / "store", 60, 0.05)


def test_the_time_of_a_first_pull_includes_the_start_of_the_process(tmp_path):
    with penstock.connect(backlog.url(tmp_path / "store")) as queues:
        queues.create(stores.QUEUE)
        backlog.fill(queues, 5)
    found = backlog.first_pull(tmp_path / "store", 5)
    assert found["process_s"] > found["open_s"] + found["pull_s"] > 0


@pytest.mark.parametrize("place", durable_beside.PLACES)
def test_a_checkout_beside_another_does_its_work_in_its_own_process(tmp_path, place):
    url = durable_beside.PLACES[place].format(path=tmp_path) + "durability=os"
    load = durable_beside.LoadProcess(durable_beside.HERE, url, tmp_path)
    try:
        for each in durable_beside.LOADS:
            assert load.run(each, 0.01) > 0
        assert (tmp_path / "daemon" / "pid").exists() is (place == "daemon")
        load.close_and_check()
    finally:
        load.end()


def test_a_directory_without_penstock_is_no_checkout(tmp_path):
    with pytest.raises(SystemExit, match="is not a checkout of Penstock"):
        durable_beside.compare(tmp_path)
