"""Which workers hold messages longest, and when: an example of your own analysis of a lake.

Run the file, or open it in an editor that supports `# %%` cells:

    penstock pipeline run --journal STORE --lake LAKE
    python examples/analysis.py LAKE
"""

# %% A session, and the lake's tables as DataFrames.
import sys

from pyspark.sql import functions as sf

from penstock.spark.lake import Lake
from penstock.spark.session import make_session
from penstock.spark.views import tables_of

spark = make_session(name="analysis")
tables = tables_of(Lake.open(sys.argv[1]))
attempts = tables["attempts"].frame(spark)
messages = tables["messages"].frame(spark)

# %% How long each worker holds a message, and how often it lets the claim run out.
workers = (
    attempts.groupBy("queue", "holder")
    .agg(
        sf.count("*").alias("claims"),
        sf.percentile_approx("hold_ms", 0.99).alias("p99_hold_ms"),
        sf.mean((sf.col("ended") == "timed out").cast("double")).alias("timed_out"),
    )
    .orderBy(sf.desc("timed_out"), sf.desc("claims"))
)
workers.show(10, truncate=False)

# %% The same as SQL: what was pushed in each quarter of an hour, and how long it waited.
spark.sql(
    """
    SELECT window(pushed_at, '15 minutes').start AS quarter, queue, count(*) AS messages,
      percentile_approx(wait_ms, 0.5) AS p50_wait_ms, max(wait_ms) AS longest_wait_ms
    FROM {messages} WHERE wait_ms IS NOT NULL
    GROUP BY 1, 2 ORDER BY longest_wait_ms DESC
    """,
    messages=messages,
).show(10, truncate=False)

# %% Messages that were pulled more than once: which workers did not finish them?
again = attempts.join(messages.where("claims > 1").select("store", "message"), ["store", "message"])
unfinished = again.where("ended IN ('timed out', 'released')")
unfinished.groupBy("queue", "holder", "ended").count().orderBy(sf.desc("count")).show(
    10, truncate=False
)

# %% The ten messages with the most claims, as a pandas frame.
most_claimed = messages.orderBy(sf.desc("claims"), sf.desc("age_ms")).limit(10)
print(
    most_claimed.select("message_id", "queue", "claims", "timeouts", "state", "age_ms").toPandas()
)
