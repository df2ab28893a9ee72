"""Chaos with a judge: faults by seed, the consumer that charges twice, and runs that repeat."""

import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import BatchRefused, InvalidField, Overloaded, PenstockError
from penstock.server.testing.chaos import MadeFault
from penstock.testing import chaos
from penstock.testing.runs import FAULTS_MAX, SEED_VARIABLE, ChaosFailure, ChaosRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "testing"
KINDS = {
    *("throttled", "lost", "killed", "forgotten", "ran out", "slow", "empty", "fewer"),
    *("reordered", "partly"),
}


def shop(run, *, careful, queue="orders", count=8):
    """How often each order was charged, by a consumer that remembers them or does not."""
    is_fifo = queue.endswith(".fifo")
    run.calm.create(queue, visibility_timeout=30)
    for number in range(count):
        more = {"group": str(number % 2), "dedup_id": str(number)} if is_fifo else {}
        run.calm.push(queue, f"order {number}", **more)
    charged: Counter[bytes] = Counter()

    def charge(claim):
        if not (careful and claim.body in charged):
            charged[claim.body] += 1

    run.consume(queue, charge)
    return charged


@pytest.mark.parametrize("queue", ["orders", "orders.fifo"])
def test_a_consumer_that_remembers_its_work_holds_under_200_seeds(queue):
    seen = []

    @chaos(seeds=200)
    def charges_once(chaos):
        assert set(shop(chaos, careful=True, queue=queue).values()) == {1}
        seen.append(chaos)

    charges_once()
    assert [run.seed for run in seen] == list(range(200))
    assert sum(run.kills for run in seen) > 20
    assert sum(run.crashes for run in seen) > 100


@pytest.mark.parametrize("queue", ["orders", "orders.fifo"])
def test_a_consumer_that_charges_twice_is_found_with_the_one_fault_that_is_enough(queue):
    @chaos
    def charges_once(chaos):
        assert set(shop(chaos, careful=False, queue=queue).values()) == {1}

    with pytest.raises(ChaosFailure) as failed:
        charges_once()
    text = str(failed.value)
    assert "1 of its" in text
    assert "Delivered 2 times." in text
    assert f"{SEED_VARIABLE}=" in text


def test_a_seed_makes_the_same_faults_in_every_run_and_in_every_process():
    def faults(seed):
        run = ChaosRun(seed)
        shop(run, careful=True)
        return [tuple(each) for each in run.plan.made]

    here = [faults(seed) for seed in range(20)]
    assert here == [faults(seed) for seed in range(20)]
    assert len({str(each) for each in here}) > 10
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.testing.test_runs import shop\n"
        "from penstock.testing.runs import ChaosRun\n"
        "run = ChaosRun(17); shop(run, careful=True)\n"
        "print([tuple(each) for each in run.plan.made])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.strip() == str(faults(17))


def test_every_kind_of_fault_is_made_by_some_seed_and_no_more_than_are_allowed():
    made: list[MadeFault] = []
    for seed in range(60):
        run = ChaosRun(seed)
        run.calm.create("orders", visibility_timeout=30)
        for _ in range(20):
            consume_in_batches(run)
        assert len(run.plan.made) <= FAULTS_MAX
        made += run.plan.made
    assert {each.kind for each in made} == KINDS


def consume_in_batches(run):
    try:
        run.queues.push_many("orders", ["a", "b", "c"])
        claims = run.queues.pull_many("orders", 3)
        run.queues.delete_many(claims)
        claim = run.queues.pull("orders")
        if claim is not None:
            run.queues.extend(claim, 20)
            run.queues.delete(claim)
    except PenstockError:
        pass
    except BaseException as killed:
        assert type(killed).__name__ == "ConsumerKilled"  # noqa: PT017


def test_a_fifo_queue_is_never_reordered_nor_delivers_what_was_deleted():
    for seed in range(100):
        run = ChaosRun(seed)
        shop(run, careful=True, queue="orders.fifo")
        assert not {"reordered", "forgotten", "empty", "fewer"} & {
            each.kind for each in run.plan.made
        }


def test_only_the_faults_that_are_asked_for_are_made():
    run = next(each for each in map(ChaosRun, range(100)) if len(made_in(each)) > 3)
    numbers = [each.number for each in run.plan.made]
    smaller = ChaosRun(run.seed, frozenset(numbers[:1]))
    assert [each.number for each in made_in(smaller)] == numbers[:1]


def made_in(run):
    shop(run, careful=True)
    return run.plan.made


def test_a_failure_without_any_fault_says_so():
    @chaos(seeds=3)
    def fails(chaos):
        shop(chaos, careful=True)
        raise AssertionError("always")

    with pytest.raises(ChaosFailure, match="it fails without any fault, too"):
        fails()


def test_what_the_audit_finds_fails_a_test_that_asserts_nothing():
    @chaos(seeds=1)
    def breaks_the_store(chaos):
        chaos.calm.create("orders")
        chaos.calm.push("orders", "a")
        del chaos.store.engine.shard.names["orders"].deliveries[1]

    with pytest.raises(ChaosFailure, match="nothing lost"):
        breaks_the_store()


def test_the_variable_chooses_the_seed_that_is_run(monkeypatch):
    seen = []

    @chaos(seeds=200)
    def notes(chaos):
        seen.append(chaos.seed)

    monkeypatch.setenv(SEED_VARIABLE, "17")
    notes()
    assert seen == [17]
    monkeypatch.setenv(SEED_VARIABLE, "-3")
    with pytest.raises(InvalidField, match="'-3' is not a seed"):
        notes()


