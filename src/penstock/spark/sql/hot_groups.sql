-- A row for each queue and group. Columns: docs/formats/lake.md.
SELECT store, queue, `group`, sum(messages) AS messages, sum(bytes) AS stored_bytes,
  sum(claims) AS claims, sum(timeouts) AS timeouts, sum(dead_letters) AS dead_letters,
  sum(live) AS live
FROM sums JOIN queues USING (store, shard, queue_number)
WHERE what = 'group' GROUP BY store, queue, `group`
