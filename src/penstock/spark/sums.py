"""What parts add to the small tables: the rows of many parts in one file, a set of parts.

A run needs these rows of all parts, and a part has few of them: opening a file for each would take
longer than reading it. The parts that one run or another makes again are in one set, those that
stay as they are in others:

    STORE-SHARD      the open parts of a shard
    STORE-SHARD_N    the closed parts of SET_RANGES ranges of it
    STORE-SHARD.N    the sealed ones

A table has one file for each set, and Delta calls a set a part. When a part changes, the
files of its set are written again, from the rows that the connection has of all parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from penstock.spark.duck import GROUP_ROWS, DuckConnection, no_rows, quoted, read_files
from penstock.spark.lake import PART, AddedFile, Lake
from penstock.spark.seals import is_closed, is_sealed, part_table, range_of
from penstock.spark.tables import SUMMED_TABLES, Derived

# How many neighbouring ranges have their closed parts in one set.
SET_RANGES: Final = 16


def set_of(part: str) -> str:
    """The name of the set that a part is in."""
    shard, _, nth = range_of(part).rpartition("-")
    if not is_closed(part) and not is_sealed(part):
        return shard
    return f"{shard}{'.' if is_sealed(part) else '_'}{int(nth) // SET_RANGES}"


def sets_of(parts: Iterable[str]) -> list[str]:
    """The names of the sets that parts are in."""
    return sorted(set(map(set_of, parts)))


class PartSums:
    """The rows of these tables, each a table of the connection."""

    def __init__(self, lake: Lake, duck: DuckConnection) -> None:
        self._lake = lake
        self._duck = duck
        self._loaded: set[str] = set()

    def load(self, tables: Sequence[Derived] = SUMMED_TABLES, *, only_sealed: bool = False) -> None:
        """Reads the tables that were not read yet, or of those the rows of sealed parts.

        As `write`, it may be called by another thread than the one that uses the connection.
        """
        with self._duck.other_thread() as duck:
            for each in tables:
                if each.name not in self._loaded:
                    duck.table(each.name, self._rows(each, only_sealed))
                    self._loaded.add(each.name)

    def _rows(self, table: Derived, only_sealed: bool) -> str:
        files = [
            file
            for file in part_table(self._lake, table).files()
            if is_sealed(file.part) or not only_sealed
        ]
        rows = [no_rows(table.types)]
        if paths := [file.path for file in files if _is_set(file.part)]:
            rows.append(f"SELECT * FROM {read_files(*paths)}")
        # A table of an older lake had one file for each part, whose rows do not name it.
        if paths := [file.path for file in files if not _is_set(file.part)]:
            part = f"regexp_extract(filename, '{PART}=([^/]*)/', 1)"
            named = read_files(*paths, named=True)
            rows.append(f"SELECT {part} AS of_part, * EXCLUDE (filename) FROM {named}")
        return " UNION ALL BY NAME ".join(rows)

    def replace(self, parts: Iterable[str] | None, made: Sequence[Mapping[str, str]]) -> None:
        """Puts new rows in the place of those of these parts.

        None stands for all parts but sealed ones, which are never made again. `made` are files with
        new rows, one for each table; all tables are loaded.
        """
        gone = "NOT contains(of_part, '.')"
        if parts is not None:
            gone = f"of_part IN ({', '.join(map(quoted, sorted(set(parts)))) or 'NULL'})"
        for each in SUMMED_TABLES:
            self._duck.run(f"DELETE FROM {each.name} WHERE {gone}")
            if made:
                files = read_files(*(files[each.name] for files in made))
                self._duck.run(f"INSERT INTO {each.name} BY NAME SELECT * FROM {files}")

    def write(self, sets: Iterable[str] | None) -> dict[str, list[AddedFile]]:
        """Writes the new files of these sets, None for all: those of each table."""
        with self._duck.other_thread() as duck:
            return {each.name: self._write(duck, each, sets) for each in SUMMED_TABLES}

    def _write(
        self, duck: DuckConnection, table: Derived, sets: Iterable[str] | None
    ) -> list[AddedFile]:
        parts: dict[str, list[str]] = {}
        for (part,) in duck.fetch(f"SELECT DISTINCT of_part FROM {table.name}"):
            parts.setdefault(set_of(part), []).append(part)
        found = part_table(self._lake, table)
        columns = ", ".join(f'"{name}"' for name in table.columns)
        added = []
        for name in sorted(parts):
            if sets is None or name in sets:
                listed = ", ".join(map(quoted, parts[name]))
                rows = f"SELECT {columns} FROM {table.name} WHERE of_part IN ({listed})"
                added.append(found.write(name, duck.rows(rows), GROUP_ROWS))
        return added


def _is_set(part: str | None) -> bool:
    """Whether this is the name of a set, and not of a part."""
    return part is not None and part.count("-") == 1
