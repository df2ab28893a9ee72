"""What the console's pages read, as values for JSON."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.server.console.status import BUCKET_MS, BUCKETS, QueueStatus, Status

# The first screen has a point for each minute.
POINT_BUCKETS: Final = 3


def row(queue: QueueStatus) -> dict[str, Any]:
    """A queue as it is now."""
    stats, settings = queue.stats, queue.settings
    shown: dict[str, Any] = {
        "name": stats.queue,
        "visible": stats.visible,
        "delayed": stats.delayed,
        "in_flight": stats.in_flight,
        "bytes": stats.stored_bytes,
        "oldest_at_ms": queue.oldest_at_ms,
        "waiting": stats.waiting_pulls,
        "since_ms": queue.since_ms,
        "configured_at_ms": queue.info.configured_at_ms,
        "counts": None if stats.counts is None else [*msgspec.structs.astuple(stats.counts)],
        "level": queue.attention.level,
        "why": queue.attention.why,
    }
    if settings.dead_letter is not None:
        shown["dead_letter"] = settings.dead_letter
    if settings.fifo:
        shown["fifo"] = True
    if settings.paused:
        shown["paused"] = True
    limits = {"in_flight_max": settings.in_flight_max, "messages_max": settings.messages_max}
    return shown | {name: limit for name, limit in limits.items() if limit is not None}


def overview(status: Status) -> dict[str, Any]:
    """Every queue, with its depth in each minute of the last hour."""
    bucket = status.at_ms // BUCKET_MS
    return {
        "at_ms": status.at_ms,
        "point_ms": POINT_BUCKETS * BUCKET_MS,
        "points": BUCKETS // POINT_BUCKETS,
        "queues": [_with_line(queue, bucket) for queue in status.queues.values()],
        "lacking": dict(status.lacking),
        "is_partial": status.is_partial,
        "error": status.error,
    }


def changes(status: Status, changed: Mapping[str, QueueStatus], queue: str = "") -> dict[str, Any]:
    """What was different when the queues were last read, of one queue or of all."""
    rows = [*changed.values()] if not queue else [changed[queue]] if queue in changed else []
    shown: dict[str, Any] = {"at_ms": status.at_ms, "queues": [row(each) for each in rows]}
    gone = [name for name in status.gone if queue in ("", name)]
    if gone:
        shown["gone"] = gone
    if status.error:
        shown["error"] = status.error
    return shown


def _with_line(queue: QueueStatus, bucket: int) -> dict[str, Any]:
    shown = row(queue)
    if queue.series is None:
        return shown
    queue.series.add(bucket, queue.stats, queue.stats)
    columns = queue.series.columns()
    depth = columns["depth"]
    starts = range(0, BUCKETS, POINT_BUCKETS)
    shown["line"] = [max(depth[at : at + POINT_BUCKETS]) for at in starts]
    # The events of the last minute or so: until the page has seen changes itself.
    if queue.stats.counts is not None:
        names = queue.stats.counts.__struct_fields__
        shown["minute"] = [sum(columns[name][-POINT_BUCKETS:]) for name in names]
    return shown


def queue_page(queue: QueueStatus, status: Status) -> dict[str, Any]:
    """One queue: its settings, and all buckets of the last hour."""
    series: dict[str, list[int]] = {}
    if queue.series is not None:
        queue.series.add(status.at_ms // BUCKET_MS, queue.stats, queue.stats)
        series = queue.series.columns()
    name = queue.info.queue
    return {
        "at_ms": status.at_ms,
        "bucket_ms": BUCKET_MS,
        "buckets": BUCKETS,
        "queue": row(queue),
        "settings": msgspec.to_builtins(queue.settings),
        "created_at_ms": queue.info.created_at_ms,
        "configured_at_ms": queue.info.configured_at_ms,
        "series": series,
        "sources": [
            each.info.queue for each in status.queues.values() if each.settings.dead_letter == name
        ],
        "lacking": dict(status.lacking),
    }
