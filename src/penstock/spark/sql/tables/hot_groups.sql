-- A row for each queue and group. Columns: docs/formats/lake.md.
SELECT store, queue, "group", sum(messages) AS messages, sum(stored_bytes) AS stored_bytes,
  sum(claims) AS claims, sum(timeouts) AS timeouts, sum(dead_letters) AS dead_letters,
  sum(live) AS live
FROM part_groups GROUP BY store, queue, "group" ORDER BY store, queue, "group"
