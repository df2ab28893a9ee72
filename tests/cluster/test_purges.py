"""Who may purge the log of a shard that is archived, on a log in memory."""

from typing import Any

import pytest

from penstock.cluster.archive import permit_purges
from penstock.cluster.journal import NO_ARCHIVE
from penstock.cluster.log import Mismatch, Swap, Unanswered
from penstock.cluster.membership import ARCHIVE_KEY, ARCHIVE_OFF, ARCHIVE_ON, set_register
from penstock.cluster.snapshots import manifest_key, note_archive
from penstock.service import Delete, Pull, Push
from penstock.steps import run_steps
from tests.cluster.plainlog import PlainLog
from tests.cluster.test_takeover import SHARD, OwnerOnLog, filled


@pytest.fixture
def log():
    return PlainLog()


@pytest.fixture
def owner(log, quick_path):
    """An owner without an archive, most of whose log is not needed any more."""
    owner = OwnerOnLog(log, quick_path).take()
    filled(owner, 40, 100_000)
    for claim in owner.do(Pull("q", 39)):
        owner.do(Delete("q", claim.receipt))
    assert owner.snapshot()
    owner.do(Push("q", b"after"))
    return owner


def switch(log, value):
    return run_steps(log.answer, set_register(ARCHIVE_KEY, value))


def note(log, revision):
    return run_steps(log.answer, note_archive(SHARD, revision))


def test_an_owner_without_an_archive_purges_if_there_is_none(log, owner):
    run_steps(log.answer, permit_purges(owner.journal))
    assert owner.snapshot()
    assert log.firsts[SHARD] > 30


def test_a_replaced_owner_without_an_archive_purges_nothing_that_the_next_one_archives(log, owner):
    """The next owner begins its archive between a read and a swap of the manifest."""
    noted: list[Any] = []

    def begin_archive(request):
        if type(request) is Swap and request.key == manifest_key(SHARD) and not noted:
            noted.append(True)
            noted.append(note(log, switch(log, ARCHIVE_ON)))

    log.fault = begin_archive
    first = log.firsts[SHARD]
    assert owner.snapshot()
    assert noted[1].position == 0
    assert log.firsts[SHARD] == first
    owner.do(Push("q", b"later"))
    assert owner.snapshot()
    assert log.firsts[SHARD] == first


def test_the_archive_of_a_shard_is_purged_again_once_the_cluster_has_no_archive(log, owner):
    note(log, switch(log, ARCHIVE_ON))
    first = log.firsts[SHARD]
    assert owner.snapshot()
    assert log.firsts[SHARD] == first
    # Another archive is on: nothing is permitted.
    owner.journal.archived_position = owner.journal.first_position
    run_steps(log.answer, permit_purges(owner.journal))
    assert owner.journal.archived_position != NO_ARCHIVE
    switch(log, ARCHIVE_OFF)
    run_steps(log.answer, permit_purges(owner.journal))
    owner.do(Push("q", b"later"))
    assert owner.snapshot()
    assert log.firsts[SHARD] > 30


def test_an_archive_that_is_begun_again_is_not_purged_by_an_old_permission(log, owner):
    switch(log, ARCHIVE_OFF)
    run_steps(log.answer, permit_purges(owner.journal))
    note(log, switch(log, ARCHIVE_ON))
    first = log.firsts[SHARD]
    assert owner.snapshot()
    assert log.firsts[SHARD] == first


def test_the_register_is_written_also_if_a_read_shows_its_value(log):
    """The read may lag: another node may have ended the archive meanwhile."""
    assert switch(log, ARCHIVE_ON) < switch(log, ARCHIVE_ON)


def test_a_note_that_was_refused_or_not_answered_is_written_again(log, owner):
    faults = [Mismatch(), Unanswered("no answer")]

    def refuse(request):
        if type(request) is Swap and faults:
            raise faults.pop()

    revision = switch(log, ARCHIVE_ON)
    log.fault = refuse
    note(log, revision)
    first = log.firsts[SHARD]
    assert not faults
    assert owner.snapshot()
    assert log.firsts[SHARD] == first
