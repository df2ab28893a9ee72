"""The rules of Amazon SQS as checks that any server with its API can be asked to keep.

    python -m penstock.testing.sqs --endpoint-url http://127.0.0.1:9324 [--json OUT]

It needs boto3 and nothing else: no pytest, because the servers are written in any language and
most checks wait; here the waits of different checks pass at the same time, in threads.

`CHECKS` has every check: a sentence, the feature it belongs to, the rule of Amazon's documentation
that it holds, and how many seconds it waits. `CheckedServer` is the server, over one of the two
protocols. A check asks with its methods and fails with what was found and what was wanted.
"""

from penstock.testing.sqs import (  # noqa: F401  each adds its checks
    batches,
    dead_letters,
    errors,
    fifo,
    messages,
    move_tasks,
    queues,
    receipts,
    waiting,
)
from penstock.testing.sqs.checks import CHECKS, Check, Failed
from penstock.testing.sqs.run import Result, run_check, run_checks
from penstock.testing.sqs.target import CheckedServer

__all__ = ["CHECKS", "Check", "CheckedServer", "Failed", "Result", "run_check", "run_checks"]