def test_a_consumer_with_a_loop_of_its_own_is_called_again_until_the_queues_are_empty():
    @chaos(seeds=50)
    def drains(chaos):
        chaos.calm.create("orders", visibility_timeout=30, dead_letter="dead", max_receives=100)
        chaos.calm.create("parcels")
        chaos.calm.push("orders", "a")
        shipped = set()

        def consumer():
            while (claim := chaos.queues.pull("orders", wait=20)) is not None:
                chaos.queues.push("parcels", claim.body)
                chaos.queues.delete(claim)
            while (claim := chaos.queues.pull("parcels", wait=20)) is not None:
                shipped.add(claim.body)
                chaos.queues.delete(claim)

        chaos.run(consumer)
        assert shipped == {b"a"}

    drains()


def test_work_that_always_fails_ends_as_a_dead_letter_and_without_one_ends_the_run():
    def work(claim):
        raise ValueError("a poisoned message")

    @chaos(seeds=20)
    def dies(chaos):
        chaos.calm.create("orders", dead_letter="dead", max_receives=3)
        chaos.calm.push("orders", "a")
        chaos.consume("orders", work)
        assert chaos.calm.stats("dead").messages == 1

    dies()

    @chaos(seeds=1)
    def goes_on(chaos):
        chaos.calm.create("orders")
        chaos.calm.push("orders", "a")
        chaos.consume("orders", work)

    with pytest.raises(ChaosFailure, match="messages are left: 1 in orders"):
        goes_on()


def test_a_test_that_is_killed_itself_is_told_what_to_use():
    @chaos(seeds=200)
    def deletes_in_the_test(chaos):
        chaos.calm.create("orders")
        chaos.calm.push("orders", "a")
        claim = chaos.calm.pull("orders")
        with suppress(PenstockError):
            chaos.queues.delete(claim)

    with pytest.raises(ChaosFailure, match=r"let chaos\.consume or chaos\.run call it"):
        deletes_in_the_test()


@chaos(seeds=5)
@pytest.mark.parametrize("number", [1, 2])
def test_fixtures_and_parameters_are_given_beside_the_run(tmp_path, chaos, number):
    assert number in (1, 2)
    assert tmp_path.is_dir()
    assert chaos.seed < 5


@pytest.mark.parametrize(
    "given", [{"seeds": 0}, {"seeds": [-1]}, {"seed": 2**63}, {"seeds": ["a"]}]
)
def test_seeds_that_are_none_are_refused(given):
    with pytest.raises(InvalidField, match="seed"):
        chaos(lambda chaos: None, **given)


def test_a_test_without_the_parameter_is_refused():
    with pytest.raises(InvalidField, match="has no parameter chaos"):
        chaos(lambda: None)


def test_items_of_a_batch_fail_alone():
    for seed in range(400):
        run = ChaosRun(seed)
        run.calm.create("orders")
        try:
            run.queues.push_many("orders", ["a", "b", "c", "d"])
        except BatchRefused as error:
            failed = [each for each in error.results if isinstance(each, Overloaded)]
        except PenstockError:
            continue
        else:
            failed = []
        assert run.calm.stats("orders").messages == 4 - len(failed)
        if failed and len(failed) < 4:
            return
    pytest.fail("no seed refused some of the items")


def test_the_example_finds_the_shop_that_charges_twice():
    command = [sys.executable, "-m", "pytest", "-p", "pytest_penstock", "-c", "/dev/null", "-q"]
    done = subprocess.run(
        [*command, "--rootdir", str(EXAMPLE), "-p", "no:cacheprovider", str(EXAMPLE)],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "test_every_order_is_charged_once[HastyShop]" in done.stdout
    assert "ChaosFailure: seed 5" in done.stdout
    assert "1 of its" in done.stdout


def boto3_shop(run, *, careful):
    """How often each order was charged, by a consumer that uses boto3."""
    url = run.sqs.create_queue(QueueName="orders")["QueueUrl"]
    for number in range(3):
        run.sqs.send_message(QueueUrl=url, MessageBody=f"order {number}")
    charged: Counter[str] = Counter()

    def consumer():
        while found := run.sqs.receive_message(QueueUrl=url).get("Messages"):
            for each in found:
                if not (careful and each["Body"] in charged):
                    charged[each["Body"]] += 1
                run.sqs.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])

    run.run(consumer)
    return charged


def test_a_consumer_that_uses_boto3_meets_the_faults_over_the_sqs_api():
    seen = []

    @chaos(seeds=25)
    def charges_once(chaos):
        assert boto3_shop(chaos, careful=True) == {f"order {number}": 1 for number in range(3)}
        seen.append((chaos.crashes, len(chaos.made)))

    charges_once()
    assert sum(crashes for crashes, _ in seen) > 5
    assert sum(made for _, made in seen) > 20


def test_a_consumer_that_uses_boto3_and_charges_twice_is_found_and_its_run_made_smaller():
    @chaos(seeds=50)
    def charges_once(chaos):
        assert set(boto3_shop(chaos, careful=False).values()) == {1}

    with pytest.raises(ChaosFailure) as failed:
        charges_once()
    assert "1 of its" in str(failed.value)
    assert "Delivered 2 times." in str(failed.value)
    assert "AWS_MAX_ATTEMPTS" not in os.environ
