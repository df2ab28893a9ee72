"""A cluster of real processes, as `penstock cluster up` starts it, killed, stopped and resumed."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import boto3
import botocore.config
import pytest

import penstock.aio
from penstock.cluster import calls
from penstock.cluster.address import read_address
from penstock.cluster.jetstream import open_client
from penstock.cluster.nats_servers import find_program
from penstock.cluster.operations import Operator, operate
from penstock.cluster.placement import first_shard
from penstock.service import Peek, Pull, Push, Stats
from penstock.url import read_url
from tests.cluster.ledger import Ledger
from tests.conftest import FULL

STOPS = 50 if FULL else 3
MOVES = 50 if FULL else 4
KILLS = 20 if FULL else 2
PATIENCE_S = 60
_names = (f"queue{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory):
    root = tmp_path_factory.mktemp("local")
    up = penstock_cluster("up", root, "--json", "--port", "0", "--shards", "4")
    cluster = LocalCluster(root, json.loads(up))
    yield cluster
    # The nodes hand over through the servers, so those end last.
    end(cluster.restarted)
    penstock_cluster("down", root)
    end(cluster.restarted_nats)


def end(processes):
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(PATIENCE_S)


def penstock_cluster(action, root, *more):
    """What the command prints."""
    command = [sys.executable, "-m", "penstock", "cluster", action, "--directory", str(root)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


class LocalCluster:
    """The processes of a cluster, by what they are."""

    def __init__(self, root, state):
        self.root = root
        self.url = state["url"]
        self.nodes = {node["name"]: node for node in state["nodes"]}
        self.nats = [each["pid"] for each in state["nats"]]
        self.restarted = []
        self.restarted_nats = []
        self.address = read_address(read_url(self.url))

    async def status(self):
        return await operate(self.address, lambda each: each.status())

    async def owner(self, shard):
        return (await self.status()).shards[shard].owner

    async def until_served(self):
        """Waits until every shard has an owner that answers, and a standby."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = await self.status()
                if all(each.is_live and each.standby for each in status.shards):
                    return

    def signal(self, node, number):
        os.kill(self.nodes[node]["pid"], number)

    def start_again(self, node):
        """Starts a node that was killed."""
        environment = {**os.environ, "PENSTOCK_STORE": f"{self.url}&node={node}"}
        environment.pop("PENSTOCK_URL", None)
        with open(self.root / f"{node}.out", "ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "serve", "--port", "0"],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.nodes[node]["pid"] = process.pid
        self.restarted.append(process)

    def start_nats_again(self, number):
        """Starts a NATS server that was killed."""
        configuration = self.root / "nats" / f"{number + 1}.conf"
        with open(self.root / "nats" / f"{number + 1}.out", "ab") as out:
            process = subprocess.Popen(
                [find_program(), "-c", str(configuration)],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.nats[number] = process.pid
        self.restarted_nats.append(process)


def with_ledger(cluster, disturb, queues=4):
    """Runs a ledger's clients while something happens to the cluster; what is wrong then."""

    async def work():
        await cluster.until_served()
        async with await penstock.aio.connect(cluster.url) as connected:
            ledger = Ledger(connected, [next(_names) for _ in range(queues)])
            await ledger.begin()
            await ledger.next_answers(50)
            await disturb(ledger)
            await ledger.next_answers(50)
            return await ledger.end(), ledger

    wrong, ledger = asyncio.run(work())
    assert ledger.pushed
    return wrong


def test_killing_owners_loses_nothing_that_was_answered(local_cluster):
    async def kill(ledger):
        for _ in range(KILLS):
            await local_cluster.until_served()
            victim = await local_cluster.owner(0)
            local_cluster.signal(victim, signal.SIGKILL)
            await local_cluster.until_served()
            await ledger.next_answers(100)
            local_cluster.start_again(victim)

    assert with_ledger(local_cluster, kill) == []


def test_a_planned_move_is_seen_by_nobody(local_cluster):
    """A push without a dedup id cannot be repeated: none may end in an error."""

    async def work():
        await local_cluster.until_served()
        stopped = False
        async with await penstock.aio.connect(local_cluster.url) as queues:
            names = [
                name for name in (next(_names) for _ in range(40)) if first_shard(name, 4) == 0
            ]
            for name in names:
                await queues.create(name)
            pushed = []

            async def push(name):
                while not stopped:
                    pushed.append(await queues.push(name, b"once"))

            tasks = [asyncio.create_task(push(name)) for name in names for _ in range(8)]
            terms = set()
            for _ in range(MOVES):
                owner = await local_cluster.owner(0)
                other = next(name for name in local_cluster.nodes if name != owner)
                await operate(local_cluster.address, partial(Operator.move, shard=0, node=other))
                terms.add((await local_cluster.status()).shards[0].term)
                before = len(pushed)
                while len(pushed) < before + 100 and not any(t.done() for t in tasks):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            stopped = True
            await asyncio.gather(*tasks)
            assert len(terms) == MOVES
            held = [(await queues.stats(name)).visible for name in names]
            assert sum(held) == len(pushed) == len(set(pushed))

    asyncio.run(work())


def test_an_owner_that_is_stopped_and_resumed_answers_nothing_stale(local_cluster):
    """Row 10: SIGSTOP of a shard's owner, then resume; the failover takes less than 10 s."""

    async def stop(ledger):
        for _ in range(STOPS):
            await local_cluster.until_served()
            victim = await local_cluster.owner(0)
            local_cluster.signal(victim, signal.SIGSTOP)
            stopped_s = time.monotonic()
            try:
                while await local_cluster.owner(0) == victim:
                    assert time.monotonic() - stopped_s < 10
                await ledger.next_answers(100)
                if FULL:
                    await asyncio.sleep(30)
            finally:
                local_cluster.signal(victim, signal.SIGCONT)
            await ledger.next_answers(50)

    assert with_ledger(local_cluster, stop) == []


def test_an_owner_that_was_replaced_never_answers(local_cluster):
    """Row 10: whoever still asks the old owner, by its old term, is told to ask elsewhere."""

    async def work():
        await local_cluster.until_served()
        async with await penstock.aio.connect(local_cluster.url) as queues:
            name = next(name for name in _names if first_shard(name, 4) == 0)
            await queues.create(name)
            await queues.push(name, b"before")
            shard = (await local_cluster.status()).shards[0]
            client = await open_client(local_cluster.address, "test")
            replies: dict[int, bytes] = {}
            answered = asyncio.Event()

            async def take(message):
                for token, data in calls.unpack(message.data):
                    if data[:1] != calls.AT_IT:
                        replies.setdefault(token, data[:1])
                        if len(replies) == len(commands):
                            answered.set()

            inbox = client.new_inbox()
            await client.subscribe(inbox + calls.REPLIES, cb=take)
            commands = [Stats(name), Peek(name), Push(name, b"stale"), Pull(name, wait_ms=0)]
            local_cluster.signal(shard.owner, signal.SIGSTOP)
            try:
                # They arrive while it is stopped, and are the first that it sees when it resumes.
                sender = calls.Sender(client, inbox)
                for token, command in enumerate(commands):
                    (message,) = calls.write_command(command)
                    sender.send(f"penstock.serve.0.{shard.term}", token, message)
                await sender.drain()
                await client.flush()
                while await local_cluster.owner(0) == shard.owner:
                    pass
                await queues.push(name, b"after")
            finally:
                local_cluster.signal(shard.owner, signal.SIGCONT)
            async with asyncio.timeout(PATIENCE_S):
                await answered.wait()
            assert set(replies.values()) <= {calls.NOT_OWNER, calls.LOST}
            bodies = {claim.body for claim in await queues.pull_many(name, 10)}
            assert bodies == {b"before", b"after"}
            await client.close()

    asyncio.run(work())


def test_a_nats_server_is_killed_under_load_and_comes_back(local_cluster):
    """Row 11: one server of three is lost; clients go on, and it heals within 15 s."""

    async def lose(number, ledger):
        os.kill(local_cluster.nats[number], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await ledger.next_answers(100)
        local_cluster.start_nats_again(number)
        async with asyncio.timeout(15):
            await ledger.next_answers(50)

    async def lose_one_after_another(ledger):
        await lose(0, ledger)
        # If the first had not caught up, there would be no majority now.
        await local_cluster.until_served()
        await lose(1, ledger)

    assert with_ledger(local_cluster, lose_one_after_another) == []


def test_without_a_majority_nothing_is_answered_and_it_heals(local_cluster):
    """Row 11: two of three NATS servers are stopped; nothing that was answered is lost."""

    async def lose_majority(ledger):
        for pid in local_cluster.nats[:2]:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3):
                    # What was on its way may still come; then there is silence.
                    await ledger.next_answers(100_000)
            before = len(ledger.pushed)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    await ledger.next_answers(100_000)
            assert len(ledger.pushed) == before
        finally:
            for pid in local_cluster.nats[:2]:
                os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_S):
            await ledger.next_answers(50)

    assert with_ledger(local_cluster, lose_majority) == []


def test_boto3_uses_any_of_the_three_endpoints(local_cluster):
    nodes = asyncio.run(local_cluster.status()).nodes
    assert len(nodes) == 3
    clients = [
        boto3.client(
            "sqs",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            config=botocore.config.Config(retries={"max_attempts": 0}),
        )
        for endpoint in [node.endpoint for node in nodes]
    ]
    name = next(_names)
    one, two, three = clients
    one.create_queue(QueueName=name)
    url = two.get_queue_url(QueueName=name)["QueueUrl"]
    sent = two.send_message(QueueUrl=url, MessageBody="hello")["MessageId"]
    url = three.get_queue_url(QueueName=name)["QueueUrl"]
    (found,) = three.receive_message(QueueUrl=url, WaitTimeSeconds=5)["Messages"]
    assert (found["Body"], found["MessageId"]) == ("hello", sent)
    url = one.get_queue_url(QueueName=name)["QueueUrl"]
    one.delete_message(QueueUrl=url, ReceiptHandle=found["ReceiptHandle"])
    entries = [{"Id": str(n), "MessageBody": str(n)} for n in range(10)]
    assert len(one.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]) == 10
