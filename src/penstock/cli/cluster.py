"""`penstock cluster ACTION`: starts a cluster on this machine, shows one, moves its shards."""

import asyncio
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.cli.parser import add_action
from penstock.cli.session import Session
from penstock.cli.show import table
from penstock.url import load_backend, read_url

if TYPE_CHECKING:
    from penstock.cluster.address import ClusterAddress
    from penstock.cluster.operations import ClusterStatus

DIRECTORY: Final = "penstock-cluster"
_NODE_HEAD: Final = ("node", "state", "live", "owns", "stands by", "gaps", "endpoint")
_SHARD_HEAD: Final = (
    "shard", "owner", "term", "slot", "waiting", "queues", "standby", "lag", "gaps",
)  # fmt: skip
_ACTIONS: Final = {
    "up": "start three NATS servers and some nodes on this machine",
    "down": "stop the processes that up started; their data stays",
    "url": "print the URL of the cluster that up started, with its password",
    "status": "show nodes and shards: owners, terms, how far standbys are behind",
    "move": "move a shard to a node",
    "drain": "move all shards of a node to the others, and give it no new ones",
    "spread": "spread a queue over several shards, or show how it is spread",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    parsers = {name: add_action(actions, name, text) for name, text in _ACTIONS.items()}
    for name, action in parsers.items():
        action.add_argument("--json", action="store_true", default=SUPPRESS, help=SUPPRESS)
        action.add_argument(
            "--directory",
            default=DIRECTORY,
            metavar="DIR",
            help="where up keeps the cluster (default: ./%(default)s)",
        )
        if name not in ("up", "down", "url"):
            action.add_argument("--url", default=SUPPRESS, metavar="URL", help="another cluster")
    up = parsers["up"]
    up.add_argument("--nodes", type=int, default=3, metavar="COUNT", help="(default: 3)")
    up.add_argument("--shards", type=int, default=16, metavar="COUNT", help="(default: 16)")
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
    parsers["spread"].add_argument("queue", metavar="QUEUE")
    parsers["spread"].add_argument(
        "shards", type=int, nargs="?", metavar="K", help="over how many shards; 1 to undo it"
    )


def run(session: Session, arguments: Namespace) -> int:
    """Runs the action. Raises PenstockError."""
    # Raises MissingExtra if the extra is not installed.
    load_backend(read_url("cluster:nats://127.0.0.1:4222"))
    if arguments.action == "up":
        return _up(session, arguments)
    if arguments.action == "down":
        from penstock.cluster.local import stop_cluster

        ended = stop_cluster(Path(arguments.directory))
        session.print_result(arguments, {"ended": ended}, f"{ended} processes were stopped")
        return 0
    if arguments.action == "url":
        from penstock.cluster.local import read_state

        url = read_state(Path(arguments.directory))["url"]
        session.print_result(arguments, {"url": url}, url)
        return 0
    return _operate(session, arguments)


def _up(session: Session, arguments: Namespace) -> int:
    from penstock.cluster.local import start_cluster
    from penstock.service import check_number

    check_number("nodes", arguments.nodes, 1, 16)
    check_number("shards", arguments.shards, 1, 256)
    check_number("port", arguments.port, 0, 65_535 - arguments.nodes)
    root = Path(arguments.directory)
    archive = None if arguments.archive is None else Path(arguments.archive)
    state = start_cluster(root, arguments.nodes, arguments.port, arguments.shards, archive)
    if arguments.json:
        session.print_json(state)
        return 0
    for node in state["nodes"]:
        print(f"{node['name']}: Amazon SQS at {node['endpoint']}")
    print(f"3 NATS servers; their data is in {root}")
    print("show it with     penstock cluster status")
    print("stop it with     penstock cluster down")
    return 0


def _operate(session: Session, arguments: Namespace) -> int:
    from penstock.cluster.address import read_address
    from penstock.cluster.local import read_state
    from penstock.cluster.operations import operate

    url = arguments.url or read_state(Path(arguments.directory))["url"]
    address = read_address(read_url(url))
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
    if arguments.action == "spread":
        return _spread(session, arguments, address)
    while True:
        status = asyncio.run(operate(address, lambda each: each.status()))
        if arguments.json:
            session.print_json(msgspec.to_builtins(status))
        else:
            print(_shown(status), flush=True)
        if not arguments.watch:
            return 0
        time.sleep(1)


def _spread(session: Session, arguments: Namespace, address: "ClusterAddress") -> int:
    from penstock.cluster.operations import operate

    queue, shards = arguments.queue, arguments.shards
    found = asyncio.run(operate(address, lambda each: each.spread(queue, shards)))
    if arguments.json:
        session.print_json(msgspec.to_builtins(found))
        return 0
    held = ", ".join(f"{count} in shard {shard}" for shard, count in found.messages.items())
    print(f"{queue} is spread over {_shards(found.shards)}; messages: {held}")
    if found.before:
        print(
            f"it was spread over {_shards(max(found.before))}: "
            "messages there are pulled like the others, until those shards are empty"
        )
    return 0


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"


def _shown(status: "ClusterStatus") -> str:
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
    shown = f"{table(_NODE_HEAD, nodes, left=7)}\n\n{table(_SHARD_HEAD, shards, left=2)}"
    for each in status.shards:
        if each.archive_error:
            shown += f"\nshard {each.shard} is not archived: {each.archive_error}"
    return shown


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
