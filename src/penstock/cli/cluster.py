"""`penstock cluster ACTION`: starts a cluster on this machine, shows one, moves its shards."""

import asyncio
import shlex
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.cli.parser import add_action
from penstock.cli.session import Session
from penstock.cli.show import joined, table
from penstock.output import Lines, flush, print_text
from penstock.url import load_backend, read_url

if TYPE_CHECKING:
    from penstock.cluster.address import ClusterAddress
    from penstock.cluster.operations import ClusterStatus, Operator
    from penstock.cluster.resharding import Growth
    from penstock.cluster.spread_changes import SpreadStatus

DIRECTORY: Final = "penstock-cluster"
_NODE_HEAD: Final = ("node", "state", "live", "owns", "stands by", "gaps", "endpoint")
_SHARD_HEAD: Final = (
    "shard", "owner", "term", "slot", "waiting", "queues", "standby", "lag", "gaps",
)  # fmt: skip
_ACTIONS: Final = {
    "up": "start three NATS servers and some nodes on this machine, or those that have ended",
    "down": "stop the processes that up started; their data stays",
    "url": "print the URL of the cluster that up started, with its password",
    "status": "show nodes and shards: owners, terms, how far standbys are behind",
    "move": "move a shard to a node",
    "drain": "move all shards of a node to the others, and give it no new ones",
    "spread": "spread a queue over several shards, or show in which shards it is",
    "move-queue": "move a queue to another shard",
    "reshard": "add shards, and move the queues that belong to them; repeat it to continue",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    parsers = {name: add_action(actions, name, text) for name, text in _ACTIONS.items()}
    for action in parsers.values():
        action.add_argument(
            "--directory",
            metavar="DIR",
            help=f"where up keeps the cluster (default: ./{DIRECTORY})",
        )
    up = parsers["up"]
    up.add_argument("--nodes", type=int, metavar="COUNT", help="(default: 3)")
    up.add_argument("--shards", type=int, metavar="COUNT", help="of a new cluster (default: 16)")
    up.add_argument(
        "--port",
        type=int,
        default=9324,
        metavar="NUMBER",
        help="of the first node's SQS endpoint (default: 9324; 0 for any free ones)",
    )
    up.add_argument(
        "--archive",
        metavar="DIR",
        help="keep the events of every shard there, for penstock pipeline",
    )
    parsers["status"].add_argument(
        "--watch", action="store_true", help="show it again every second, until interrupted"
    )
    parsers["move"].add_argument("shard", type=int, metavar="SHARD")
    for name in ("move", "drain"):
        parsers[name].add_argument("node", metavar="NODE")
    parsers["reshard"].add_argument(
        "shards", type=int, metavar="N", help="how many shards the cluster is to have"
    )
    for name in ("spread", "move-queue"):
        parsers[name].add_argument("queue", metavar="QUEUE")
    parsers["move-queue"].add_argument(
        "--to",
        type=int,
        nargs="+",
        required=True,
        metavar="SHARD",
        help="the shard; several, to spread the queue over these",
    )
    parsers["spread"].add_argument(
        "shards", type=int, nargs="?", metavar="K", help="over how many shards; 1 to undo it"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises PenstockError."""
    # Raises MissingExtra if the extra is not installed.
    load_backend(read_url("cluster:nats://127.0.0.1:4222"))
    if arguments.action in ("up", "down", "url"):
        why = f"cluster {arguments.action} is about the cluster in --directory"
        session.refuse_option(arguments, "url", why)
    root = Path(arguments.directory or DIRECTORY)
    if arguments.action == "up":
        return _up(session, arguments, root)
    if arguments.action == "down":
        from penstock.cluster.local_cluster import stop_cluster

        ended = stop_cluster(root)
        text = (
            f"{ended} processes were stopped; the data stays in {root}: "
            f"penstock cluster up{_option(root)} continues with it"
        )
        session.print_result(arguments, {"ended": ended, "data": str(root.absolute())}, text)
        return 0
    if arguments.action == "url":
        from penstock.cluster.local_cluster import read_state

        url = read_state(root).url
        session.print_result(arguments, {"url": url}, url)
        return 0
    return _operate(session, arguments, root)


def _option(root: Path) -> str:
    """The option that a next command needs to find the same cluster."""
    return "" if str(root) == DIRECTORY else f" --directory {shlex.quote(str(root))}"


def _up(session: Session, arguments: Namespace, root: Path) -> int:
    from penstock.cluster.local_cluster import NODES, start_cluster
    from penstock.service import check_number

    if arguments.nodes is not None:
        check_number("nodes", arguments.nodes, 1, 16)
    if arguments.shards is not None:
        check_number("shards", arguments.shards, 1, 256)
    check_number("port", arguments.port, 0, 65_535 - (arguments.nodes or NODES))
    archive = None if arguments.archive is None else Path(arguments.archive)
    state, started = start_cluster(root, arguments.nodes, arguments.port, arguments.shards, archive)
    if arguments.json:
        session.print_json({**msgspec.to_builtins(state), "started": started})
        return 0
    if started:
        print_text(f"started again: {', '.join(started)}; the others were running")
    for node in state.nodes:
        print_text(f"{node.name}: Amazon SQS at {node.endpoint}")
    print_text(f"3 NATS servers; their data is in {root}")
    print_text(f"show it with     penstock cluster status{_option(root)}")
    print_text(f"stop it with     penstock cluster down{_option(root)}")
    return 0


def _cluster_url(session: Session, arguments: Namespace, root: Path) -> str:
    """The cluster that is named: by --url, by --directory, or by $PENSTOCK_URL if it is one."""
    from penstock.cluster.local_cluster import read_state

    if arguments.url is None and arguments.directory is None:
        url = session.default_url() or ""
        if url.startswith("cluster:"):
            return url
    return arguments.url or read_state(root).url


def _operate(session: Session, arguments: Namespace, root: Path) -> int:
    from penstock.cluster.address import read_address
    from penstock.cluster.operations import operate

    address = read_address(read_url(_cluster_url(session, arguments, root)))
    if arguments.action == "move":
        asyncio.run(operate(address, lambda each: each.move(arguments.shard, arguments.node)))
        shown = {"shard": arguments.shard, "node": arguments.node}
        text = f"shard {arguments.shard} is owned by {arguments.node}"
        session.print_result(arguments, shown, text)
        return 0
    if arguments.action == "drain":
        left = asyncio.run(operate(address, lambda each: each.drain(arguments.node)))
        text = f"{arguments.node} owns {left} shards now"
        session.print_result(arguments, {"node": arguments.node, "left": left}, text)
        return 0 if not left else 1
    if arguments.action in ("spread", "move-queue"):
        return _spread(session, arguments, address)
    if arguments.action == "reshard":
        return _reshard(session, arguments, address)
    while True:
        status = asyncio.run(operate(address, lambda each: each.status()))
        if arguments.json:
            session.print_json(msgspec.to_builtins(status))
        else:
            print_text(_shown(status))
            flush()
        if not arguments.watch:
            return 0
        time.sleep(1)


def _reshard(session: Session, arguments: Namespace, address: "ClusterAddress") -> int:
    from penstock.cluster.operations import operate

    moved: list[str] = []
    shown_s = time.monotonic()

    def note(queue: str) -> None:
        nonlocal shown_s
        moved.append(queue)
        if not arguments.json and time.monotonic() - shown_s > 1:
            shown_s = time.monotonic()
            print_text(f"{len(moved)} queues were moved")
            flush()

    growth = asyncio.run(operate(address, lambda each: each.reshard(arguments.shards, note)))
    if arguments.json:
        session.print_json({**msgspec.to_builtins(growth), "moved": len(moved)})
        return 0
    print_text(f"{_growth(growth)}; {len(moved)} were moved now")
    return 0


def _growth(growth: "Growth") -> str:
    shown = f"{growth.shards} shards"
    if growth.created_shards != growth.shards:
        shown = f"grown from {growth.created_shards} to {shown}"
    if growth.queues is None:
        return f"{shown}; its queues cannot be counted now"
    hint = f" (penstock cluster reshard {growth.shards})" if growth.to_move else ""
    shown += f"; of {growth.queues} queues {growth.to_move} are to be moved{hint}"
    return f"{shown}, {growth.leaving} may have messages in shards that they leave"


def _spread(session: Session, arguments: Namespace, address: "ClusterAddress") -> int:
    from penstock.cluster.operations import operate

    queue = arguments.queue

    def work(operator: "Operator") -> Awaitable["SpreadStatus"]:
        if arguments.action == "move-queue":
            return operator.move_queue(queue, arguments.to)
        return operator.spread(queue, arguments.shards)

    found = asyncio.run(operate(address, work))
    if arguments.json:
        session.print_json(msgspec.to_builtins(found))
        return 0
    held = ", ".join(f"{count} in shard {shard}" for shard, count in found.messages.items())
    print_text(f"{queue} is in {_shards(found.shards)}; messages: {held}")
    if left := [shard for shard in found.before if shard not in found.shards]:
        print_text(
            f"it leaves {_shards(left)}: messages that are there are pulled from there, "
            "and new ones go elsewhere"
        )
    return 0


def _shards(numbers: Sequence[int]) -> str:
    return f"shard{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _shown(status: "ClusterStatus") -> Lines:
    nodes = [
        (
            each.node,
            each.state,
            "yes" if each.is_live else "NO",
            str(each.owned),
            str(each.standby),
            str(each.gaps),
            each.endpoint,
        )
        for each in status.nodes
    ]
    shards = [
        (
            str(each.shard),
            (each.owner or "-") + ("" if each.is_live else " (does not answer)"),
            str(each.term),
            _number(each.slot),
            _number(each.waiting_entries),
            _number(each.queues),
            each.standby or "-",
            _number(each.standby_lag),
            str(each.gaps),
        )
        for each in status.shards
    ]
    more: list[str] = []
    if status.growth is not None:
        more += ["", _growth(status.growth)]
    for node in status.nodes:
        if node.clock_ahead_ms:
            apart = f"{abs(node.clock_ahead_ms) // 1_000} s"
            direction = "ahead of" if node.clock_ahead_ms > 0 else "behind"
            more.append(f"{node.node}: its clock is {apart} {direction} NATS, whose time it uses")
    for each in status.shards:
        if each.stall:
            more.append(f"shard {each.shard} keeps nothing: {each.stall}")
        if each.archive_error:
            more.append(f"shard {each.shard} is not archived: {each.archive_error}")
    tables = [table(_NODE_HEAD, nodes, left=7), "", table(_SHARD_HEAD, shards, left=2)]
    return Lines("\n".join([*tables, *([joined(more)] if more else [])]))


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
