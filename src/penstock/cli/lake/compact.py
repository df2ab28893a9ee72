"""`penstock pipeline compact`: join small files, remove unused ones."""

from argparse import ArgumentParser, Namespace

from penstock.cli.lake.options import add_lake
from penstock.cli.session import Session


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    add_lake(parser)
    parser.add_argument(
        "--keep-hours", metavar="N", type=int, default=168, help="keep old versions (default: 168)"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises LakeUnusable."""
    from penstock.spark.derive import table_of
    from penstock.spark.ingest import events_table
    from penstock.spark.lake import Lake, locked
    from penstock.spark.tables import BALANCES, FINDINGS, QUEUE_EVENTS, TABLES

    lake = Lake.open(arguments.lake)
    derived = (QUEUE_EVENTS, *TABLES, FINDINGS, BALANCES)
    tables = [events_table(lake), *(table_of(lake, each) for each in derived)]
    for each in tables:
        # Nobody else may be about to commit files there: they would count as unused.
        name = "events" if each is tables[0] else "tables"
        with locked(lake, name), locked(lake, "verdicts"):
            done = each.compact(arguments.keep_hours)
        name = each.path.name
        session.print_result(
            arguments,
            {"table": name, **done},
            f"{name}: {done['joined']} files joined, {done['removed']} removed",
        )
    return 0
