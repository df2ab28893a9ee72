"""The pipeline over every message's life, on Spark: source, lake, tables and audit."""
