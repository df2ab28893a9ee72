"""The published checks of Amazon SQS's rules, of every server that can be had: `make parity`.

The peers are those of `sqs_servers` and some more, each in the newest version that its registry
has, started as its documentation says. What is found goes to results/parity.json; the pages are
made from it by `parity_pages`. Nothing of this is part of the tests.

A check that fails is run once more when fewer run: a server that is slow for a moment breaks no
rule. What was found is kept server by server, so that a run of some replaces only theirs.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import PEERS, peer_lack, peer_version
from benchmarks.parity_pages import OURS, RESULTS, load, write_pages
from benchmarks.sqs_servers import KINDS, Absent, Kind, PeerServer, penstock_command
from penstock.testing.sqs import CHECKS, CheckedServer, Result, run_checks
from penstock.testing.sqs.target import PROTOCOLS, Protocol, movable_clock

AT_ONCE = 3
THREADS = 16
THREADS_AGAIN = 3
# What is waited for in real time; rules of minutes are asked only where the clock can be moved.
WAIT_S_MAX = 10.0


class ComparedServer(NamedTuple):
    """A server of the table."""

    kind: Kind
    registry: str
    # The directory that it is installed into, and the package whose version counts.
    directory: str = ""
    package: str = ""
    note: str = ""

    @property
    def version(self) -> str:
        """The version that runs."""
        return peer_version(self.directory, self.package) if self.package else version("penstock")


def _penstock(port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    command, environment = penstock_command(port, "memory:")
    return [*command, "--aws-limits", "--clock", "manual"], environment


def _node(module: str, start: str, port: int, directory: Path) -> tuple[list[str], dict[str, str]]:
    path = json.dumps(str(PEERS / module / "node_modules" / module))
    return ["node", "-e", start.replace("MODULE", path).replace("PORT", str(port))], {}


def _npm(name: str) -> Callable[[], str]:
    return partial(peer_lack, name, [f"{name}@latest"], npm=True)


PARITY: Mapping[str, ComparedServer] = {
    "Penstock": ComparedServer(
        Kind(_penstock), "this checkout", note="in memory, with `--aws-limits`; its clock was moved"
    ),
    "fauxqs": ComparedServer(KINDS["fauxqs"], "npm", "fauxqs", "fauxqs"),
    "ministack": ComparedServer(KINDS["ministack"], "PyPI", "ministack", "ministack"),
    "moto": ComparedServer(KINDS["moto_server"], "PyPI", "moto-server", "moto", "moto_server"),
    "local-aws-sqs": ComparedServer(
        Kind(
            partial(
                _node,
                "local-aws-sqs",
                "require(MODULE).createSqsServer({port: PORT, hostname: '127.0.0.1'})",
            ),
            _npm("local-aws-sqs"),
        ),
        "npm",
        "local-aws-sqs",
        "local-aws-sqs",
    ),
}
# What was looked for on 2026-11-19 and could not be run, and why.
ABSENT: Mapping[str, str] = {
    "AWS Emulator": "released as .deb, .rpm and Dockerfile on GitHub; no registry has it",
    "ElasticMQ": (
        "npm has 0.7.1 only, PyPI and Debian nothing; it answers the Query protocol only, and at a "
        "queue's own address only, so these checks do not reach it"
    ),
    "sqslite": "npm has 2.1.1; its checks did not end within seven minutes on a busy machine",
    "LocalStack": "PyPI has 4.14.0, which did not start on Python 3.11; later ones need a token",
    "LocalEmu": "PyPI has 1.3.2, whose SQS cannot be loaded by Python 3.11",
    "local-web-services": "PyPI has 0.24.0, which starts from a project of AWS CDK or Terraform",
    "fakecloud": "PyPI has its client only, which is no server",
    "fake-sqs": "npm has 5.0.3: four actions, and no CreateQueue",
    "GoAws, Floci, gopherstack, kumo, cloudemu, SmoothMQ": "in none of PyPI, npm and Debian",
}


def main() -> None:
    """Runs the checks against all servers, or those that are named, and writes the pages.

    With `--pages` it only writes them again, from the results of the last run.
    """
    if sys.argv[1:] == ["--pages"]:
        write_pages(load())
        return
    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        for name, found in pool.map(partial(_ask, Path(directory)), sys.argv[1:] or list(PARITY)):
            _keep(name, found)


def _ask(directory: Path, name: str) -> tuple[str, dict[str, Any] | str]:
    """What a server's checks found, or why it was not run."""
    try:
        server = PeerServer(name, directory / name, PARITY[name].kind)
    except (Absent, RuntimeError) as reason:
        return name, " ".join(str(reason).split())[-200:]
    try:
        results = _results(server)
    finally:
        server.stop()
    passed = sum(each.status == "passed" for each in results)
    print(f"{name}: {passed} of {len(results)}", flush=True)
    return name, _kept(PARITY[name], results)


def _keep(name: str, found: dict[str, Any] | str) -> None:
    """Adds what was found to the results, and writes the pages."""
    kept: dict[str, Any] = load() if RESULTS.is_file() else {"servers": {}, "absent": {}}
    kept["servers"].pop(name, None)
    kept["absent"] = {**ABSENT, **kept["absent"]}
    kept["absent"].pop(name, None)
    if isinstance(found, str):
        print(f"{name}: not run: {found}", flush=True)
        kept["absent"][name] = found
    else:
        kept["servers"][name] = found
    order = [each for each in PARITY if each in kept["servers"]]
    kept = {
        "date": datetime.now(UTC).date().isoformat(),
        "load": f"load average {os.getloadavg()[0]:.0f}",
        "servers": {each: kept["servers"][each] for each in order},
        "absent": kept["absent"],
    }
    RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    if OURS in kept["servers"]:
        write_pages(kept)


def _results(server: PeerServer) -> list[Result]:
    advance = movable_clock(server.url, "")

    def made(protocol: Protocol) -> CheckedServer:
        return CheckedServer(server.url, protocol, advance=advance)

    if advance is not None:
        return run_checks(made)
    results = run_checks(made, wait_s_max=WAIT_S_MAX, threads=THREADS)
    failed = [(each.name, each.protocol) for each in results if each.status == "failed"]
    again: dict[tuple[str, str], Result] = {}
    for protocol in PROTOCOLS:
        checks = [CHECKS[name] for name, over in failed if over == protocol]
        if checks:
            found = run_checks(made, checks, protocols=(protocol,), threads=THREADS_AGAIN)
            again |= {(each.name, each.protocol): each for each in found}
    return [again.get((each.name, each.protocol), each) for each in results]


def _kept(peer: ComparedServer, results: Sequence[Result]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for each in results:
        cell = {"status": each.status} | ({"reason": each.reason} if each.reason else {})
        cells.setdefault(each.name, {})[each.protocol] = cell
    described = {"version": peer.version, "registry": peer.registry, "note": peer.note}
    return {**described, "checks": {name: cells[name] for name in CHECKS if name in cells}}


if __name__ == "__main__":
    main()
