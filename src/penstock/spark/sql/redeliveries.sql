-- A row for each queue and number of claims. Columns: docs/formats/lake.md.
SELECT store, queue, at AS claims, sum(messages) AS messages, sum(timeouts) AS timeouts,
  sum(releases) AS releases, sum(deletes) AS deleted, sum(dead_letters) AS dead_letters,
  sum(dead) AS dead
FROM sums JOIN queues USING (store, shard, queue_number)
WHERE what = 'claims' GROUP BY store, queue, at
