-- A row for each queue that exists, as of the store's last event. Columns: docs/formats/lake.md.
WITH clock AS (SELECT store, max(at_ms) AS as_of_ms FROM {events} GROUP BY store),
held AS (
  SELECT store, shard, held_in_number AS queue_number,
    count_if(standing = 'visible') AS visible, count_if(standing = 'delayed') AS delayed,
    count_if(standing = 'in_flight') AS in_flight, count(standing) AS messages,
    coalesce(sum(body_bytes) FILTER (WHERE standing IS NOT NULL), 0) AS stored_bytes,
    min(pushed_at_ms) FILTER (WHERE standing IS NOT NULL) AS oldest_pushed_at_ms,
    count_if(state = 'purged') AS purged
  FROM {messages} GROUP BY store, shard, held_in_number
), counted AS (
  SELECT store, shard, queue AS queue_number, count_if(kind = 'Pushed') AS pushed,
    count_if(kind = 'Deleted') AS deleted, count_if(kind = 'Expired') AS expired,
    count_if(kind = 'Lost') AS lost, count_if(kind = 'Moved') AS `left`
  FROM {events} GROUP BY store, shard, queue
), came AS (
  SELECT store, shard, to_queue AS queue_number, count(*) AS arrived
  FROM {events} WHERE kind = 'Moved' GROUP BY store, shard, to_queue
)
SELECT store, shard, queue, queue_number, as_of_ms, coalesce(visible, 0) AS visible,
  coalesce(delayed, 0) AS delayed, coalesce(in_flight, 0) AS in_flight,
  coalesce(messages, 0) AS messages, coalesce(stored_bytes, 0) AS stored_bytes,
  oldest_pushed_at_ms, as_of_ms - oldest_pushed_at_ms AS oldest_age_ms,
  coalesce(pushed, 0) AS pushed, coalesce(deleted, 0) AS deleted,
  coalesce(expired, 0) AS expired, coalesce(purged, 0) AS purged,
  coalesce(lost, 0) AS lost, coalesce(arrived, 0) AS arrived, coalesce(`left`, 0) AS `left`
FROM {queues} JOIN clock USING (store)
LEFT JOIN held USING (store, shard, queue_number)
LEFT JOIN counted USING (store, shard, queue_number)
LEFT JOIN came USING (store, shard, queue_number)
WHERE removed_at_ms IS NULL
