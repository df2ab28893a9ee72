"""`penstock pipeline warm`: keep a Spark session for the other commands of a lake."""

import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.lake.options import add_lake, show_progress
from penstock.cli.session import Session
from penstock.cli.values import read_duration, read_pair, show_age, show_duration, within
from penstock.errors import PenstockError
from penstock.output import flush, print_text
from penstock.spark.progress import step

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.lake import Lake
    from penstock.spark.warm import WarmSession

_NONE: int = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the action."""
    parser.description = (
        "Starts a Spark session in a process of its own, which audit, report, sql, shell, replay, "
        "compact and forget on this lake then use instead of starting one each. It answers on "
        "loopback, to your own commands only, and ends when it was idle for some time."
    )
    add_lake(parser)
    parser.add_argument(
        "--idle",
        metavar="DURATION",
        type=within(read_duration, "1s", "30d"),
        default=900.0,
        help="end after so long without a command (default: 15m)",
    )
    parser.add_argument(
        "--conf", metavar="KEY=VALUE", action="append", type=read_pair, default=[],
        help="a Spark setting",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--status", action="store_true", help="say whether one is kept; status 1 if not"
    )
    what.add_argument("--stop", action="store_true", help="end the one that is kept")
    what.add_argument(
        "--foreground", action="store_true", help="keep it in this process, as for a service"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="do not say on stderr what is waited for"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises LakeUnusable, WarmUnusable and the errors of starting Spark."""
    from penstock.spark.lake import Lake
    from penstock.spark.session import require_packages
    from penstock.spark.warm import find_warm, stop_warm

    require_packages("grpc")
    lake = Lake.open(arguments.lake, other_owner=arguments.insecure_other_owner)
    if arguments.stop:
        stopped = stop_warm(lake)
        text = "ended" if stopped else "none is kept"
        session.print_result(arguments, {"stopped": stopped}, f"{lake.path}: {text}")
        return 0 if stopped else _NONE
    if arguments.foreground:
        return _keep(session, arguments, lake)
    found = find_warm(lake)
    if found is None and not arguments.status:
        show_progress(arguments)
        found = _start(arguments, lake)
    if found is None:
        session.print_result(arguments, {"warm": False}, f"{lake.path}: none is kept")
        return _NONE
    _print_session(session, arguments, found)
    return 0


def _keep(session: Session, arguments: Namespace, lake: "Lake") -> int:
    from penstock.spark.report import warm_up
    from penstock.spark.warm import keep_warm

    def ready(found: "WarmSession", spark: "SparkSession", ended: threading.Event) -> None:
        _print_session(session, arguments, found)
        # Commands can use the session meanwhile. A lake that lacks tables has nothing to compile.
        with suppress(PenstockError):
            warm_up(spark, lake, ended)

    why = keep_warm(lake, arguments.idle, dict(arguments.conf), ready)
    print_text(f"{lake.path}: the session ended: {why}")
    return 0


def _start(arguments: Namespace, lake: "Lake") -> "WarmSession":
    """Starts the process that keeps the session, and waits until it can be used."""
    from penstock.spark.session import SparkMissing, expected_start_s
    from penstock.spark.warm import find_warm

    words = [sys.executable, "-m", "penstock", "pipeline", "warm", "--foreground", "--quiet"]
    words += ["--lake", str(lake.path), "--idle", f"{arguments.idle}s"]
    words += [f"--conf={key}={value}" for key, value in arguments.conf]
    words += ["--insecure-other-owner"] * arguments.insecure_other_owner
    with step(None, "starting Spark", expected_s=expected_start_s()):
        process = subprocess.Popen(
            words,
            # Not in a directory that somebody may want to remove.
            cwd=Path.home().anchor,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        pause = threading.Event()
        # What a process that was killed has left may still be there.
        while (found := find_warm(lake)) is None or found.pid != process.pid:
            if process.poll() is not None:
                assert process.stderr is not None
                said = process.stderr.read().decode(errors="replace").strip()
                raise SparkMissing(said.rpartition("\n")[2].removeprefix("penstock: "))
            pause.wait(0.1)
    return found


def _print_session(session: Session, arguments: Namespace, found: "WarmSession") -> None:
    age_ms = time.time_ns() // 1_000_000 - found.began_ms
    session.print_result(
        arguments,
        {
            "warm": True,
            "lake": found.lake,
            "port": found.port,
            "pid": found.pid,
            "began_at_ms": found.began_ms,
            "idle_s": found.idle_s,
        },
        f"{found.lake}: a session is kept by process {found.pid} since {show_age(age_ms)}; it ends "
        f"when it was idle for {show_duration(round(1_000 * found.idle_s))}",
    )
    flush()
