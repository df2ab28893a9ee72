"""Streams that consume queues, to be run in a process of their own and killed there.

    python -m tests.spark.consumer URL DIRECTORY BATCH

runs a stream for each of the queues `before` and `after`; all that a stream keeps is in a directory
named after its queue. Its sink is idempotent by the number of the batch: rows and number go into
one transaction. In BATCH the stream stops before or after that transaction, as its queue is named,
makes the file `reached` and waits to be killed; -1 is no batch.
"""

import sqlite3
import sys
import threading
from pathlib import Path

from pyspark.errors import StreamingQueryException

from penstock.spark.session import make_session

QUEUES = ("before", "after")
BATCH_MESSAGES = 100
TABLES = """
CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS messages (id TEXT, body BLOB, batch INTEGER);
"""


def ledger(place):
    """The database with every batch that the sink has stored."""
    kept = sqlite3.connect(place / "ledger", isolation_level=None)
    kept.executescript(TABLES)
    return kept


def consume(spark, url, place, batch=-1):
    """Starts a stream that consumes all messages, or waits in the given batch."""

    def wait_if(here, number):
        if here == place.name and number == batch:
            (place / "reached").touch()
            threading.Event().wait()

    def keep(frame, number):
        rows = [(row.message_id, bytes(row.body), number) for row in frame.collect()]
        wait_if("before", number)
        kept = ledger(place)
        kept.execute("BEGIN")
        if not kept.execute("SELECT * FROM batches WHERE number = ?", [number]).fetchall():
            kept.execute("INSERT INTO batches VALUES (?)", [number])
            kept.executemany("INSERT INTO messages VALUES (?, ?, ?)", rows)
        kept.execute("COMMIT")
        kept.close()
        wait_if("after", number)

    stream = spark.readStream.format("penstock").option("mode", "consume")
    stream = stream.options(url=url, queue=place.name, reader="shop")
    stream = stream.options(
        maxMessagesPerTrigger=BATCH_MESSAGES, messagesPerPartition=BATCH_MESSAGES // 2
    )
    frame = stream.schema("message_id string, body binary").load()
    query = frame.writeStream.foreachBatch(keep)
    query = query.option("checkpointLocation", str(place / "checkpoint"))
    return query.trigger(availableNow=True).start()


def main(url, directory, batch):
    """Runs both streams to their ends.

    Spark gives the Python process of a stream ten seconds to start, which a busy machine may not
    keep: such a stream is started again, from its checkpoint.
    """
    spark = make_session(master="local[2]")
    places = [Path(directory, name) for name in QUEUES]
    running = {place: consume(spark, url, place, int(batch)) for place in places}
    while running:
        for place, query in list(running.items()):
            try:
                if query.awaitTermination(1):
                    del running[place]
            except StreamingQueryException as failed:
                if "failed to connect back" not in str(failed):
                    raise
                running[place] = consume(spark, url, place, int(batch))


if __name__ == "__main__":
    main(*sys.argv[1:])
