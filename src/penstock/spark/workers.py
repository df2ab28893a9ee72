"""Spark's Python processes, each of which runs one task after another."""

import gc
from functools import cache


@cache
def spare_modules() -> None:
    """Leaves all that exists now out of later collections of garbage in this process.

    After each task Spark collects the garbage of the whole process. What pyarrow, pandas and
    PySpark consist of is looked at again each time: 25 ms, in which a task decodes 60,000 events.
    """
    gc.freeze()
