-- A row for each move to a dead-letter queue. Columns: docs/formats/lake.md.
SELECT * EXCLUDE (of_part) FROM part_dead_letters ORDER BY store, shard, at_ms, message
