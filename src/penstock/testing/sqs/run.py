"""Runs checks against a server: one after the other, or many at once where each waits."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from botocore.exceptions import ClientError

from penstock.testing.sqs.checks import CHECKS, Check, Failed
from penstock.testing.sqs.target import NO_ANSWER, PROTOCOLS, CheckedServer, Protocol

Status = Literal["passed", "failed", "not run"]


class Result(NamedTuple):
    """What a check found over one protocol."""

    name: str
    protocol: Protocol
    status: Status
    reason: str
    seconds: float


def run_check(check: Check, target: CheckedServer) -> None:
    """Runs one check. Raises Failed."""
    try:
        check.run(target)
    except ClientError as error:
        found = error.response.get("Error", {})
        code, text = found.get("Code", ""), found.get("Message", "")
        raise Failed(f"{error.operation_name} was refused: {code}: {text}") from error
    except NO_ANSWER as error:
        raise Failed(f"no answer that can be read: {error}") from error
    except (KeyError, IndexError, ValueError, TypeError) as error:
        # An answer without a field, or with one of another form.
        raise Failed(f"the answer has another form: {type(error).__name__}: {error}") from error


def run_checks(
    made: Callable[[Protocol], CheckedServer],
    checks: Iterable[Check] = (),
    *,
    protocols: Sequence[Protocol] = PROTOCOLS,
    wait_s_max: float = float("inf"),
    threads: int = 1,
) -> list[Result]:
    """The results of checks, by default of all; `made` makes a target of its own for each.

    Checks that wait longer than `wait_s_max` are not run.
    """

    def run(check: Check, protocol: Protocol) -> Result:
        if check.wait_s > wait_s_max:
            return Result(check.name, protocol, "not run", f"it waits {check.wait_s:g} s", 0.0)
        began_s = time.monotonic()
        status: Status = "passed"
        reason = ""
        target = made(protocol)
        try:
            run_check(check, target)
        except Failed as failed:
            status, reason = "failed", " ".join(str(failed).split())[:300]
        finally:
            target.close()
        return Result(check.name, protocol, status, reason, time.monotonic() - began_s)

    chosen = list(checks) or list(CHECKS.values())
    # The longest waits begin first.
    work = sorted(
        ((each, protocol) for each in chosen for protocol in protocols), key=lambda w: -w[0].wait_s
    )
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(lambda each: run(*each), work))
    order = {check.name: number for number, check in enumerate(chosen)}
    return sorted(results, key=lambda result: (order[result.name], result.protocol))
