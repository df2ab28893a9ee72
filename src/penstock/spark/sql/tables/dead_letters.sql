-- A row for each move to a dead-letter queue. Columns: docs/formats/lake.md.
WITH moved AS (
  SELECT store, shard, message, queue AS queue_number, to_queue, at_ms, sequence
  FROM {events} WHERE kind = 'Moved' AND dead
), held AS (
  SELECT store, shard, message, max_by(holder, epoch) AS last_holder FROM {attempts}
  LEFT SEMI JOIN moved USING (store, shard, message) GROUP BY store, shard, message
)
SELECT moved.store, moved.shard, moved.message, message_id, came.queue,
  went.queue AS dead_letter_queue, `group`, timestamp_millis(moved.at_ms) AS at, moved.at_ms,
  claims, timeouts, releases, last_holder, state
FROM moved
JOIN {messages} AS told USING (store, shard, message)
LEFT JOIN held USING (store, shard, message)
LEFT JOIN {queues} AS came ON came.store = moved.store AND came.shard = moved.shard
  AND came.queue_number = moved.queue_number
LEFT JOIN {queues} AS went ON went.store = moved.store AND went.shard = moved.shard
  AND went.queue_number = moved.to_queue
