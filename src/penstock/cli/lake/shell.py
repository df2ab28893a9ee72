"""`penstock pipeline shell`: one Spark SQL query after another over the lake's tables.

A query ends with a semicolon, so it may have several lines. As in `pipeline sql`, a query is not
restricted. The tables are those of the moment the shell was started, or of the last `refresh;`.
"""

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.cli.lake.options import add_lake, add_spark, open_spark
from penstock.cli.lake.sql import add_forms, print_rows
from penstock.cli.session import Session
from penstock.cli.show import joined
from penstock.errors import InvalidField
from penstock.output import print_prompt, print_text, report

if TYPE_CHECKING:
    from typing import TextIO

_PROMPT: Final = "lake> "
_MORE: Final = "   -> "
_ENDS: Final = ("exit", "quit")
_COMMENT: Final = r"--[^\n]*|/\*.*?(?:\*/|\Z)"
# Quoted texts and comments, closed or not yet, whose semicolons end nothing; and one that does.
_PARTS: Final = re.compile(
    r"""'(?:\\.|[^'\\])*(?:'|\Z)|"(?:\\.|[^"\\])*(?:"|\Z)|`[^`]*(?:`|\Z)|;|""" + _COMMENT, re.DOTALL
)
_NOTHING: Final = re.compile(rf"(?:\s|;|{_COMMENT})*", re.DOTALL)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    parser.description = (
        "Runs queries of Spark SQL, each ended by a semicolon, in which the lake's tables have "
        "their names. `tables;` lists these, `refresh;` reads the lake again, `exit;` ends. "
        "Queries are not restricted: they can read and write any file and run any code that you "
        "may."
    )
    add_lake(parser)
    add_spark(parser)
    add_forms(parser)


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises LakeUnusable."""
    from penstock.spark.lake import Lake
    from penstock.spark.views import name_tables, run_query

    lake = Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner)
    spark = open_spark(arguments)
    names = name_tables(spark, lake)
    failed = False
    for query in _queries(sys.stdin, shows_prompt=sys.stdin.isatty()):
        if query.lower() in _ENDS:
            break
        if query.lower() == "tables":
            print_text(joined(names))
        elif query.lower() == "refresh":
            names = name_tables(spark, lake)
        else:
            try:
                print_rows(arguments, *run_query(spark, query))
            except InvalidField as error:
                failed = True
                report(str(error))
    return int(failed and not sys.stdin.isatty())


def _queries(lines: "TextIO", *, shows_prompt: bool) -> Iterator[str]:
    """The queries in these lines, without their semicolons; the last may have none."""
    held = ""
    while True:
        if shows_prompt:
            print_prompt(_MORE if held.strip() else _PROMPT)
        line = lines.readline()
        held += line
        while (end := _semicolon(held)) >= 0:
            query, held = held[:end].strip(), held[end + 1 :]
            if not _NOTHING.fullmatch(query):
                yield query
        if not line:
            if not _NOTHING.fullmatch(held):
                yield held.strip()
            return


def _semicolon(text: str) -> int:
    """Where the first semicolon outside of quotes and comments is, -1 if there is none."""
    return next((found.start() for found in _PARTS.finditer(text) if found[0] == ";"), -1)
