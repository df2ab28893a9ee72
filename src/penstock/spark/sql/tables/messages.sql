-- A row for each message of a part. Columns: docs/formats/lake.md.
SELECT store, shard, message, {MESSAGE_ID} AS message_id,
  coalesce(pushed_to.queue, concat('#', lives.queue_number)) AS queue, lives.queue_number,
  coalesce(held.queue, concat('#', held_in_number)) AS held_in, held_in_number, "group", dedup_id,
  priority, body_bytes, pushed_at_ms, make_timestamptz(pushed_at_ms * 1000) AS pushed_at,
  visible_at_ms, first_pulled_at_ms, last_pulled_at_ms, claims, extends, releases, timeouts, moves,
  dead_letters, state, standing, ended_at_ms,
  first_pulled_at_ms - greatest(pushed_at_ms, coalesce(visible_at_ms, 0)) AS wait_ms,
  ended_at_ms - pushed_at_ms AS age_ms, events, last_sequence, dropped, part_number
FROM lives
LEFT JOIN queue_names AS pushed_to ON pushed_to.queue_number = lives.queue_number
LEFT JOIN queue_names AS held ON held.queue_number = held_in_number, part
