-- A row for each queue that exists, as of the store's last event. Columns: docs/formats/lake.md.
WITH clock AS (
  SELECT store, max(at_ms) AS as_of_ms FROM (
    SELECT store, last_at_ms AS at_ms FROM sums WHERE what = 'minute'
    UNION ALL SELECT store, at_ms FROM queue_events)
  GROUP BY store
), held AS (
  SELECT store, shard, queue_number, sum(visible) AS visible, sum(delayed) AS delayed,
    sum(in_flight) AS in_flight, sum(live) AS messages, sum(bytes) AS stored_bytes,
    min(oldest_pushed_at_ms) AS oldest_pushed_at_ms, sum(purged) AS purged
  FROM sums WHERE what = 'held' GROUP BY store, shard, queue_number
), counted AS (
  SELECT store, shard, queue_number, sum(pushes) AS pushed, sum(deletes) AS deleted,
    sum(expired) AS expired, sum(lost) AS lost, sum(came) AS arrived, sum(went) AS `left`
  FROM sums WHERE what = 'minute' GROUP BY store, shard, queue_number
)
SELECT store, shard, queue, queue_number, as_of_ms, coalesce(visible, 0) AS visible,
  coalesce(delayed, 0) AS delayed, coalesce(in_flight, 0) AS in_flight,
  coalesce(messages, 0) AS messages, coalesce(stored_bytes, 0) AS stored_bytes,
  oldest_pushed_at_ms, as_of_ms - oldest_pushed_at_ms AS oldest_age_ms,
  coalesce(pushed, 0) AS pushed, coalesce(deleted, 0) AS deleted,
  coalesce(expired, 0) AS expired, coalesce(purged, 0) AS purged, coalesce(lost, 0) AS lost,
  coalesce(arrived, 0) AS arrived, coalesce(`left`, 0) AS `left`
FROM queues JOIN clock USING (store)
LEFT JOIN held USING (store, shard, queue_number)
LEFT JOIN counted USING (store, shard, queue_number)
WHERE removed_at_ms IS NULL
