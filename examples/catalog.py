"""Registers the tables of a lake in Spark's catalog: SQL from anywhere finds them by name.

    penstock pipeline run --journal STORE --lake LAKE
    python catalog.py LAKE DATABASE

Each table becomes a view of the files that Delta's log names at this moment: run it again after
each `pipeline run`; until then, the views show the lake as it was. A table that is made by `USING
parquet LOCATION` would read files that are no longer part of it, too. An engine that reads Delta
by itself can register the table's directory, as by `USING delta LOCATION`.

The catalog is that of the session. Spark's default one forgets the views when the session ends:
`spark.sql.catalogImplementation=hive` in SPARK_CONF_DIR/spark-defaults.conf, or a catalog of your
own there, keeps them.
"""

import sys

from pyspark.sql import DataFrame

from penstock.spark.lake import Lake
from penstock.spark.session import make_session
from penstock.spark.views import tables_of


def select(frame: DataFrame) -> str:
    """The SQL of a table's rows, with its files by name."""
    files = frame.inputFiles()
    if not files:
        columns = ", ".join(f"CAST(NULL AS {kind}) AS `{name}`" for name, kind in frame.dtypes)
        return f"SELECT {columns} WHERE false"
    # The part that a row is in is the name of a directory, and not in the files.
    columns = ", ".join(f"`{name}`" for name in frame.columns if name != "part")
    return " UNION ALL ".join(f"SELECT {columns} FROM parquet.`{file}`" for file in files)


lake, database = sys.argv[1:]
spark = make_session(name="catalog")
spark.sql(f"CREATE DATABASE IF NOT EXISTS `{database}`")
for name, table in tables_of(Lake.open(lake)).items():
    spark.sql(f"CREATE OR REPLACE VIEW `{database}`.`{name}` AS {select(table.frame(spark))}")
spark.sql(f"SHOW VIEWS IN `{database}`").show(100, truncate=False)
