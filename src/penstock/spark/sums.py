"""What parts add to the small tables: the rows of many parts in one file, a set of parts.

A run needs these rows of all parts, and a part has few of them: opening a file for each would take
longer than reading it. The parts that one run or another makes again are in one set, those that
stay as they are in others:

    STORE-SHARD      the open parts of a shard
    STORE-SHARD_N    the closed parts of SET_RANGES ranges of it
    STORE-SHARD.N    the sealed ones

A table has one file for each set, and Delta calls a set a part. When a part changes, the
files of its set are written again: the rows that they have of other parts, and the new ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from penstock.spark.duck import GROUP_ROWS, DuckConnection, no_rows, quoted, read_files
from penstock.spark.lake import PART, AddedFile, Lake, TableFile
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
    """The rows of these tables. Each is a view of the connection, which reads the table's files.

    Gold reads most of them once: rows that were copied into the connection first would take longer.
    """

    def __init__(self, lake: Lake, duck: DuckConnection) -> None:
        self._lake = lake
        self._duck = duck
        self._files = {each.name: part_table(lake, each).files() for each in SUMMED_TABLES}
        self._stays = "true"
        self._new_sets: dict[str, int] = {}
        for each in SUMMED_TABLES:
            duck.view(each.name, _stored(each, self._files[each.name]))

    def replace(
        self,
        parts: Iterable[str] | None,
        new: Iterable[str],
        made: Sequence[Mapping[str, str]],
    ) -> None:
        """Puts rows of new parts in the place of those of these parts.

        None stands for all parts but sealed ones, which are never made again. `made` are files with
        the new rows, one for each table.
        """
        names = sorted(set(new))
        self._new_sets = {name: number for number, name in enumerate(sets_of(names))}
        rows = [f"({quoted(name)}, {self._new_sets[set_of(name)]})" for name in names]
        listed = ", ".join(rows) or "(NULL, NULL)"
        self._duck.table("new_parts", f"SELECT * FROM (VALUES {listed}) AS p(of_part, set_number)")
        if parts is None:
            self._stays = "contains(of_part, '.')"
        elif names := sorted(set(parts)):
            self._stays = f"of_part NOT IN ({', '.join(map(quoted, names))})"
        for each in SUMMED_TABLES:
            files = [
                file for file in self._files[each.name] if parts is not None or is_sealed(file.part)
            ]
            self._files[each.name] = files
            paths = [made_files[each.name] for made_files in made]
            found = read_files(*paths) if paths else f"({no_rows(each.types)})"
            self._duck.table(f"new_{each.name}", f"FROM {found} JOIN new_parts USING (of_part)")
            self._duck.view(
                each.name,
                f"SELECT * FROM ({_stored(each, files)}) WHERE {self._stays} "
                f"UNION ALL BY NAME FROM new_{each.name}",
            )

    def write(self, table: Derived, sets: Iterable[str] | None) -> list[AddedFile]:
        """Writes the new files of these sets of a table, None for all.

        It may be called by another thread than the one that uses the connection.
        """
        with self._duck.other_thread() as duck:
            return self._write(duck, table, sets)

    def _write(
        self, duck: DuckConnection, table: Derived, sets: Iterable[str] | None
    ) -> list[AddedFile]:
        old: dict[str, list[TableFile]] = {}
        for file in self._files[table.name]:
            name = str(file.part)
            old.setdefault(name if _is_set(name) else set_of(name), []).append(file)
        found = part_table(self._lake, table)
        columns = ", ".join(f'"{name}"' for name in table.columns)
        added = []
        for name in sorted(old.keys() | self._new_sets.keys() if sets is None else sets):
            number = self._new_sets.get(name, -1)
            rows = duck.rows(
                f"SELECT {columns} FROM ({_stored(table, old.get(name, ()))}) WHERE {self._stays} "
                f"UNION ALL SELECT {columns} FROM new_{table.name} WHERE set_number = {number}"
            )
            if len(rows):
                added.append(found.write(name, rows, GROUP_ROWS))
        return added


def _stored(table: Derived, files: Sequence[TableFile]) -> str:
    """The rows that files of a table have."""
    rows = [no_rows(table.types)]
    if paths := [file.path for file in files if _is_set(file.part)]:
        rows.append(f"SELECT * FROM {read_files(*paths)}")
    # A table of an older lake had one file for each part, whose rows do not name it.
    if paths := [file.path for file in files if not _is_set(file.part)]:
        part = f"regexp_extract(filename, '{PART}=([^/]*)/', 1)"
        named = read_files(*paths, named=True)
        rows.append(f"SELECT {part} AS of_part, * EXCLUDE (filename) FROM {named}")
    return " UNION ALL BY NAME ".join(rows)


def _is_set(part: str | None) -> bool:
    """Whether this is the name of a set, and not of a part."""
    return part is not None and part.count("-") == 1
