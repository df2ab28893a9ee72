"""A cluster of three NATS servers and three nodes on this machine: `make bench NAME=cluster`.

Rates: many clients push, then pull and delete, through a router in a process of their own. Beside
them in each round:

    bare loop   appends to a bare stream of the same NATS servers, one append in flight, of as many
                bytes as the cluster's own extents had in that round; both wait for three servers
                that sync before they answer. Its rate is appends times the pushes an extent had.
    RabbitMQ    as many clients publish persistent messages to quorum queues and wait for confirms,
                then consume and acknowledge. It is one broker: it replicates nothing.

A queue that is spread over k shards is measured beside them: one queue, all clients on it.

Latencies at half load are printed with those of bare appends of the same size at the same rate:
what NATS and the disk contribute to the slowest of them.

Where the processor goes is a table of its own. Clients, nodes and NATS servers share the cores of
this machine, so `limit` is what it could push if nothing ever waited: its cores, divided by the
processor time that a push took in that run. More shards cannot pass it here; `of it` says how near
a run came. On machines of their own the parts would have as many cores each.

Pauses: clients push without rest while an owner is killed, stopped or drained; the figure is the
longest time without an answer on any shard, the worst of some runs. `nothing` is the same without
a disturbance: what the load itself, the disk and the machine contribute. A run that loses an
answered push, or sees a message claimed twice under one epoch, or in which a push fails, is void.
"""

import asyncio
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
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
from penstock.cluster.placement import ranked
from penstock.url import read_url
from tests.rabbit import Broker

BODY = b"x" * 256
ROUNDS = 3
CLIENTS = 256
SECONDS = 3.0
SHARDS = (1, 2, 4, 8)
SPREAD = (1, 2, 4)
# How often each failure is tried.
FAILURES = 3
PACE_S = 0.005
TICKS = os.sysconf("SC_CLK_TCK")


class StartedCluster:
    """What `penstock cluster up` has started in a directory."""

    def __init__(self, root: Path, shards: int) -> None:
        self.root = root
        output = self._penstock("up", "--json", "--port", "0", "--shards", str(shards))
        self.state: dict[str, Any] = json.loads(output)
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
        """Waits until every shard is where it belongs and has a standby that has read it all."""
        while True:
            status = await operate(self.address, Operator.status)
            live = [each.node for each in status.nodes if each.is_live and each.state == "up"]
            if all(
                each.is_live and each.standby_lag == 0 and each.owner == ranked(each.shard, live)[0]
                for each in status.shards
            ):
                return
            await asyncio.sleep(0.2)

    async def written(self) -> tuple[int, int]:
        """How many extents all shards have, and how many bytes are in them."""
        client = await open_client(self.address, "benchmark")
        slots = size_bytes = 0
        for node in self.state["nodes"]:
            subject = f"{self.address.name}.node.{node['name']}.ask"
            answer = await client.request(subject, b"status", timeout=5)
            for each in json.loads(answer.data)["owned"].values():
                slots += each["slot"]
                size_bytes += each["position"]
        await client.close()
        return slots, size_bytes

    def processor_s(self) -> dict[str, float]:
        """The processor time that clients, nodes and NATS servers have used."""
        used = {"clients": time.process_time()}
        for kind in ("nodes", "nats"):
            used[kind] = 0.0
            for each in self.state[kind]:
                fields = Path(f"/proc/{each['pid']}/stat").read_text().rpartition(")")[2].split()
                used[kind] += (int(fields[11]) + int(fields[12])) / TICKS
        return used

    def down(self) -> None:
        """Stops it."""
        self._penstock("down")


