"""`penstock daemon status|stop|run PATH`: the process that holds a data directory."""

import os
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from typing import Any

from penstock.backends.remote.daemon import SERVE, check_owner, stop_daemon
from penstock.backends.remote.starting import daemon_status
from penstock.cli.parser import add_action
from penstock.cli.session import Session, UsageError
from penstock.cli.show import labelled
from penstock.cli.values import read_duration, show_age
from penstock.errors import StoreUnusable, UnavailableError

NONE_RUNS = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = add_action(actions, "status", "show the process that holds the directory")
    stop = add_action(actions, "stop", "stop the process that holds the directory")
    for action in (status, stop):
        action.add_argument(
            "path",
            metavar="PATH",
            nargs="?",
            help="the data directory, or its file: URL (default: the store of --url)",
        )
        action.add_argument(
            "--insecure-other-owner",
            action="store_true",
            help="also for a directory that belongs to another user",
        )
    stop.add_argument(
        "--wait",
        type=read_duration,
        default=30.0,
        metavar="DURATION",
        help="wait up to this time for its end (default: %(default)gs)",
    )
    run = add_action(actions, "run", "run a daemon here, until it is interrupted")
    from penstock.server.daemon import add_arguments as add_daemon_arguments

    add_daemon_arguments(run, "?")
    run.set_defaults(idle=0)


def run(session: Session, arguments: Namespace) -> int:
    """Shows the process that holds the directory, stops it, or runs a daemon."""
    arguments.path = os.path.abspath(session.path(arguments, must_exist=False))
    if arguments.action == "run":
        if arguments.json:
            raise UsageError("--json: daemon run prints no result; ask daemon status --json")
        from penstock.server.daemon import Starter, run_daemon

        arguments.ready_fd = None
        return run_daemon(arguments, Starter(None))
    if os.path.lexists(arguments.path) and not os.path.isdir(arguments.path):
        raise StoreUnusable(f"{arguments.path}: is a file; a store is a directory")
    check_owner(arguments.path, other_owner=arguments.insecure_other_owner)
    if arguments.action == "stop":
        return _stop(session, arguments)
    return _status(session, arguments)


def _stop(session: Session, arguments: Namespace) -> int:
    name = _name_of_holder(arguments)
    pid = stop_daemon(arguments.path, arguments.wait)
    if pid is None:
        return _show_none(session, arguments)
    result = {"path": arguments.path, "running": False, "stopped": pid}
    session.print_result(arguments, result, f"stopped {name} of {arguments.path}, process {pid}")
    return 0


def _name_of_holder(arguments: Namespace) -> str:
    with suppress(UnavailableError):
        status = _ask_status(arguments, timeout_s=1.0)
        if status is not None and status["holder"] == SERVE:
            return "penstock serve"
    return "the daemon"


def _ask_status(arguments: Namespace, timeout_s: float = 5.0) -> dict[str, Any] | None:
    other_owner = arguments.insecure_other_owner
    return daemon_status(arguments.path, timeout_s, other_owner=other_owner)


def _status(session: Session, arguments: Namespace) -> int:
    status = _ask_status(arguments)
    if status is None:
        return _show_none(session, arguments)
    result = {"path": arguments.path, "running": True, **status}
    session.print_result(arguments, result, _as_text(arguments.path, status))
    return 0


def _show_none(session: Session, arguments: Namespace) -> int:
    result = {"path": arguments.path, "running": False}
    session.print_result(arguments, result, f"no daemon runs for {arguments.path}")
    return NONE_RUNS


def _shown_process(status: dict[str, Any]) -> tuple[str, str]:
    if status["holder"] != SERVE:
        return "daemon", f"runs as process {status['pid']}"
    return "serve", f"holds the store as process {status['pid']}, at {status['endpoint']}"


def _as_text(path: str, status: dict[str, Any]) -> str:
    error = status.get("housekeeping_error")
    return labelled(
        [
            _shown_process(status),
            ("store", path),
            ("socket", status["socket"]),
            ("for", show_age(round(status["up_s"] * 1_000))),
            # Without the connection of this command.
            ("connections", f"{status['connections'] - 1:,}"),
            ("requests", f"{status['requests_seen']:,}"),
            ("waiting pulls", f"{status['waiting_pulls']:,}"),
            *([("housekeeping", f"failed, and is tried again: {error}")] if error else []),
        ]
    )
