"""The OpenTelemetry trace context: stored in a message's attributes, restored around a task.

`opentelemetry-api` is optional, and imported only in a program that uses it already or in a worker
that gets a message with a trace. Without an SDK the context is still passed on.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.service import Attributes
from penstock.tasks.context import TaskContext

_FIELDS = ("traceparent", "tracestate", "baggage")


def trace_attributes() -> Attributes | None:
    """The current trace as attributes; None if there is none."""
    # A program that never imported it has no current span.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return None
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return {**carrier} or None


def kept_attributes(attributes: Attributes) -> Attributes | None:
    """The trace of a task that ran, for those that are pushed because of it."""
    return {name: attributes[name] for name in _FIELDS if name in attributes} or None


@contextmanager
def span_of(context: TaskContext) -> Iterator[None]:
    """Runs a task within a span that is a child of the one that pushed it."""
    carrier = {name: context.attributes[name] for name in _FIELDS if name in context.attributes}
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        yield
        return
    parent: Any = propagate.extract(carrier)
    attributes: dict[str, Any] = {
        "messaging.system": "penstock",
        "messaging.destination.name": context.queue,
        "messaging.message.id": context.id,
        "penstock.task.attempt": context.attempt,
    }
    tracer = trace.get_tracer("penstock.tasks")
    with tracer.start_as_current_span(
        f"run {context.task}", parent, kind=trace.SpanKind.CONSUMER, attributes=attributes
    ):
        yield
