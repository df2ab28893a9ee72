"""The name by which Spark finds `format("penstock")` without registration."""

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