async def push_pull_delete(
    cluster: StartedCluster, queues: list[str], clients: int, seconds: float, spread: int = 1
) -> dict[str, float]:
    """Pushes for so long, then pulls and deletes it all; rates, and messages an extent.

    Each queue is spread over so many shards.
    """
    async with await penstock.aio.connect(cluster.url) as connected:
        for queue in queues:
            await connected.create(queue)
            if spread > 1:
                await operate(cluster.address, partial(Operator.spread, queue=queue, shards=spread))
        pushed: list[str] = []
        latencies: list[float] = []
        slots, size_bytes = await cluster.written()
        used = cluster.processor_s()
        began_s = time.perf_counter()
        end_s = began_s + seconds

        async def push(number: int) -> None:
            queue = queues[number % len(queues)]
            while time.perf_counter() < end_s:
                sent_s = time.perf_counter()
                pushed.append((await connected.push(queue, BODY)).id)
                latencies.append(time.perf_counter() - sent_s)

        await asyncio.gather(*map(push, range(clients)))
        push_s = time.perf_counter() - began_s
        used = {kind: now_s - used[kind] for kind, now_s in cluster.processor_s().items()}
        slots_now, bytes_now = await cluster.written()
        extents = max(1, slots_now - slots)
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
        for queue in queues:
            await connected.remove(queue)
        return {
            "pushes": len(pushed) / push_s,
            "lifecycles": len(pushed) / (push_s + drain_s),
            "each_extent": len(pushed) / extents,
            "extent_bytes": (bytes_now - size_bytes) / extents,
            **{f"{kind}_us": 1e6 * each_s / len(pushed) for kind, each_s in used.items()},
            "cores": sum(used.values()) / push_s,
            "limit": (os.cpu_count() or 1) * len(pushed) / sum(used.values()),
            **_percentiles(sorted(latencies)),
        }


async def paced(cluster: StartedCluster, queues: list[str], rate: float, seconds: float) -> Any:
    """Pushes at a fixed rate; latencies from when each push was due, and the extents."""
    async with await penstock.aio.connect(cluster.url) as connected:
        for queue in queues:
            await connected.create(queue)
        latencies: list[float] = []
        slots, size_bytes = await cluster.written()
        # Pauses of this process by garbage of earlier measurements are not the cluster's.
        gc.collect()
        gc.freeze()
        began_s = time.perf_counter()

        async def push(number: int, due_s: float) -> None:
            await connected.push(queues[number % len(queues)], BODY)
            latencies.append(time.perf_counter() - due_s)

        # A list of all tasks would be garbage to look through, for up to 0.14 s at a time; a group
        # forgets those that have ended.
        async with asyncio.TaskGroup() as tasks:
            for number in range(round(rate * seconds)):
                due_s = began_s + number / rate
                if (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(max(wait_s, PACE_S))
                tasks.create_task(push(number, due_s))
        took_s = time.perf_counter() - began_s
        gc.unfreeze()
        slots_now, bytes_now = await cluster.written()
        extents = max(1, slots_now - slots)
        for queue in queues:
            await connected.remove(queue)
        return {
            "rate": rate,
            "extents": extents / took_s,
            "extent_bytes": (bytes_now - size_bytes) / extents,
            **_percentiles(sorted(latencies)),
        }


def _percentiles(latencies: list[float]) -> dict[str, float]:
    return {f"p{each}_ms": 1_000 * percentile(latencies, each) for each in (50, 99)}


async def bare_loop(
    cluster: StartedCluster, name: str, size_bytes: int, seconds: float, rate: float | None = None
) -> dict[str, float]:
    """Appends to a bare stream, one at a time: appends a second, and their latencies.

    With a rate, latencies are from when each append was due.
    """
    client = await open_client(cluster.address, "benchmark")
    bare = JetStream(client, name)
    await bare.prepare(1, 3)
    await bare.move_leader_here(0)
    data = os.urandom(size_bytes)
    last = None
    while last is None:
        # The stream may have no leader for a moment.
        with suppress(Unanswered, Mismatch):
            bounds = await bare.execute(Bounds(0))
            last = await bare.execute(Append(0, bounds.last, data))
    latencies: list[float] = []
    began_s = time.perf_counter()
    while (now_s := time.perf_counter()) - began_s < seconds:
        due_s = now_s if rate is None else began_s + len(latencies) / rate
        if due_s > now_s:
            await asyncio.sleep(due_s - now_s)
        try:
            last = await bare.execute(Append(0, last, data))
        except (Unanswered, Mismatch):
            # Lost while the leader changed, or taken without an answer.
            last = (await bare.execute(Bounds(0))).last
            continue
        latencies.append(time.perf_counter() - due_s)
    took_s = time.perf_counter() - began_s
    await client.close()
    return {"appends": len(latencies) / took_s, **_percentiles(sorted(latencies))}


async def quorum_queues(url: str, queues: list[str], clients: int, seconds: float) -> Any:
    """The same load on quorum queues of RabbitMQ; pushes and lifecycles a second."""
    import aio_pika

    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=True)
    await channel.set_qos(prefetch_count=1_000)
    arguments = {"x-queue-type": "quorum"}
    declared = [await channel.declare_queue(q, durable=True, arguments=arguments) for q in queues]
    numbers = itertools.count()
    pushed: list[int] = []
    began_s = time.perf_counter()

    async def push(client: int) -> None:
        while time.perf_counter() - began_s < seconds:
            number = next(numbers)
            body = b"%d" % number + BODY[len(str(number)) :]
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, queues[client % len(queues)])
            pushed.append(number)

    await asyncio.gather(*map(push, range(clients)))
    push_s = time.perf_counter() - began_s
    pulled: list[int] = []
    done = asyncio.Event()

    async def take(message: Any) -> None:
        pulled.append(int(message.body.rstrip(b"x")))
        await message.ack()
        if len(pulled) == len(pushed):
            done.set()

    began_s = time.perf_counter()
    for queue in declared:
        await queue.consume(take)
    await done.wait()
    drain_s = time.perf_counter() - began_s
    check_ledger(pushed, pulled)
    await connection.close()
    return {"pushes": len(pushed) / push_s, "lifecycles": len(pushed) / (push_s + drain_s)}


