"""The audit of a lake: judges the parts that changed since the last one, and keeps what it found.

    folds, irregular_events ─▶ tasks of some parts (`spark.judge`) ─▶ findings, balances, in parts
    balances, queue_events ─▶ findings about whole journals, in the part `stores`

A part is judged again when its fold was made again or the settings known of its queues changed: the
rows of `balances` name the file of the fold they came from, and the context. A finding stays until
its part is judged again.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.core.receipts import MessageIds
from penstock.spark import checks
from penstock.spark.blocks import INDEX_BITS
from penstock.spark.checks import CHECKS, CheckFinding
from penstock.spark.derive import derive, files_of, table_of
from penstock.spark.distribute import OpenSpark, Progress, distribute, no_progress
from penstock.spark.duck import GROUP_ROWS, DuckConnection, no_rows, quoted, read_files
from penstock.spark.fold import view_unsealed
from penstock.spark.ingest import copy_events, events_table
from penstock.spark.judge import (
    JudgedPart,
    JudgeWork,
    PartFiles,
    fold_of,
    judge_parts,
    parts_of,
    parts_with_groups,
    parts_with_ids,
    tasks_of,
    write_waiting,
)
from penstock.spark.lake import Lake, LakeBusy, locked, our_errors, scratch
from penstock.spark.part_events import LakePart
from penstock.spark.queries import load_query
from penstock.spark.schemas import arrow_rows, duck_types
from penstock.spark.seals import (
    count_dropped,
    is_half_committed,
    is_sealed,
    range_of,
    sealed_files,
    sealed_folds,
)
from penstock.spark.selection import SCHEMA
from penstock.spark.tables import (
    BALANCES,
    FINDINGS,
    FOLDS,
    IRREGULAR_EVENTS,
    QUEUE_EVENTS,
    QUEUES,
)

SHOWN_MAX: Final = 20
_SOURCE: Final = "folds"
# The part of `findings` that is about whole journals.
_STORES: Final = "stores"
_Key = tuple[str, int, int]
# The file of the fold, and the context, that a part was last judged by.
_Judged = tuple[str, str]
_FOUND: Final = ", ".join(f'"{name}"' for name in FINDINGS.columns)


@dataclass(frozen=True)
class AuditFinding:
    """One place where a check does not hold, and the life of the message it is about."""

    check: str
    store: str
    entry: int
    message_id: str | None
    queue: str | None
    detail: str
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """How often each check failed, and the first findings of each."""

    events: int
    counts: dict[str, int]
    findings: tuple[AuditFinding, ...]
    parts: int = 0
    judged_parts: int = 0
    # Whether `events` has more than the tables, which another process is making.
    is_behind: bool = False
    # Messages that are judged by what the lake keeps of them: their events were dropped.
    dropped: int = 0

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return not any(self.counts.values())


def audit(
    open_spark: OpenSpark,
    lake: Lake,
    engine: Mapping[str, int] | None = None,
    shown_max: int = SHOWN_MAX,
    progress: Progress = no_progress,
    *,
    everything: bool = False,
) -> Verdict:
    """Judges what changed, or everything, and gives the verdict on the whole lake.

    `engine` says how many messages each queue holds by the engine's own count, at the end of the
    events; without it, queues are compared only with what their purges and removals counted. Raises
    LakeUnusable, or LakeBusy if another audit of the lake is running.
    """
    with our_errors(), locked(lake, "verdicts"):
        is_behind = False
        try:
            derive(open_spark, lake, lambda part: progress(part / 2))
        except LakeBusy:
            if is_half_committed(lake):
                raise
            # A run is making them. The tables that it has committed so far can be judged.
            is_behind = True
        cores = len(os.sched_getaffinity(0))
        with scratch(lake, "audit") as directory, DuckConnection(cores) as duck:
            made = _Audit(open_spark, lake, duck, directory)
            judged = made.judge(everything, lambda part: progress(0.5 + part / 2))
            found = made.findings(engine or {})
            counts = dict.fromkeys(CHECKS, 0)
            for finding in found:
                counts[finding.check] += 1
            shown = made.shown(found, shown_max)
            progress(1)
            return Verdict(
                made.events(), counts, shown, len(made.parts), judged, is_behind,
                count_dropped(lake),
            )  # fmt: skip


def is_judged(lake: Lake) -> bool:
    """Whether the last audit was of the tables as they are now; reads only Delta's log."""
    folds = table_of(lake, FOLDS).delta()
    version = -1 if folds is None else folds.version()
    return table_of(lake, FINDINGS).committed(_SOURCE) == version


