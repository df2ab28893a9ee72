"""A stream that consumes a queue, to be run in a process of its own and killed there.

    python -m tests.spark.consumer URL CHECKPOINT LEDGER [WHERE BATCH SIGNAL]

Its sink is idempotent by the number of the batch: rows and number go into one transaction. With
WHERE it stops, `before` or `after` the transaction of BATCH or at the `end`, makes the file SIGNAL
and waits to be killed.
"""

import sqlite3
import sys
import threading
from pathlib import Path

from penstock.spark.session import make_session

TABLES = """
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS messages (id TEXT, body BLOB, batch INTEGER);
"""


def ledger(path):
    """What the sink has been given, once and for all."""
    kept = sqlite3.connect(path, isolation_level=None)
    kept.executescript(TABLES)
    return kept


def run(url, checkpoint, path, where="", batch="-1", signal=""):
    """Consumes what there is, or up to where it is told to wait for its end."""

    def wait_if(here, number):
        if here == where and number == int(batch):
            Path(signal).touch()
            threading.Event().wait()

    def keep(frame, number):
        rows = [(row.message_id, bytes(row.body), number) for row in frame.collect()]
        wait_if("before", number)
        kept = ledger(path)
        kept.execute("BEGIN")
        if not kept.execute("SELECT * FROM batches WHERE number = ?", [number]).fetchall():
            kept.execute("INSERT INTO batches VALUES (?)", [number])
            kept.executemany("INSERT INTO messages VALUES (?, ?, ?)", rows)
        kept.execute("COMMIT")
        kept.close()
        wait_if("after", number)

    spark = make_session(master="local[2]")
    stream = spark.readStream.format("penstock").option("mode", "consume")
    stream = stream.options(url=url, queue="orders", reader="shop")
    stream = stream.options(maxMessagesPerTrigger=100, messagesPerPartition=50)
    frame = stream.schema("message_id string, body binary").load()
    query = frame.writeStream.foreachBatch(keep).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    wait_if("end", -1)


if __name__ == "__main__":
    run(*sys.argv[1:])
