"""Row 9: archives in runs that are scripted, with the code as it is and with planted faults.

Nothing may be purged from the log of a shard that is archived before it is in the archive.
"""

import itertools

import pytest

from penstock.cluster.membership import ARCHIVE_KEY
from penstock.service import Delete, Pull, Push
from tests.simulation import planted
from tests.simulation.nodes import SimulatedNode
from tests.simulation.script import ClusterScript

PADDING = b" " * 600
_numbers = itertools.count()


def found(play, path, node_class, archive):
    """The rule that a scripted run breaks; None if none."""
    path.mkdir()
    script = ClusterScript(path, node_class, archive=archive)
    play(script)
    script.close()
    return script.violation


def use(script, count=12):
    """Pushes and deletes messages, so that most of the log is not needed any more."""
    for _ in range(count):
        if script.violation is not None:
            return
        script.ask(Push("q0", b"%d" % next(_numbers) + PADDING))
        (claim,) = script.ask(Pull("q0"))
        script.ask(Delete("q0", claim.receipt))


def snapshot(script, node):
    """Takes two snapshots: after the second, the log is purged up to the first."""
    for _ in range(2):
        use(script, 3)
        node.run(lambda: node.take_snapshot(0))
        script.until(lambda: node.owned[0].snapshot is None)


def first_slot(script):
    return script.cluster.streams.shards[0].first


def until_archived(script):
    for _ in range(100):
        if script.violation is not None or script.cluster.archives.is_complete(0):
            return
        script.wait(100)
    script.cluster.schedule.violate("it is not archived after ten seconds")


def the_archive_cannot_be_written_for_a_while(script):
    """The log is kept meanwhile, and purged once it is archived."""
    disk = script.cluster.archives.disk
    use(script)
    until_archived(script)
    disk.is_full = True
    archived = len(script.cluster.archives.entries(0))
    use(script, 30)
    snapshot(script, script.node)
    kept = script.truths[0].position_of(first_slot(script))
    if script.violation is None:
        assert kept <= script.truths[0].entries[archived].offset
    disk.is_full = False
    until_archived(script)
    snapshot(script, script.node)
    if script.violation is None:
        assert script.truths[0].position_of(first_slot(script)) > kept
    script.cluster.archives.check_entries(0)


def the_owner_stops_before_it_has_synced(script):
    """What it has written may be lost with the machine: it must not count as archived."""
    use(script)
    script.wait(1_000)
    snapshot(script, script.node)
    snapshot(script, script.node)


def the_owner_is_replaced_while_entries_are_not_kept(script):
    """What it has decided in memory is not in the log, and must not be in the archive."""
    use(script)
    until_archived(script)
    script.cluster.streams.shards[0].change_leader(election_ms=3_000)
    script.begin(Push("q0", b"never kept", dedup_id="1"))
    script.wait(1_500)
    script.node.stop()
    script.serve(script.third)
    script.until_replied(len(script.replies) + 1)
    use(script, 2)
    script.wait(2_000)
    script.cluster.archives.check_entries(0)


def an_owner_without_an_archive_reads_an_old_register(script):
    """It must not purge what the owner before it has not archived yet."""
    use(script)
    until_archived(script)
    script.cluster.archives.disk.is_full = True
    use(script)
    registers = script.cluster.streams.registers
    look = registers.look

    def look_late(key, answered):
        """A replica that lags does not have this register yet."""
        if key == ARCHIVE_KEY:
            answered(None, None)
        else:
            look(key, answered)

    registers.look = look_late
    script.node.stop()
    script.serve(script.other)
    script.wait(1_000)
    snapshot(script, script.other)
    snapshot(script, script.other)


@pytest.mark.parametrize(
    ("play", "archive", "planted_fault", "rule"),
    [
        (
            the_archive_cannot_be_written_for_a_while,
            "all",
            planted.PurgesBeforeItHasArchived,
            "and the archive ends with",
        ),
        (
            the_archive_cannot_be_written_for_a_while,
            "all",
            planted.AFullDiskEndsTheArchive,
            "is not archived after",
        ),
        (
            the_owner_stops_before_it_has_synced,
            "all",
            planted.ArchivesWithoutSyncs,
            "and the archive ends with",
        ),
        (
            the_owner_is_replaced_while_entries_are_not_kept,
            "all",
            planted.ArchivesWhatIsNotKept,
            "differs from its log",
        ),
        (
            an_owner_without_an_archive_reads_an_old_register,
            "some",
            planted.PurgesByTheRegisterAlone,
            "and the archive ends with",
        ),
        (
            an_owner_without_an_archive_reads_an_old_register,
            "some",
            planted.PurgesWhatOthersArchive,
            "and the archive ends with",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_nothing_is_purged_before_it_is_archived(play, archive, planted_fault, rule, quick_path):
    """Row 9: the archive has everything that the log no longer has."""
    assert found(play, quick_path / "real", SimulatedNode, archive) is None
    violation = found(play, quick_path / "planted", planted_fault, archive)
    assert violation is not None
    assert rule in violation