async def longest_silence(cluster: StartedCluster, disturb: str) -> float:
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
        elif disturb != "nothing":
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
                    # Claims last 600 s: a second one of the same message is a double claim.
                    if int(claim.body) in seen:
                        raise Void(f"{claim.body!r} was claimed twice")
                    seen[int(claim.body)] = claim.epoch
            await connected.remove(name)
        if set(answered) - set(seen):
            raise Void(f"{len(set(answered) - set(seen))} answered pushes were lost")
    return max(gaps)


async def measure_rates(root: Path, rounds: int, seconds: float, rabbit: str) -> dict[str, Any]:
    """Rates by the number of shards; with one shard, beside the bare loop and RabbitMQ."""
    figures: dict[str, Any] = {}
    for shards in SHARDS:
        cluster = StartedCluster(root / f"rates{shards}", shards)
        try:
            await cluster.settle()
            queues = [f"q{number}" for number in range(4 * shards)]
            results = []
            for number in range(rounds if shards == 1 else 1):
                ours = await push_pull_delete(cluster, queues, CLIENTS, seconds)
                if shards == 1:
                    size = round(ours["extent_bytes"])
                    bare = await bare_loop(cluster, f"bare{number}", size, seconds / 2)
                    ours["bare"] = bare["appends"] * ours["each_extent"]
                    peer = await quorum_queues(rabbit, queues, CLIENTS, seconds)
                    ours |= {f"rabbit_{kind}": rate for kind, rate in peer.items()}
                results.append(ours)
            figures[str(shards)] = results
            if shards == 1:
                half = median(each["pushes"] for each in results) / 2
                figures["half"] = paces = await paced(cluster, queues, half, seconds)
                size, rate = round(paces["extent_bytes"]), paces["extents"]
                figures["bare_half"] = await bare_loop(cluster, "paced", size, seconds, rate)
        finally:
            cluster.down()
    return figures


