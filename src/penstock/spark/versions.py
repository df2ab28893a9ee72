"""What a Delta table keeps of rows that are gone: older versions, and statistics in its commits.

    TABLE/_delta_log/00000000000000000007.json                 commit 7: files, their statistics
    TABLE/_delta_log/00000000000000000007.checkpoint.parquet   all that versions from 7 on need

`deltalake` writes the least and the greatest value of columns into each commit, texts too. Those of
a message's attributes would outlive its row, so commits have statistics of whole numbers and of
`store` only.

Opening a table reads every commit since the newest checkpoint. A watching run makes a commit of
each table in every round, so a checkpoint comes more often than by `deltalake`'s own interval.
"""

import json
import os
import re
import time
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from deltalake import DeltaTable, Schema

# The property of a table that names the columns whose statistics are kept.
_STATISTICS: Final = "delta.dataSkippingStatsColumns"
_INTERVAL: Final = "delta.checkpointInterval"
# How many commits lie between two checkpoints.
CHECKPOINT_COMMITS: Final = 20
_VERSION: Final = re.compile(r"\d{20}(?=\.)")
_CHECKPOINT: Final = ".checkpoint."
_LAST_CHECKPOINT: Final = "_last_checkpoint"


class NewestCommit(NamedTuple):
    """The last commit of a table, with the application transactions that it carries.

    Inode and time of its file would not do: a table that is removed and made again may have a
    commit of the same version with both. The content has random names of files, and the time.
    """

    version: int
    digest: bytes
    transactions: tuple[tuple[str, int], ...]


def newest_commit(directory: Path, known: int | None = None) -> NewestCommit | None:
    """The last commit in a log, None if it cannot be read. `known` is one that was there before.

    Versions have no gaps, so the files behind a known one, or behind the last checkpoint, are
    looked for by their names. The log is listed only if neither is there: it grows with every
    commit, and a run looks at each table many times.
    """
    starts = iter((known, _last_checkpoint(directory)))
    version = next(
        (at for at in starts if at is not None and _commit(directory, at).exists()), None
    )
    if version is None:
        version = max(_listed_commits(directory), default=None)
    if version is None:
        return None
    while _commit(directory, version + 1).exists():
        version += 1
    try:
        content = _commit(directory, version).read_bytes()
    except OSError:
        return None
    digest = blake2b(content, digest_size=16).digest()
    return NewestCommit(version, digest, _transactions(content))


def _transactions(commit: bytes) -> tuple[tuple[str, int], ...]:
    """The application transactions in a commit, as far as they can be read."""
    lines = [line for line in commit.splitlines() if line.startswith(b'{"txn":')]
    try:
        found = [json.loads(line)["txn"] for line in lines]
        return tuple((each["appId"], each["version"]) for each in found)
    except (ValueError, KeyError, TypeError):
        return ()


def commits_in(directory: Path) -> int:
    """How many commits a log has."""
    return len(_listed_commits(directory))


def _commit(directory: Path, version: int) -> Path:
    return directory / f"{version:020d}.json"


def _last_checkpoint(directory: Path) -> int | None:
    try:
        return int(json.loads((directory / _LAST_CHECKPOINT).read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _listed_commits(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [int(name[:20]) for name in names if _VERSION.match(name) and name.endswith(".json")]


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


def drop_versions(
    delta: DeltaTable, path: Path, keep_hours: int, commit_hours: int | None = None
) -> int:
    """Removes files and commits that no version of the last hours needs; how many files.

    With `commit_hours`, commits that no version of so many hours needs: a reader that has opened an
    older version needs its files only.

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
    commit_hours = keep_hours if commit_hours is None else commit_hours
    _drop_commits(path / "_delta_log", time.time() - 3_600 * commit_hours)
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
    # The oldest first: whoever finds a commit, such as `newest_commit`, finds all behind it.
    for path, version in sorted(versions.items(), key=lambda each: each[1]):
        if version < first:
            path.unlink()


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
