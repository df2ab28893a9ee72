"""`penstock pipeline sql`: any Spark SQL over the lake's tables.

Unlike the condition of a replay, the query is passed to Spark as it is: it can read and write
files and run code with the rights of the user who runs the command.
"""

import csv
import itertools
import json
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.lake.options import add_lake, add_spark, open_spark
from penstock.cli.session import Session
from penstock.cli.show import table
from penstock.output import print_json, print_text, printable, report

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHOWN_ROWS_MAX: Final = 1_000


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    parser.description = (
        "Runs one query of Spark SQL in which the lake's tables have their names. The query is not "
        "restricted: it can read and write any file and run any code that you may. Give it only "
        "queries that you trust."
    )
    add_lake(parser)
    add_spark(parser)
    parser.add_argument("query", metavar="QUERY", help='such as "select * from queue_status"')
    add_forms(parser)


def add_forms(parser: ArgumentParser) -> None:
    """Adds the argument for the form in which rows are printed."""
    parser.add_argument("--csv", action="store_true", help="print CSV, with a line of names")


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises LakeUnusable, and InvalidField if Spark refuses the query."""
    from penstock.spark.lake import Lake
    from penstock.spark.views import name_tables, run_query

    lake = Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner)
    spark = open_spark(arguments)
    name_tables(spark, lake, arguments.query)
    print_rows(arguments, *run_query(spark, arguments.query))
    return 0


def print_rows(arguments: Namespace, names: list[str], rows: "Iterable[tuple[Any, ...]]") -> None:
    """Prints rows as a table, or as the arguments say as JSON or CSV."""
    if arguments.json:
        for row in rows:
            print_json(json.dumps(dict(zip(names, row, strict=True)), default=_as_text))
    elif arguments.csv:
        _print_csv(names, rows)
    else:
        _print_table(names, rows)


def _print_csv(names: list[str], rows: "Iterable[tuple[Any, ...]]") -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    # A program gets the texts as they are.
    show = printable if sys.stdout.isatty() else str
    writer.writerow(map(show, names))
    for row in rows:
        writer.writerow("" if value is None else show(_as_text(value)) for value in row)


def _print_table(names: list[str], rows: "Iterable[tuple[Any, ...]]") -> None:
    following = iter(rows)
    shown = [
        tuple("-" if value is None else _as_text(value) for value in row)
        for row in itertools.islice(following, _SHOWN_ROWS_MAX)
    ]
    print_text(table(tuple(names), shown))
    if next(following, None) is not None:
        report(
            f"only the first {_SHOWN_ROWS_MAX:,} rows are shown; --json or --csv prints all of them"
        )


def _as_text(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="backslashreplace")
    return str(value)
