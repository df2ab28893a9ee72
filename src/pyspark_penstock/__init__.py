"""The name by which Spark finds `format("penstock")` without being told of it."""

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
