"""`penstock pipeline status`: how far the lake is behind the journals, and its tables' state."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from penstock.cli.lake.options import add_journals, add_lake, check_archive
from penstock.cli.session import Session
from penstock.cli.show import table
from penstock.cli.values import show_size
from penstock.output import print_text

if TYPE_CHECKING:
    from penstock.spark.bronze import Lag


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    add_journals(parser)
    add_lake(parser)


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises the errors of the journals and the lake."""
    from penstock.spark.bronze import events_table, lag
    from penstock.spark.lake import Lake
    from penstock.spark.tables import TABLES
    from penstock.spark.update import count_dropped, is_current, table_of

    check_archive(arguments)
    lake = Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner)
    for journal in arguments.journal:
        print_lag(session, arguments, lag(lake, journal, arguments.archive))
    events = events_table(lake)
    delta = events.delta()
    rows = [("events", f"{events.rows():,}", "-" if delta is None else "current")]
    for each in TABLES:
        derived = table_of(lake, each)
        state = "current" if is_current(derived, delta) else "behind"
        # Without events there is nothing to be behind of.
        rows.append((each.name, f"{derived.rows():,}", "-" if delta is None else state))
    dropped = count_dropped(lake)
    if not arguments.json:
        print_text(table(("table", "rows", "state"), rows))
        if dropped:
            print_text(f"events of {dropped:,} messages were dropped by `pipeline compact --keep`")
    else:
        for name, count, state in rows:
            session.print_json({"table": name, "rows": int(count.replace(",", "")), "state": state})
        session.print_json({"dropped_messages": dropped})
    return 0


def print_lag(session: Session, arguments: Namespace, lag: "Lag") -> None:
    """Prints how far the lake is behind a journal."""
    session.print_result(
        arguments,
        {
            "journal": lag.path,
            "store": lag.store,
            "durable_offset": lag.durable_offset,
            "read_offset": lag.read_offset,
            "behind_bytes": lag.behind_bytes,
        },
        f"{lag.path}: {show_size(lag.behind_bytes)} behind, at offset {lag.read_offset:,} "
        f"of {lag.durable_offset:,}",
    )
