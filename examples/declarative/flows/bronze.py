"""The events of a lake as a view for the SQL beside it: the files that Delta's log names."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.lake import Lake
from penstock.spark.views import tables_of


@dp.temporary_view
def events() -> DataFrame:
    """Every event."""
    return tables_of(Lake.open(os.environ["LAKE"]))["events"].frame(SparkSession.active())
