-- A row for each queue and group: what the messages of a part add to it.
--
--   store, queue, group  which
--   messages, stored_bytes, claims, timeouts, dead_letters, live
--                        as in `hot_groups`
WITH counted AS (
  SELECT part_number, queue_number, "group", count(*) AS messages, sum(body_bytes) AS stored_bytes,
    sum(claims) AS claims, sum(timeouts) AS timeouts, sum(dead_letters) AS dead_letters,
    count(standing) AS live
  FROM lives WHERE "group" IS NOT NULL GROUP BY ALL
)
SELECT part.store, part_number, coalesce(queue, concat('#', counted.queue_number)) AS queue,
  "group", sum(messages) AS messages, sum(stored_bytes) AS stored_bytes, sum(claims) AS claims,
  sum(timeouts) AS timeouts, sum(dead_letters) AS dead_letters, sum(live) AS live
FROM counted LEFT JOIN queue_names ON queue_names.queue_number = counted.queue_number, part
GROUP BY ALL ORDER BY queue, "group"