async def measure_spread(root: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Rates of one queue, by the number of shards that it is spread over."""
    cluster = StartedCluster(root / "spread", max(SPREAD))
    figures: dict[str, Any] = {str(spread): [] for spread in SPREAD}
    try:
        await cluster.settle()
        for number, spread in itertools.product(range(rounds), SPREAD):
            queues = [f"hot{number}-{spread}"]
            found = await push_pull_delete(cluster, queues, CLIENTS, seconds, spread)
            figures[str(spread)].append(found)
    finally:
        cluster.down()
    return figures


async def measure_pauses(root: Path, times: int) -> dict[str, list[float]]:
    """The longest silences for each kind of failure.

    One cluster has them in this order: a node that was stopped comes back, one that was drained
    takes no shards, and then one of the other two is killed.
    """
    pauses: dict[str, list[float]] = {"nothing": [], "stop": [], "move": [], "kill": []}
    for number in range(times):
        cluster = StartedCluster(root / f"pauses{number}", 8)
        try:
            for disturb, found in pauses.items():
                found.append(await longest_silence(cluster, disturb))
        finally:
            cluster.down()
    return pauses


def print_processor(title: str, what: str, every: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Where the processor goes, and what all cores of this machine would do at most."""
    rows = [
        (
            name,
            f"{each['pushes']:,.0f}",
            *(f"{each[kind]:.0f}" for kind in ("clients_us", "nodes_us", "nats_us")),
            f"{each['cores']:.2f}",
            f"{each['limit']:,.0f}",
            f"{100 * each['pushes'] / each['limit']:.0f}%",
        )
        for name, each in every
    ]
    head = (what, "pushes/s", "clients", "3 nodes", "3 NATS", "cores used", "limit/s", "of it")
    print_table(f"{title}: processor time a push, us; {os.cpu_count()} cores", head, rows)


def print_rates(rates: dict[str, Any]) -> None:
    """The tables of rates, of processor time, and of latency at half load."""
    every = [(shards, each) for shards in map(str, SHARDS) for each in rates[shards]]
    head = ("shards", "pushes/s", "lifecycles/s", "an extent", "bytes", "p50/p99 ms")
    head += ("bare loop/s", "RabbitMQ pushes/s", "lifecycles/s")
    names = ("bare", "rabbit_pushes", "rabbit_lifecycles")
    rows = [
        (
            shards,
            f"{each['pushes']:,.0f}",
            f"{each['lifecycles']:,.0f}",
            f"{each['each_extent']:.1f}",
            f"{each['extent_bytes']:,.0f}",
            f"{each['p50_ms']:.1f} / {each['p99_ms']:.1f}",
            *(f"{each[name]:,.0f}" if name in each else "" for name in names),
        )
        for shards, each in every
    ]
    print_table(f"{CLIENTS} clients, {len(BODY)} B", head, rows)
    print_processor("queues in several shards", "shards", every)
    half, bare = rates["half"], rates["bare_half"]
    print(
        f"at half load, {half['rate']:,.0f} pushes/s in {half['extents']:,.0f} extents/s: "
        f"p50 {half['p50_ms']:.1f} ms, p99 {half['p99_ms']:.1f} ms\n"
        f"bare appends of the same size, {bare['appends']:,.0f}/s: "
        f"p50 {bare['p50_ms']:.1f} ms, p99 {bare['p99_ms']:.1f} ms"
    )


def main() -> None:
    """Measures, prints the tables, and the targets."""
    rounds, seconds, times = (1, 0.5, 1) if is_quick() else (ROUNDS, SECONDS, FAILURES)
    root = disk_directory()
    (root / "rabbit").mkdir()
    broker = Broker(root / "rabbit")
    try:
        broker.start()
        try:
            rates = asyncio.run(measure_rates(root, rounds, seconds, broker.url))
        finally:
            broker.end()
        spread = asyncio.run(measure_spread(root, rounds, seconds))
        pauses = asyncio.run(measure_pauses(root, times))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(machine())
    print_rates(rates)
    hot = [(number, each) for number, found in spread.items() for each in found]
    print_processor("one queue that is spread", "over", hot)
    rows = [(kind, " ".join(f"{each:.2f}" for each in found)) for kind, found in pauses.items()]
    print_table("longest silence", ("", "s"), rows)
    one = rates["1"]
    ours = {kind: [each[kind] for each in one] for kind in ("pushes", "lifecycles")}
    targets = [
        Target("pushes / bare loop", ratio(ours["pushes"], [each["bare"] for each in one]), 0.5),
        *(
            Target(f"{kind} / RabbitMQ", ratio(ours[kind], [e[f"rabbit_{kind}"] for e in one]), 1.0)
            for kind in ours
        ),
        Target("silence after kill -9, s", max(pauses["kill"]), 1.0, at_least=False),
        Target("silence after SIGSTOP, s", max(pauses["stop"]), 3.0, at_least=False),
        Target("silence of a planned move, s", max(pauses["move"]), 0.2, at_least=False),
    ]
    finish("cluster", targets, {"rates": rates, "spread": spread, "silence_s": pauses})


if __name__ == "__main__":
    run_benchmark(main)
