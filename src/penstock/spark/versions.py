"""What a Delta table keeps of rows that are gone: older versions, and statistics in its commits.

    TABLE/_delta_log/00000000000000000007.json                 commit 7: files, their statistics
    TABLE/_delta_log/00000000000000000007.checkpoint.parquet   all that versions from 7 on need

`deltalake` writes the least and the greatest value of columns into each commit, texts too. Those of
a message's attributes would outlive its row, so commits have statistics of whole numbers and of
`store` only.

Opening a table reads every commit since the newest checkpoint. A watching run makes a commit of
each table in every round, so a checkpoint comes more often than by `deltalake`'s own interval.
"""

import os
import re
import time
from pathlib import Path
from typing import Final

from deltalake import DeltaTable, Schema

# The property of a table that names the columns whose statistics are kept.
_STATISTICS: Final = "delta.dataSkippingStatsColumns"
_INTERVAL: Final = "delta.checkpointInterval"
# How many commits lie between two checkpoints.
CHECKPOINT_COMMITS: Final = 20
_VERSION: Final = re.compile(r"\d{20}(?=\.)")
_CHECKPOINT: Final = ".checkpoint."


def table_properties(schema: Schema) -> dict[str, str]:
    """The properties of a new table: no texts in its commits, and how often it has checkpoints."""
    return {**_statistics_property(schema), _INTERVAL: str(CHECKPOINT_COMMITS)}


def _statistics_property(schema: Schema) -> dict[str, str]:
    names = [
        each.name
        for each in schema.fields
        if each.name == "store" or each.type.type in ("integer", "long")
    ]
    return {_STATISTICS: ",".join(names)}


def keep_texts_out(delta: DeltaTable) -> None:
    """Sets that property if a table lacks it, as those of earlier releases do, in one commit."""
    wanted = _statistics_property(delta.schema())
    if not wanted.items() <= delta.metadata().configuration.items():
        delta.alter.set_table_properties(wanted)


def drop_versions(delta: DeltaTable, path: Path, keep_hours: int) -> int:
    """Removes files and commits that no version of the last hours needs; how many files.

    The caller excludes processes that add files: until these are committed they count as unused.
    """
    removed = delta.vacuum(
        retention_hours=keep_hours, dry_run=False, enforce_retention_duration=False, full=True
    )
    # Files that a killed process did not finish: `deltalake` names them so, and removes none.
    for unfinished in path.rglob("*#[0-9]*"):
        unfinished.unlink()
    delta.update_incremental()
    delta.create_checkpoint()
    _drop_commits(path / "_delta_log", time.time() - 3_600 * keep_hours)
    return len(removed)


def _drop_commits(directory: Path, before_s: float) -> None:
    """Removes the commits before the newest checkpoint that is older than this instant."""
    found = [(path, _VERSION.match(path.name)) for path in directory.iterdir()]
    versions = {path: int(match[0]) for path, match in found if match is not None}
    checkpoints = {
        path: version
        for path, version in versions.items()
        if _CHECKPOINT in path.name and path.stat().st_mtime <= before_s
    }
    first = max(checkpoints.values(), default=0)
    # A power cut must not leave a table without its first commits and without the checkpoint.
    for path in (*(each for each, version in checkpoints.items() if version == first), directory):
        _sync(path)
    for path, version in versions.items():
        if version < first:
            path.unlink()


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
