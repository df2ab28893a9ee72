"""The process in which a function runs: `python -m penstock.functions.runner MODULE:HANDLER FD FD`.

It reads one invocation a line from the first descriptor, and writes its answer as one line to the
second; what the function prints goes where this process prints. It is killed at the deadline.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any


class NotCallable(Exception):
    """A module has no function of the name that was given."""


class FunctionContext:
    """The second argument of a handler, with the names that it has in Lambda."""

    def __init__(self, invocation: dict[str, Any]) -> None:
        self.function_name: str = invocation["name"]
        self.function_version = "$LATEST"
        self.invoked_function_arn: str = invocation["arn"]
        self.memory_limit_in_mb: str = "128"
        self.aws_request_id: str = invocation["id"]
        self.log_group_name = f"/aws/lambda/{self.function_name}"
        self.log_stream_name = f"penstock/{os.getpid()}"
        self.identity = None
        self.client_context = None
        self._deadline_s: float = time.monotonic() + invocation["timeout_s"]

    def get_remaining_time_in_millis(self) -> int:
        """How long the function may still run."""
        return max(0, round(1_000 * (self._deadline_s - time.monotonic())))


def load(name: str) -> Callable[[Any, FunctionContext], Any]:
    """The handler MODULE:NAME, or MODULE.NAME as in Lambda."""
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    if not module or not attribute:
        raise NotCallable("expected MODULE:HANDLER")
    sys.path.insert(0, os.getcwd())
    handler = getattr(import_module(module), attribute, None)
    if not callable(handler):
        raise NotCallable(f"module {module!r} has no function {attribute!r}")
    found: Callable[[Any, FunctionContext], Any] = handler
    return found


def main() -> None:
    """Answers invocations until there are no more."""
    name, reads, writes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with os.fdopen(reads, "r") as invocations, os.fdopen(writes, "w") as answers:

        def answer(**found: Any) -> None:
            answers.write(json.dumps(found) + "\n")
            answers.flush()

        try:
            handler = load(name)
        except (NotCallable, ModuleNotFoundError) as error:
            answer(error=f"cannot load {name}: {error}")
            return
        except BaseException as error:
            # The module itself: its author needs to see where.
            traceback.print_exc()
            answer(error=f"cannot load {name}: {type(error).__name__}: {error}")
            return
        answer(ready=True)
        for line in invocations:
            invocation = json.loads(line)
            try:
                result = handler(invocation["event"], FunctionContext(invocation))
                # As Lambda does: an answer that JSON cannot hold is an error of the function.
                answer(result=json.loads(json.dumps(result)))
            except Exception as error:
                traceback.print_exc()
                answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
