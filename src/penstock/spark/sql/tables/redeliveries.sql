-- A row for each queue and number of claims. Columns: docs/formats/lake.md.
SELECT store, queue, claims, sum(messages) AS messages, sum(timeouts) AS timeouts,
  sum(releases) AS releases, sum(deleted) AS deleted, sum(dead_letters) AS dead_letters,
  sum(dead) AS dead
FROM part_redeliveries GROUP BY store, queue, claims ORDER BY store, queue, claims
