-- A row for each time of a queue between two purges or removals.
--
--   store, shard, queue         whose
--   from_sequence, to_sequence  the time, its end not included
SELECT store, shard, queue, coalesce(last_emptied, 0) AS from_sequence,
  coalesce(lead(coalesce(last_emptied, 0)) OVER (
    PARTITION BY store, shard, queue ORDER BY coalesce(last_emptied, 0)), {NO_LIMIT})
    AS to_sequence
FROM (SELECT DISTINCT store, shard, queue, last_emptied FROM periods)
