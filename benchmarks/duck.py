"""DuckDB as a runner of the audit's SQL: the same queries, in the same order, over the same files.

Its dialect differs in three things, which are translated here: quotes around names, the position of
IGNORE NULLS, and the names of two functions. Its hash function differs, without effect on results.
"""

import re
from collections.abc import Sequence
from typing import Any

_IGNORE_NULLS = re.compile(r"\)(\s+)IGNORE NULLS(\s+)OVER")
_FUNCTIONS = (
    "CREATE MACRO xxhash64(a, b) AS hash(a, b)",
    "CREATE MACRO get_json_object(text, path) AS json_extract_string(text, path)",
)


class Duck:
    """A connection of DuckDB; a table is a name in it."""

    def __init__(self, threads: int | None = None) -> None:
        import duckdb

        self.connection: Any = duckdb.connect()
        for function in _FUNCTIONS:
            self.connection.execute(function)
        if threads is not None:
            self.connection.execute(f"SET threads = {threads}")
        self._made = 0

    def files(self, paths: Sequence[str]) -> str:
        """The Parquet files of a table."""
        listed = ", ".join(f"'{path}'" for path in paths)
        return self._make("VIEW", f"SELECT * FROM read_parquet([{listed}])")

    def rows(self, table: Any) -> str:
        """An object in memory, such as an Arrow table, as a table."""
        self.connection.register("given", table)
        name = self._make("TABLE", "SELECT * FROM given")
        self.connection.unregister("given")
        return name

    def ask(self, query: str, **tables: str) -> str:
        """See `penstock.spark.checks.Runner`."""
        return self._make("VIEW", translated(query).format(**tables))

    def keep(self, table: str, *, small: bool) -> str:
        """See `penstock.spark.checks.Runner`."""
        return self._make("TABLE", f"SELECT * FROM {table}")

    def send(self, table: str) -> str:
        """See `penstock.spark.checks.Runner`."""
        return table

    def any(self, table: str, condition: str) -> bool:
        """See `penstock.spark.checks.Runner`."""
        return bool(self.fetch(f"SELECT count(*) FROM {table} WHERE {condition}")[0][0])

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query in DuckDB's dialect."""
        found: list[tuple[Any, ...]] = self.connection.execute(query).fetchall()
        return found

    def _make(self, what: str, query: str) -> str:
        self._made += 1
        name = f"t{self._made}"
        self.connection.execute(f"CREATE TEMP {what} {name} AS {query}")
        return name


def translated(query: str) -> str:
    """The same query in DuckDB's dialect."""
    return _IGNORE_NULLS.sub(r"\1IGNORE NULLS)\2OVER", query.replace("`", '"'))
