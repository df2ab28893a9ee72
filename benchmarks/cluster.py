"""A cluster of three NATS servers and three nodes on this machine: `make bench NAME=cluster`.

Rates: many clients push, then pull and delete, through routers in a process of their own; beside
them, on the same NATS servers, a loop that publishes to a bare JetStream stream, one message in
flight, as large as the cluster's own extents were in that round. Both wait for three servers that
sync before they answer.

Pauses: clients push without rest while an owner is killed, stopped or handed over; the figure is
the longest time without an answer on that node's shards. A run that loses an answered push, or that
sees a message claimed twice under one epoch, is void.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import penstock.aio
from benchmarks.harness import (
    Target,
    Void,
    check_ledger,
    disk_directory,
    finish,
    is_quick,
    machine,
    percentile,
    print_table,
    ratio,
    run_benchmark,
)
from penstock.cluster.address import read_address
from penstock.cluster.jetstream import JetStream, open_client
from penstock.cluster.log import Append, Bounds, Mismatch, Unanswered
from penstock.cluster.operations import Operator, operate
from penstock.errors import BackendLost
from penstock.url import read_url

BODY = b"x" * 256
ROUNDS = 5
CLIENTS = 256
SECONDS = 5.0
BARE_SHARDS = 1


class LocalCluster:
    """What `penstock cluster up` has started in a directory."""

    def __init__(self, root: Path, shards: int) -> None:
        self.root = root
        told = self._penstock("up", "--json", "--port", "0", "--shards", str(shards))
        self.state: dict[str, Any] = json.loads(told)
        self.url: str = self.state["url"]
        self.address = read_address(read_url(self.url))

    def _penstock(self, action: str, *more: str) -> str:
        command = [sys.executable, "-m", "penstock", "cluster", action]
        command += ["--directory", str(self.root), *more]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def pid(self, node: str) -> int:
        """The process of a node."""
        return int(next(each["pid"] for each in self.state["nodes"] if each["name"] == node))

    async def settle(self) -> None:
        """Waits until every node owns shards and every shard has a standby."""
        while True:
            status = await operate(self.address, Operator.status)
            live = [each for each in status.nodes if each.is_live]
            if all(each.owned for each in live) and all(
                each.is_live and each.standby_lag == 0 for each in status.shards
            ):
                return
            await asyncio.sleep(0.2)

    async def slots(self) -> int:
        """How many extents all shards have."""
        status = await operate(self.address, Operator.status)
        return sum(each.slot or 0 for each in status.shards)

    def down(self) -> None:
        """Stops it."""
        self._penstock("down")


async def push_pull_delete(
    cluster: LocalCluster, queues: list[str], clients: int, seconds: float
) -> dict[str, float]:
    """Pushes for so long, then pulls and deletes it all; rates, and messages an extent."""
    async with await penstock.aio.connect(cluster.url) as connected:
        for queue in queues:
            await connected.create(queue)
        pushed: list[str] = []
        latencies: list[float] = []
        before = await cluster.slots()
        began_s = time.perf_counter()
        end_s = began_s + seconds

        async def push(number: int) -> None:
            queue = queues[number % len(queues)]
            while time.perf_counter() < end_s:
                sent_s = time.perf_counter()
                pushed.append(await connected.push(queue, BODY))
                latencies.append(time.perf_counter() - sent_s)

        await asyncio.gather(*map(push, range(clients)))
        push_s = time.perf_counter() - began_s
        extents = max(1, await cluster.slots() - before)
        pulled: list[str] = []

        async def drain(number: int) -> None:
            queue = queues[number % len(queues)]
            while claims := await connected.pull_many(queue, 10):
                pulled.extend(claim.id for claim in claims)
                await connected.delete_many(claims)

        began_s = time.perf_counter()
        await asyncio.gather(*map(drain, range(min(clients, 64))))
        drain_s = time.perf_counter() - began_s
        check_ledger(pushed, pulled)
        latencies.sort()
        for queue in queues:
            await connected.remove(queue)
        return {
            "pushes": len(pushed) / push_s,
            "lifecycles": len(pushed) / (push_s + drain_s),
            "each_extent": len(pushed) / extents,
            "p50_ms": 1_000 * percentile(latencies, 50),
            "p99_ms": 1_000 * percentile(latencies, 99),
        }


async def bare_loop(cluster: LocalCluster, name: str, size_bytes: int, seconds: float) -> float:
    """Appends to a bare stream, one at a time; appends a second."""
    client = await open_client(cluster.address, "benchmark")
    bare = JetStream(client, name)
    await bare.prepare(BARE_SHARDS, 3)
    await bare.prefer_here(0)
    data = os.urandom(size_bytes)
    last = None
    while last is None:
        # The stream's leader may be changing hands.
        with suppress(Unanswered, Mismatch):
            bounds = await bare.execute(Bounds(0))
            last = await bare.execute(Append(0, bounds.last, data))
    count = 0
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        last = await bare.execute(Append(0, last, data))
        count += 1
    took_s = time.perf_counter() - began_s
    await client.close()
    return count / took_s


async def longest_silence(cluster: LocalCluster, disturb: str) -> float:
    """Disturbs the owner of shard 0 while clients push; the longest time without an answer."""
    await cluster.settle()
    status = await operate(cluster.address, Operator.status)
    victim = str(status.shards[0].owner)
    stopped = False
    gaps: list[float] = []
    answered: list[int] = []
    async with await penstock.aio.connect(cluster.url) as connected:
        names = [f"gap{number}" for number in range(12)]
        for name in names:
            await connected.create(name, visibility_timeout=600)

        async def push(at: int) -> None:
            last_s = time.perf_counter()
            number = at
            while not stopped:
                with suppress(BackendLost):
                    await connected.push(names[at], b"%d" % number, dedup_id=str(number))
                    answered.append(number)
                now_s = time.perf_counter()
                gaps.append(now_s - last_s)
                last_s, number = now_s, number + len(names)

        tasks = [asyncio.create_task(push(at)) for at in range(len(names))]
        await asyncio.sleep(1)
        gaps.clear()
        if disturb == "move":
            await operate(cluster.address, lambda each: each.drain(victim))
        else:
            number = signal.SIGKILL if disturb == "kill" else signal.SIGSTOP
            os.kill(cluster.pid(victim), number)
        await asyncio.sleep(6 if disturb == "stop" else 3)
        stopped = True
        await asyncio.gather(*tasks)
        if disturb == "stop":
            os.kill(cluster.pid(victim), signal.SIGCONT)
        seen: dict[int, int] = {}
        for name in names:
            while claims := await connected.pull_many(name, 100):
                for claim in claims:
                    if seen.setdefault(int(claim.body), claim.epoch) != claim.epoch:
                        raise Void(f"{claim.body!r} was claimed twice")
            await connected.remove(name)
        if set(answered) - set(seen):
            raise Void(f"{len(set(answered) - set(seen))} answered pushes were lost")
    return max(gaps)


async def measure_rates(root: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Rates of one shard beside the bare loop, and of eight shards."""
    figures: dict[str, Any] = {}
    for shards in (1, 8):
        cluster = LocalCluster(root / f"rates{shards}", shards)
        try:
            queues = [f"q{number}" for number in range(4 * shards)]
            results = []
            for number in range(rounds):
                ours = await push_pull_delete(cluster, queues, CLIENTS, seconds)
                size = round(ours["each_extent"] * (len(BODY) + 112)) + 56
                appends = await bare_loop(cluster, f"bare{number}", size, seconds / 2)
                results.append({**ours, "bare": appends * ours["each_extent"]})
            half = await push_pull_delete(cluster, queues, CLIENTS // 16, seconds)
            figures[f"{shards} shards"] = {"rounds": results, "light": half}
        finally:
            cluster.down()
    return figures


async def measure_pauses(root: Path) -> dict[str, float]:
    """The longest silence for each kind of failure, each on a cluster of its own."""
    pauses = {}
    for disturb in ("move", "stop", "kill"):
        cluster = LocalCluster(root / disturb, 8)
        try:
            pauses[disturb] = await longest_silence(cluster, disturb)
        finally:
            cluster.down()
    return pauses


def main() -> None:
    """Measures, prints the tables, and the targets."""
    rounds, seconds = (1, 0.5) if is_quick() else (ROUNDS, SECONDS)
    root = disk_directory()
    try:
        rates = asyncio.run(measure_rates(root, rounds, seconds))
        pauses = asyncio.run(measure_pauses(root))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(machine())
    rows = [
        (
            title,
            f"{each['pushes']:,.0f}",
            f"{each['lifecycles']:,.0f}",
            f"{each['each_extent']:.1f}",
            f"{each['bare']:,.0f}",
            f"{each['p50_ms']:.1f} / {each['p99_ms']:.1f}",
        )
        for title, found in rates.items()
        for each in [*found["rounds"], {**found["light"], "bare": 0.0}]
    ]
    head = ("", "pushes/s", "lifecycles/s", "an extent", "bare loop/s", "p50/p99 ms")
    print_table(f"{CLIENTS} clients, then {CLIENTS // 16}; {len(BODY)} B", head, rows)
    print_table("longest silence", ("", "s"), [(k, f"{v:.2f}") for k, v in pauses.items()])
    one = rates["1 shards"]["rounds"]
    targets = [
        Target(
            "pushes / bare loop", ratio([e["pushes"] for e in one], [e["bare"] for e in one]), 0.5
        ),
        Target("silence after kill -9, s", pauses["kill"], 1.0, at_least=False),
        Target("silence after SIGSTOP, s", pauses["stop"], 3.0, at_least=False),
        Target("silence of a planned move, s", pauses["move"], 0.2, at_least=False),
    ]
    finish("cluster", targets, {"rates": rates, "silence_s": pauses})


if __name__ == "__main__":
    run_benchmark(main)
