-- A row for each move of a message of a part to a dead-letter queue; columns as in `dead_letters`.
WITH moved AS (
  SELECT message, queue AS queue_number, to_queue, name, at_ms, sequence
  FROM events WHERE kind = 'Departed' OR (kind = 'Moved' AND dead)
), held AS (
  -- Of the last claim before the move, also if it gave no name.
  SELECT moved.message, moved.sequence, arg_max({'name': holder}, events.sequence).name AS last_holder
  FROM moved JOIN events ON events.message = moved.message AND events.sequence < moved.sequence
  WHERE kind = 'Claimed' GROUP BY ALL
)
SELECT part.store, part.shard, message, {MESSAGE_ID} AS message_id,
  coalesce(came.queue, concat('#', moved.queue_number)) AS queue,
  coalesce(moved.name, went.queue, concat('#', to_queue)) AS dead_letter_queue, "group",
  make_timestamptz(moved.at_ms * 1000) AS at, moved.at_ms, claims, timeouts, releases,
  last_holder, state, part_number
FROM moved
JOIN eventful_lives AS lives USING (message)
LEFT JOIN held USING (message, sequence)
LEFT JOIN queue_names AS came ON came.queue_number = moved.queue_number
LEFT JOIN queue_names AS went ON went.queue_number = moved.to_queue, part
ORDER BY sequence
