"""The pipeline's SQL: one file a query below `spark/sql`, read from the package.

A file begins with comment lines that describe its rows and, indented, its columns. The
tables it reads are names in the connection that runs it; `{INDEX_BITS}` and the other names in
braces are the constants below, put in here. The dialect is DuckDB's.
"""

import re
from functools import cache
from pathlib import Path
from typing import Final

from penstock.service import DEDUP_WINDOW_MS, HOUR_MS
from penstock.spark.blocks import INDEX_BITS

BUCKET_MS: Final = 60_000
# The SQL of a message's id, in the form that `core.receipts` gives it.
MESSAGE_ID: Final = (
    "concat(substr(store, 1, 8), '-', substr(store, 9, 4), '-8', substr(store, 13, 2), '0-9000-', "
    "lpad(lower(to_hex(message)), 12, '0'))"
)
# Where the bins of a histogram end: with the rounding to whole milliseconds, the middle of a bin is
# at most 1% off any value in it.
BIN_RATIO: Final = 1.01
# `until` of a message that has not ended, and the end of the journal.
NO_LIMIT: Final = (1 << 63) - 1
_CONSTANTS: Final = {
    "BIN_RATIO": BIN_RATIO,
    "BUCKET_MS": BUCKET_MS,
    "HOUR_MS": HOUR_MS,
    # Events that end a claim, events that end a message, events by which it leaves its queue.
    "CLAIM_ENDED": "kind IN ('Deleted', 'Released', 'ClaimExpired', 'Lost')",
    "ENDED": "kind IN ('Deleted', 'Expired', 'Lost', 'Arrived')",
    # The first purge or removal of a message's queue after its last event, null if there is none. A
    # purge leaves messages that came while it was made.
    "EMPTYING": "list_filter(ends, lambda one: one.sequence > last_sequence "
    "AND (one.before IS NULL OR coalesce(rank, message) < one.before))[1]",
    "LEFT_QUEUE": "kind IN ('Deleted', 'Expired', 'Lost', 'Moved', 'Departed')",
    "DEDUP_WINDOW_MS": DEDUP_WINDOW_MS,
    # Every sequence is its entry times this, plus the event's index in the entry.
    "ENTRY_SPAN": 1 << INDEX_BITS,
    "INDEX_BITS": INDEX_BITS,
    "MESSAGE_ID": MESSAGE_ID,
    "NO_LIMIT": NO_LIMIT,
}
DIRECTORY: Final = Path(__file__).with_name("sql")
_CONSTANT: Final = re.compile(r"\{([A-Z_]+)\}")


@cache
def load_query(name: str) -> str:
    """The query of this file, such as `audit/stores`, with its constants put in."""
    lines = (DIRECTORY / f"{name}.sql").read_text().splitlines()
    query = "\n".join(line for line in lines if not line.startswith("--"))
    return _CONSTANT.sub(lambda match: str(_CONSTANTS[match[1]]), query)
