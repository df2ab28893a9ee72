"""Sealed parts: messages whose events are dropped, with their rows in every table in parts.

The messages of a range are split between its part and its sealed parts, so each message has its
rows once, and what parts add to other tables stays the same sum. A split changes ten tables. All
files of it are written first, then a plan that names them:

    LAKE/retention.json   the split that is being committed, table by table

Every process that locks the tables completes the plan first. The events are dropped last
(`spark.retention`).
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from penstock.spark.lake import AddedFile, Lake, Table, TableFile
from penstock.spark.tables import FOLDS, MESSAGES, PART_TABLES, Derived

PLAN: Final = "retention.json"
# The application transaction that says which plan a table was last changed by.
SEAL: Final = "seal"


class SealPlan(msgspec.Struct, frozen=True):
    """One split: the files that each table gets, and the parts that they replace.

    `last_sequences` gives for each store the newest event that may be dropped.
    """

    id: int
    parts: list[str]
    added: dict[str, list[AddedFile]]
    last_sequences: dict[str, int]

    def save(self, lake: Lake) -> None:
        """Makes the plan durable: from here on it will be completed."""
        draft = lake.path / f".{PLAN}"
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(self))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(lake.path / PLAN)


def pending_plan(lake: Lake) -> SealPlan | None:
    """The plan that is not completed yet, if there is one."""
    try:
        found = (lake.path / PLAN).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(found, type=SealPlan)


def forget_plan(lake: Lake) -> None:
    """Removes the plan, which is completed."""
    (lake.path / PLAN).unlink()


def complete_tables(lake: Lake) -> None:
    """Commits what a plan still lacks in the tables. The caller holds their lock."""
    plan = pending_plan(lake)
    if plan is None:
        return
    for each in PART_TABLES:
        table = part_table(lake, each)
        if table.committed(SEAL) != plan.id:
            table.replace(plan.added[each.name], {SEAL: plan.id}, plan.parts)


def is_half_split(lake: Lake) -> bool:
    """Whether a split is in some of the tables only: they cannot be read together."""
    plan = pending_plan(lake)
    if plan is None:
        return False
    return {part_table(lake, each).committed(SEAL) for each in PART_TABLES} != {plan.id}


def part_table(lake: Lake, derived: Derived) -> Table:
    """A table in parts of the lake."""
    return lake.table(derived.name, derived.schema, in_parts=True)


def is_sealed(part: str | None) -> bool:
    """Whether this is the name of a sealed part."""
    return part is not None and "." in part


def sealed_files(files: Sequence[TableFile]) -> dict[str, tuple[str, ...]]:
    """For each range that has sealed parts, by its part's name, their files of these."""
    found: dict[str, tuple[str, ...]] = {}
    for each in files:
        if each.part is not None and is_sealed(each.part):
            name = each.part.partition(".")[0]
            found[name] = (*found.get(name, ()), each.path)
    return found


def sealed_folds(lake: Lake) -> list[str]:
    """Every file of `folds` of a sealed part."""
    files = part_table(lake, FOLDS).files()
    return [each.path for each in files if is_sealed(each.part)]


def count_dropped(lake: Lake) -> int:
    """How many messages have no events in the lake any more, by the statistics of their rows."""
    files = part_table(lake, MESSAGES).files()
    return sum(each.rows for each in files if is_sealed(each.part))


def next_seal(files: Sequence[TableFile], part: str) -> int:
    """The number of the next sealed part of a range."""
    seals = [Path(each).parent.name for each in sealed_files(files).get(part, ())]
    return 1 + max((int(name.rpartition(".")[2]) for name in seals), default=0)