def audit_journal(
    open_spark: OpenSpark,
    journal: str,
    archive: str | None = None,
    engine: Mapping[str, int] | None = None,
    shown_max: int = SHOWN_MAX,
    progress: Progress = no_progress,
) -> Verdict:
    """Audits a journal by itself: its events, without bodies, go into a lake that is then removed.

    The lake is made where Spark keeps its temporary files; executors must see it.
    """
    with tempfile.TemporaryDirectory(
        prefix="penstock-audit-", dir=os.environ.get("SPARK_LOCAL_DIRS")
    ) as directory:
        lake = Lake.open(Path(directory, "lake"), create=True)
        with our_errors():
            copy_events(open_spark, lake, journal, archive, lambda part: progress(part / 3))
        return audit(open_spark, lake, engine, shown_max, lambda part: progress((1 + 2 * part) / 3))


class _Audit:
    """One audit of one snapshot of the tables."""

    def __init__(
        self, open_spark: OpenSpark, lake: Lake, duck: DuckConnection, scratch: Path
    ) -> None:
        self._open_spark = open_spark
        self._lake = lake
        self._duck = duck
        self._scratch = scratch
        folds = self._folds = table_of(lake, FOLDS).delta()
        self._version = -1 if folds is None else folds.version()
        self.parts = parts_of(
            table_of(lake, FOLDS).files(folds), table_of(lake, IRREGULAR_EVENTS).files()
        )
        self._files("queue_events", QUEUE_EVENTS)
        self._describes_queues = False

    def _describe_queues(self) -> None:
        if not self._describes_queues:
            checks.describe_queues(self._duck)
            self._describes_queues = True

    def _files(self, name: str, derived: Any) -> None:
        paths = [each.path for each in table_of(self._lake, derived).files()]
        self._duck.files(name, paths, derived.types)

    def _load_balances(self) -> dict[str, _Judged]:
        """Makes `balances`, what the events of each part come to, and says how each was judged.

        It may be called by another thread than the one that uses the connection.
        """
        files = {each.path: str(each.part) for each in table_of(self._lake, BALANCES).files()}
        with self._duck.other_thread() as duck:
            rows = no_rows({**BALANCES.types, "filename": "varchar"})
            if files:
                rows += f" UNION ALL BY NAME SELECT * FROM {read_files(*files, named=True)}"
            duck.table("balances", rows)
            found = duck.fetch("SELECT DISTINCT filename, folds, context FROM balances")
        return {files[path]: (fold, context) for path, fold, context in found}

    def _replace_balances(self, parts: Sequence[str], made: Sequence[JudgedPart]) -> None:
        """Puts the rows of new files in the place of those of these parts, also in `balances`."""
        table = table_of(self._lake, BALANCES)
        names = set(parts)
        old = [each.path for each in table.files() if each.part in names]
        added = [each.balances for each in made]
        table.replace(added, {}, None if table.delta() is None else parts)
        if old:
            gone = ", ".join(map(quoted, old))
            self._duck.run(f"DELETE FROM balances WHERE filename IN ({gone})")
        if added:
            files = read_files(*(str(table.path / each.path) for each in added), named=True)
            self._duck.run(f"INSERT INTO balances BY NAME SELECT * FROM {files}")

    def judge(self, everything: bool, progress: Progress) -> int:
        """Judges the parts that changed, and then the journals; how many parts that were."""
        findings = table_of(self._lake, FINDINGS)
        if not everything and findings.committed(_SOURCE) == self._version:
            self._load_balances()
            checks.describe_stores(self._duck)
            return 0
        with ThreadPoolExecutor(1) as beside:
            # They are in many small files.
            loaded = beside.submit(self._load_balances)
            self._describe_queues()
            contexts = self._contexts()
            before = loaded.result()
        changed = [
            part
            for part in self.parts
            if everything or before.get(part.part) != (fold_of(part), contexts[part.part])
        ]
        names = [part.part for part in changed] + self._lost_parts(contexts)
        made = self._distribute(changed, contexts, progress)
        if names or table_of(self._lake, BALANCES).delta() is None:
            # Findings first: a part counts as judged once its balances say so.
            added = [each.findings for each in made if each.findings is not None]
            findings.replace(added, {}, None if findings.delta() is None else names)
            self._replace_balances(names, made)
        checks.load_engine(self._duck, {})
        checks.describe_stores(self._duck)
        rows = checks.find_in_stores(self._duck, self._view_events)
        found = [findings.write(_STORES, arrow_rows(FINDINGS.schema, rows), GROUP_ROWS)]
        # The last of the commits says that all of them are there.
        findings.replace(found, {_SOURCE: self._version}, [_STORES])
        return len(changed)

    def _lost_parts(self, parts: Mapping[str, str]) -> list[str]:
        """Parts that were judged once and have no rows any more: retention sealed all of them."""
        tables = (table_of(self._lake, BALANCES), table_of(self._lake, FINDINGS))
        judged = {str(each.part) for table in tables for each in table.files()}
        return sorted(judged - set(parts) - {_STORES})

    def _contexts(self) -> dict[str, str]:
        parts = [(each.part, each.store, each.shard, each.last_sequence) for each in self.parts]
        return checks.contexts(self._duck, parts) if parts else {}

    def _distribute(
        self, changed: Sequence[PartFiles], contexts: Mapping[str, str], progress: Progress
    ) -> list[JudgedPart]:
        for name in ("periods", "emptyings"):
            self._duck.write(f"SELECT * FROM {name}", str(self._scratch / f"{name}.parquet"))
        sealed = sealed_files(table_of(self._lake, FOLDS).files(self._folds))
        fifo = set(self._duck.fetch("SELECT DISTINCT store, shard FROM periods WHERE fifo"))
        tasks = tasks_of(changed)
        counts = Counter(map(_shard_of, tasks))
        shared = {shard for shard in fifo if counts[shard] > 1}
        for shard in shared:
            parts = [each for each in self.parts if (each.store, each.shard) == shard]
            write_waiting(self._duck, str(self._scratch), parts)
        work = [
            JudgeWork(
                own,
                tuple(contexts[part.part] for part in own),
                parts_with_groups(own, self.parts, fifo, waiting=_shard_of(own) in shared),
                parts_with_ids(own, self.parts),
                str(self._scratch),
                str(self._lake.path),
                tuple(path for name in _ranges_of(own) for path in sealed.get(name, ())),
                _shard_of(own) in shared,
            )
            for own in tasks
        ]
        made = distribute(
            self._open_spark, judge_parts, work, list[JudgedPart], self._scratch, progress,
            size=len(changed),
        )  # fmt: skip
        return [part for parts in made for part in parts]

    def _view_events(self) -> None:
        """All events, for the passes that are seldom needed; of those dropped, what is kept."""
        paths = [each.path for each in events_table(self._lake).files()]
        types = {**duck_types(SCHEMA), "message": "bigint"}
        self._duck.files("stored_events", paths, types)
        view_unsealed(self._duck, "kept_events", "stored_events", sealed_folds(self._lake))
        irregular = table_of(self._lake, IRREGULAR_EVENTS).files()
        sealed = [each.path for each in irregular if is_sealed(each.part)]
        self._duck.files("sealed_irregular", sealed, IRREGULAR_EVENTS.types)
        self._duck.view("events", load_query("audit/all_events"))

    def findings(self, engine: Mapping[str, int]) -> list[CheckFinding]:
        """Every finding of the lake, old and new."""
        files = table_of(self._lake, FINDINGS).files()
        self._duck.files(
            "kept", [each.path for each in files if not engine or each.part != _STORES],
            FINDINGS.types,
        )  # fmt: skip
        found = [CheckFinding(*row) for row in self._duck.fetch(f"SELECT {_FOUND} FROM kept")]
        if engine:
            self._describe_queues()
            checks.load_engine(self._duck, engine)
            found += checks.find_in_stores(self._duck, self._view_events)
        return checks.known_pushes(self._duck, found)

    def events(self) -> int:
        """How many events were judged."""
        return int(self._duck.fetch("SELECT coalesce(sum(events), 0) FROM stores")[0][0])

    def shown(self, found: Sequence[CheckFinding], shown_max: int) -> tuple[AuditFinding, ...]:
        """The first findings of each check, with the events of their messages."""
        order = {check: at for at, check in enumerate(CHECKS)}
        chosen: list[CheckFinding] = []
        taken = dict.fromkeys(CHECKS, 0)
        for each in sorted(found, key=lambda each: (order[each.check], each.store, each.sequence)):
            taken[each.check] += 1
            if taken[each.check] <= shown_max:
                chosen.append(each)
        lives = self._lives(
            {(each.store, each.shard, each.message) for each in chosen if each.message is not None}
        )
        self._files("queues", QUEUES)
        rows = self._duck.fetch("SELECT store, shard, queue_number, queue FROM queues")
        names = {tuple(row[:3]): row[3] for row in rows}
        shown = []
        for each in chosen:
            message_id: str | None = None
            events: tuple[str, ...] = ()
            if each.message is not None:
                message_id, events = lives[each.store, each.shard, each.message]
            queue = names.get((each.store, each.shard, each.queue))
            entry = each.sequence >> INDEX_BITS
            finding = AuditFinding(
                each.check, each.store, entry, message_id, queue, each.detail, events
            )
            shown.append(finding)
        return tuple(shown)

    def _lives(self, about: set[_Key]) -> dict[_Key, tuple[str, tuple[str, ...]]]:
        """The id of each of these messages, and its events in words."""
        files = events_table(self._lake).files()
        parts = [LakePart(store, shard, message, 1) for store, shard, message in sorted(about)]
        paths = {path for part in parts for path in files_of(files, part)}
        self._duck.files("some_events", sorted(paths), duck_types(SCHEMA))
        wanted = " OR ".join(f"({part.condition()})" for part in parts) or "false"
        lines: dict[_Key, list[str]] = {}
        # Events that were copied from a journal for this audit alone have no column of bodies.
        columns = "COLUMNS(name -> name <> 'body')"
        query = f"SELECT {columns} FROM some_events WHERE {wanted} ORDER BY sequence"
        for row in self._duck.dicts(query):
            key = row["store"], row["shard"], row["message"]
            lines.setdefault(key, []).append(_event_line(row))
        self._duck.files("sealed_folds", sealed_folds(self._lake), FOLDS.types)
        query = f"SELECT store, shard, message FROM sealed_folds WHERE {wanted}"
        for key in self._duck.fetch(query):
            lines.setdefault(key, []).insert(0, "earlier events were dropped by compact --keep")
        return {
            key: (MessageIds(bytes.fromhex(key[0])).show(key[2]), tuple(lines.get(key, ())))
            for key in about
        }


def _shard_of(own: Sequence[PartFiles]) -> tuple[str, int]:
    """The store and the shard of the parts of a task."""
    return own[0].store, own[0].shard


def _ranges_of(own: Sequence[PartFiles]) -> list[str]:
    """The names of the ranges of parts that are not sealed, each once."""
    return sorted({range_of(each.part) for each in own if not is_sealed(each.part)})


def _event_line(row: dict[str, Any]) -> str:
    """One event of a message, in a line."""
    words = [f"{row['entry']}.{row['index']}", f"{row['at_ms']} ms", row["kind"]]
    labels: Sequence[tuple[str, str]] = (
        ("epoch", "claim"), ("deadline_ms", "until"), ("visible_at_ms", "visible at"),
        ("holder", "by"), ("to_queue", "to queue"), ("name", "to queue"), ("rank", "rank"),
        ("group", "group"), ("dedup_id", "dedup id"),
    )  # fmt: skip
    return " ".join([*words, *(f"{label} {row[n]}" for n, label in labels if row[n] is not None)])
