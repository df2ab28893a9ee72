"""Retention: drops the events of messages that ended long ago, and keeps what follows from them.

A message's events are dropped when it ended before a given instant, the tables hold it, and the
audit has judged it and found nothing about it. Its rows in the tables stay, in a sealed part
(`spark.seals`), and so does its row in `folds`, or its `irregular_events`: audits go on from those.
What is lost is its body, its attributes, and the text of each of its events. Events of queues are
never dropped.

    messages ─▶ chosen ─▶ a task a part: its sealed part, and the part without it ─▶ plan
    plan ─▶ the tables in parts, one commit each ─▶ events, rewritten without the sealed messages

Killed before the plan is saved, nothing has changed; after that, the next run, audit or retention
completes the tables, and the next retention drops the events.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.spark import part_events
from penstock.spark.audit import audit, is_judged
from penstock.spark.derive import files_of, is_up_to_date, table_of
from penstock.spark.distribute import OpenSpark, Progress, distribute, no_progress
from penstock.spark.duck import DuckConnection, quoted
from penstock.spark.fold import (
    FoldedPart,
    FoldWork,
    RangeWork,
    files_added,
    fold_parts,
    view_unsealed,
)
from penstock.spark.ingest import events_table
from penstock.spark.lake import Lake, LakeBusy, TableFile, locked, our_errors, scratch
from penstock.spark.part_events import LakePart
from penstock.spark.schemas import columns_of
from penstock.spark.seals import (
    SEAL,
    PartsPlan,
    complete_tables,
    forget_plan,
    is_sealed,
    next_number,
    pending_plan,
    range_of,
    sealed_files,
    sealed_folds,
)
from penstock.spark.selection import SCHEMA
from penstock.spark.sums import PartSums, sets_of
from penstock.spark.tables import FINDINGS, FOLDS, MESSAGES, QUEUES, SUMMED_TABLES

# A part is split only if at least one in so many of its messages can be sealed: a split costs as
# much as a fold, and leaves one more file in every table.
_SHARE: Final = 4


@dataclass(frozen=True)
class Dropped:
    """What a retention removed: events, of how many messages."""

    messages: int = 0
    events: int = 0


@dataclass(frozen=True)
class SplitPart:
    """What a task made: the sealed part, and the parts that are left of its range."""

    sealed: FoldedPart
    rest: list[FoldedPart]
    sums: list[dict[str, str]]


def drop_before(
    open_spark: OpenSpark, lake: Lake, before_ms: int, progress: Progress = no_progress
) -> Dropped:
    """Drops the events of messages that ended before this instant.

    Updates the tables and audits what changed first. Raises LakeUnusable, or LakeBusy if
    another process is changing the lake.
    """
    with our_errors():
        audit(open_spark, lake, progress=lambda part: progress(part / 3))
        with locked(lake, "events"):
            done = _drop(open_spark, lake, before_ms, lambda part: progress((1 + part) / 3))
        # The version of `events` has changed: the tables are marked as made from it.
        audit(open_spark, lake, progress=lambda part: progress((2 + part) / 3))
    return done


def _drop(open_spark: OpenSpark, lake: Lake, before_ms: int, progress: Progress) -> Dropped:
    # An audit would find the events of a life in one part and its row in `folds` in another.
    with locked(lake, "tables"), locked(lake, "verdicts"), scratch(lake, "retention") as directory:
        # A plan of an earlier process is completed first, with its own events.
        complete_tables(lake)
        first = _drop_sealed(lake)
        if first.messages:
            return first
        if not is_up_to_date(lake) or not is_judged(lake):
            raise LakeBusy(f"{lake.path}: has new events since its audit; run the command again")
        plan = _Split(open_spark, lake, directory).plan(before_ms, progress)
        if plan is None:
            return Dropped()
        plan.save(lake)
        complete_tables(lake)
        return _drop_sealed(lake)


@dataclass
class _Split:
    """The parts of a lake whose messages can be sealed."""

    open_spark: OpenSpark
    lake: Lake
    scratch: Path

    def plan(self, before_ms: int, progress: Progress) -> PartsPlan | None:
        """Writes the files of the split; None if there is nothing to seal."""
        chosen = self.scratch / "chosen.parquet"
        with DuckConnection(len(os.sched_getaffinity(0))) as duck:
            parts = self._choose(duck, before_ms, chosen)
            queues = self.scratch / "queues.parquet"
            duck.files(
                "queues", [e.path for e in table_of(self.lake, QUEUES).files()], QUEUES.types
            )
            if parts:
                duck.write("SELECT * FROM queues", str(queues))
        if not parts:
            return None
        folds = table_of(self.lake, FOLDS).files()
        sealed = sealed_files(folds)
        files = events_table(self.lake).files()
        work = [
            FoldWork(
                (
                    RangeWork(
                        replace(part, seal=next_number(sealed.get(part.name, ()))),
                        tuple(files_of(files, part)),
                        sealed.get(part.name, ()),
                    ),
                ),
                str(queues),
                str(self.lake.path),
                str(self.scratch),
                str(chosen),
            )
            for part in parts
        ]
        made = distribute(self.open_spark, split_part, work, SplitPart, self.scratch, progress)
        ranges = {part.name for part in parts}
        return self._plan_of(made, [p for p in map(_name, folds) if range_of(p) in ranges])

    def _plan_of(self, made: Sequence[SplitPart], before: Sequence[str]) -> PartsPlan:
        """The plan of these splits of ranges, which had these parts before."""
        last: dict[str, int] = {}
        for each in made:
            store = each.sealed.part.store
            newest = int(each.sealed.added[FOLDS.name].largest["last_sequence"])
            last[store] = max(newest, last.get(store, 0))
        parts = [part for each in made for part in (each.sealed, *each.rest)]
        open_before = [name for name in before if not is_sealed(name)]
        names = sorted({*open_before, *(part.part.name for part in parts)})
        with DuckConnection(len(os.sched_getaffinity(0))) as duck:
            sums = PartSums(self.lake, duck)
            new = [part.part.name for part in parts]
            sums.replace(names, new, [files for each in made for files in each.sums])
            sets = sets_of(names)
            summed = {each.name: sums.write(each, sets) for each in SUMMED_TABLES}
        added = {**files_added(parts), **summed}
        return PartsPlan(time.time_ns(), names, added, sets, last_sequences=last)

    def _choose(self, duck: DuckConnection, before_ms: int, chosen: Path) -> list[LakePart]:
        """Writes which messages are to be sealed; the parts that they are of."""
        messages = [
            each.path
            for each in table_of(self.lake, MESSAGES).files()
            if not is_sealed(each.part) and each.smallest.get("pushed_at_ms", 0) < before_ms
        ]
        duck.files("messages", messages, MESSAGES.types)
        findings = [each.path for each in table_of(self.lake, FINDINGS).files()]
        duck.files("findings", findings, FINDINGS.types)
        part = f"message // {part_events.PART_MESSAGES}"
        duck.table(
            "old",
            f"""
            SELECT store, shard, message, {part} AS nth, last_sequence FROM messages
            WHERE standing IS NULL AND state <> 'departed' AND ended_at_ms < {before_ms}
              AND NOT EXISTS (SELECT 1 FROM findings WHERE findings.store = messages.store
                AND findings.shard = messages.shard AND findings.message = messages.message)""",
        )
        found = duck.fetch(f"""
            WITH held AS (
              SELECT store, shard, {part} AS nth, count(*) AS messages FROM messages GROUP BY ALL
            ), sealable AS (
              SELECT store, shard, nth, count(*) AS messages FROM old GROUP BY ALL
            )
            SELECT store, shard, nth FROM sealable JOIN held USING (store, shard, nth)
            WHERE {_SHARE} * sealable.messages >= held.messages ORDER BY ALL""")
        duck.write("SELECT * FROM old", str(chosen))
        return [
            LakePart(store, shard, nth, part_events.PART_MESSAGES) for store, shard, nth in found
        ]


def split_part(work: FoldWork, threads: int) -> SplitPart:
    """Makes the files of a sealed part, and those of its range without it."""
    first = fold_parts(work, threads)
    [sealed] = first.parts
    path = Path(work.lake, FOLDS.name, sealed.added[FOLDS.name].path)
    [given] = work.ranges
    rest = replace(given, part=replace(given.part, seal=0), sealed=(*given.sealed, str(path)))
    others = fold_parts(FoldWork((rest,), work.queues, work.lake, work.scratch), threads)
    return SplitPart(sealed, others.parts, [first.sums, others.sums])


def _name(file: TableFile) -> str:
    return str(file.part)


def _drop_sealed(lake: Lake) -> Dropped:
    """Removes the events of the pending plan, whose tables are complete."""
    plan = pending_plan(lake)
    if plan is None:
        return Dropped()
    table = events_table(lake)
    before = table.rows()
    if table.committed(SEAL) != plan.id:
        condition = " OR ".join(
            f"(store = {quoted(store)} AND sequence <= {last})"
            for store, last in plan.last_sequences.items()
        )
        columns = ", ".join(f'"{name}"' for name in columns_of(SCHEMA))
        # One thread keeps the order of the rows, on which the statistics of files depend.
        with DuckConnection() as duck:
            duck.files("all_events", [each.path for each in table.files()], {})
            view_unsealed(duck, "kept_events", "all_events", sealed_folds(lake))
            kept = duck.stream(f"SELECT {columns} FROM kept_events WHERE {condition}")
            table.overwrite(condition, kept, {SEAL: plan.id})
    sealed = [each for each in plan.added[MESSAGES.name] if is_sealed(each.part)]
    forget_plan(lake)
    return Dropped(sum(each.rows for each in sealed), before - table.rows())
