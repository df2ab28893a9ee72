"""Work that is written once, for callers that block and for callers that await: as steps.

A generator yields its steps one at a time: commands, requests to a replicated log, or calls. What
runs it executes each step, and sends the reply to the generator or throws the error into it.
"""

from collections.abc import Awaitable, Callable, Generator
from operator import call
from typing import Any, TypeVar

S = TypeVar("S")
R = TypeVar("R")
# Steps that are calls: each takes no argument; for a caller that awaits it returns an awaitable.
Calls = Generator[Callable[[], Any], Any, R]


def run_steps(execute: Callable[[S], Any], steps: Generator[S, Any, R]) -> R:
    """Executes the steps one after another. Returns and raises what the generator does."""
    try:
        step = next(steps)
        while True:
            try:
                reply = execute(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def await_steps(execute: Callable[[S], Awaitable[Any]], steps: Generator[S, Any, R]) -> R:
    """The same, awaited; a cancellation is thrown into the generator, too."""
    try:
        step = next(steps)
        while True:
            try:
                reply = await execute(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def run_calls(calls: Calls[R]) -> R:
    """Makes the calls one after another."""
    return run_steps(call, calls)


async def await_calls(calls: Calls[R]) -> R:
    """Makes the calls one after another, and awaits each."""
    return await await_steps(call, calls)
