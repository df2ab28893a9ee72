"""SQL over Parquet files and Arrow tables inside one process, by DuckDB.

A task of Spark that folds or judges one part of the lake opens one connection; the command opens
one for its own queries of small tables. Tables and views are names in the connection.
"""

import copy
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import duckdb

# What one task may hold in memory; the rest is written to a temporary directory.
MEMORY_MIB: Final = 1 << 10
# How many rows a row group of a file has: as DuckDB does it, and in files of which readers skip
# row groups by their statistics.
GROUP_ROWS: Final = 122_880
SMALL_GROUP_ROWS: Final = 4_096
# Columns of a row group with at most so many different values have a dictionary. In a file of
# version 2, whole numbers of the others are differences, and texts are lengths and bytes.
_ENCODING: Final = "PARQUET_VERSION V2, DICTIONARY_SIZE_LIMIT 500"


def quoted(text: str) -> str:
    """A text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def read_files(*paths: str, named: bool = False) -> str:
    """The rows of Parquet files in SQL; `named` gives each the path of its file as `filename`.

    Columns come from the files alone, not from the names of directories.
    """
    listed = ", ".join(map(quoted, paths))
    return (
        f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false, "
        f"filename = {named})"
    )


def no_rows(schema: Mapping[str, str]) -> str:
    """A query that gives no rows, of these columns and types."""
    columns = ", ".join(f'CAST(NULL AS {kind}) AS "{name}"' for name, kind in schema.items())
    return f"SELECT {columns} WHERE false"


class DuckConnection:
    """A DuckDB connection in memory; its tables are dropped when it is closed."""

    def __init__(self, threads: int = 1, memory_mib: int = MEMORY_MIB) -> None:
        self._spilled = tempfile.TemporaryDirectory(
            prefix="penstock-", dir=os.environ.get("SPARK_LOCAL_DIRS"), ignore_cleanup_errors=True
        )
        settings: dict[str, Any] = {
            "threads": threads,
            "memory_limit": f"{memory_mib}MiB",
            "temp_directory": self._spilled.name,
            # Rows are sorted where a query says so, and nowhere else.
            "preserve_insertion_order": False,
            # Every function that is used is built in: nothing is fetched.
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        self._connection: Any = duckdb.connect(config=settings)
        self._connection.execute("SET GLOBAL TimeZone = 'UTC'")
        # Statements that read the same files parse their footers once: files never change.
        self._connection.execute("SET GLOBAL parquet_metadata_cache = true")

    def __enter__(self) -> "DuckConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._spilled.cleanup()

    @contextmanager
    def other_thread(self) -> Iterator["DuckConnection"]:
        """A connection to the same tables and views, for queries of another thread meanwhile."""
        other = copy.copy(self)
        other._connection = self._connection.cursor()
        try:
            yield other
        finally:
            other._connection.close()

    def view(self, name: str, query: str) -> None:
        """A query under a name, run each time it is used."""
        self._connection.execute(f"CREATE OR REPLACE VIEW {name} AS {query}")

    def table(self, name: str, query: str) -> None:
        """The rows of a query, computed once."""
        self._connection.execute(f"CREATE OR REPLACE TABLE {name} AS {query}")

    def files(self, name: str, paths: Sequence[str], schema: Mapping[str, str]) -> None:
        """Parquet files as a view; without any, one that is empty."""
        if paths:
            self.view(name, f"SELECT * FROM {read_files(*paths)}")
        else:
            self.view(name, no_rows(schema))

    def arrow(self, name: str, rows: Any) -> None:
        """An Arrow table as a table."""
        self._connection.register("given", rows)
        self.table(name, "SELECT * FROM given")
        self._connection.unregister("given")

    def register(self, name: str, rows: Any) -> None:
        """An Arrow table as a view, for queries that join and select nothing.

        DuckDB hands conditions over to Arrow, also those it finds itself, and fails if Arrow does
        not know them.
        """
        self._connection.register(name, rows)

    def rows(self, query: str) -> Any:
        """The rows of a query as an Arrow table."""
        return self._connection.execute(query).to_arrow_table()

    def write(self, query: str, path: str, group_rows: int = GROUP_ROWS) -> None:
        """The rows of a query as one Parquet file, in row groups of this size."""
        self._connection.execute(
            f"COPY ({query}) TO {quoted(path)} "
            f"(FORMAT parquet, {_ENCODING}, ROW_GROUP_SIZE {group_rows})"
        )

    def run(self, statement: str) -> None:
        """Any statement."""
        self._connection.execute(statement)

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        found: list[tuple[Any, ...]] = self._connection.execute(query).fetchall()
        return found

    def stream(self, query: str) -> Any:
        """The rows of a query, readable as a stream of Arrow batches."""
        return self._connection.sql(query)

    def columns(self, name: str) -> list[str]:
        """The names of a table's columns."""
        return [row[0] for row in self.fetch(f"DESCRIBE {name}")]

    def dicts(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query by the names of their columns."""
        cursor = self._connection.execute(query)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
