-- A row for each move of a message to a dead-letter queue. Columns: docs/formats/lake.md.
WITH moved AS (
  SELECT part, key, sequence, at_ms, queue AS queue_number, to_queue, name,
    code = {Departed} OR (code = {Moved} AND dead) AS is_dead_letter,
    -- Of the last claim before the move, also if it gave no name.
    last(if(code = {Claimed}, named_struct('holder', holder), NULL), true) OVER (
      PARTITION BY part, key ORDER BY sequence
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING).holder AS last_holder
  FROM irregular_events
)
SELECT store, shard, message, message_id,
  coalesce(came.queue, concat('#', moved.queue_number)) AS queue,
  coalesce(moved.name, went.queue, concat('#', to_queue)) AS dead_letter_queue, `group`,
  timestamp_millis(at_ms) AS at, at_ms, claims, timeouts, releases, last_holder, state, moved.key, moved.part
FROM moved JOIN messages ON messages.part = moved.part AND messages.key = moved.key
LEFT JOIN known_queues AS came ON came.queue_key = shiftright(moved.key, {MESSAGE_BITS}) * {QUEUES} + moved.queue_number
LEFT JOIN known_queues AS went ON went.queue_key = shiftright(moved.key, {MESSAGE_BITS}) * {QUEUES} + to_queue
WHERE moved.is_dead_letter AND NOT regular AND NOT dropped
