"""Closed and sealed parts: messages that have ended, apart from the others of their range.

    STORE-SHARD-N      the messages of the range N that are in no other part: the open part
    STORE-SHARD-N_K    closed: they have ended. Made again only if an event of one of them comes
    STORE-SHARD-N.K    sealed: their events are dropped (`spark.retention`). Never made again

Each message has its rows in one of these, and what parts add to other tables stays the same sum. A
change of parts changes several tables, which must agree on which message is in which part. All
files of it are written first, then a plan that names them:

    LAKE/parts.json        the change that a run is committing, table by table
    LAKE/retention.json    the same of a retention, which drops events after that

Every process that locks the tables completes such a plan first.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from penstock.spark.lake import AddedFile, Lake, Table, TableFile, commit_all
from penstock.spark.tables import FOLDS, MESSAGES, PART_TABLES, SUMMED_TABLES, Derived

# A plan of a run and a plan of a retention: their files, and the application transactions that say
# which plan a table was last changed by. Both may exist: a retention drops its events last.
_RUN: Final = "parts.json", "plan"
_RETENTION: Final = "retention.json", "seal"
SEAL: Final = _RETENTION[1]


class PartsPlan(msgspec.Struct, frozen=True):
    """One change: the files that each table gets, and the parts that they replace, None for all.

    `sets` are the sets of parts that are replaced in the tables that have those (`spark.sums`).
    `transactions` go into each commit. Of a retention, `last_sequences` gives for each store the
    newest event that may be dropped.
    """

    id: int
    parts: list[str] | None
    added: dict[str, list[AddedFile]]
    # A plan of an older version has none: there, these tables had parts as all others.
    sets: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    transactions: dict[str, int] = {}
    last_sequences: dict[str, int] = {}

    def replaced_in(self, table: Derived) -> list[str] | None:
        """What is replaced in a table, None for all."""
        if table in SUMMED_TABLES and self.sets is not msgspec.UNSET:
            return self.sets
        return self.parts

    def save(self, lake: Lake) -> None:
        """Makes the plan durable: from here on it will be completed."""
        name, _ = _RETENTION if self.last_sequences else _RUN
        draft = lake.path / f".{name}"
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(self))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(lake.path / name)


def _read_plan(lake: Lake, name: str) -> PartsPlan | None:
    try:
        found = (lake.path / name).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(found, type=PartsPlan)


def pending_plan(lake: Lake) -> PartsPlan | None:
    """The plan of a retention whose events are not dropped yet, if there is one."""
    return _read_plan(lake, _RETENTION[0])


def forget_plan(lake: Lake) -> None:
    """Removes the plan of a retention, which is completed."""
    (lake.path / _RETENTION[0]).unlink()


def complete_tables(lake: Lake) -> None:
    """Commits what a plan still lacks in the tables. The caller holds their lock."""
    for name, transaction in (_RETENTION, _RUN):
        plan = _read_plan(lake, name)
        if plan is None:
            continue
        commit_all(partial(_complete, lake, plan, transaction, each) for each in PART_TABLES)
    (lake.path / _RUN[0]).unlink(missing_ok=True)


def _complete(lake: Lake, plan: PartsPlan, transaction: str, derived: Derived) -> None:
    table = part_table(lake, derived)
    if table.committed(transaction) != plan.id:
        transactions = {**plan.transactions, transaction: plan.id}
        # A plan of an older version names no files of a table that was added since.
        added = plan.added.get(derived.name, [])
        table.replace(added, transactions, plan.replaced_in(derived))


def is_half_committed(lake: Lake) -> bool:
    """Whether a plan is committed to some of the tables only: they cannot be read together."""
    for name, transaction in (_RETENTION, _RUN):
        plan = _read_plan(lake, name)
        tables = [part_table(lake, each) for each in PART_TABLES]
        if plan is not None and {each.committed(transaction) for each in tables} != {plan.id}:
            return True
    return False


def part_table(lake: Lake, derived: Derived) -> Table:
    """A table in parts of the lake."""
    return lake.table(derived.name, derived.schema, in_parts=True)


def range_of(part: str) -> str:
    """The name of the open part of the range that a part is of."""
    return part.partition(".")[0].partition("_")[0]


def is_sealed(part: str | None) -> bool:
    """Whether this is the name of a sealed part."""
    return part is not None and "." in part


def is_closed(part: str | None) -> bool:
    """Whether this is the name of a closed part."""
    return part is not None and "_" in part


def sealed_files(files: Sequence[TableFile]) -> dict[str, tuple[str, ...]]:
    """For each range that has sealed parts, by its part's name, their files of these."""
    return _by_range([each for each in files if is_sealed(each.part)])


def closed_files(files: Sequence[TableFile]) -> dict[str, tuple[str, ...]]:
    """For each range that has closed parts, by its part's name, their files of these."""
    return _by_range([each for each in files if is_closed(each.part)])


def _by_range(files: Sequence[TableFile]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for each in files:
        name = range_of(str(each.part))
        found[name] = (*found.get(name, ()), each.path)
    return found


def part_of(path: str) -> str:
    """The name of the part that a file of a table in parts is of, by its path."""
    return Path(path).parent.name.partition("=")[2]


def next_number(files: Sequence[str]) -> int:
    """The number of the next part of its kind in a range that has these files."""
    return 1 + max((int(part_of(path).rpartition(".")[2].rpartition("_")[2]) for path in files),
                   default=0)  # fmt: skip


def sealed_folds(lake: Lake) -> list[str]:
    """Every file of `folds` of a sealed part."""
    files = part_table(lake, FOLDS).files()
    return [each.path for each in files if is_sealed(each.part)]


def count_dropped(lake: Lake) -> int:
    """How many messages have no events in the lake any more, by the statistics of their rows."""
    files = part_table(lake, MESSAGES).files()
    return sum(each.rows for each in files if is_sealed(each.part))
