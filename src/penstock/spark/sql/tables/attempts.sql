-- A row for each claim of a part. Columns: docs/formats/lake.md.
SELECT store, shard, message, {MESSAGE_ID} AS message_id,
  coalesce(queue, concat('#', claims.queue_number)) AS queue, claims.queue_number, epoch, holder,
  attempt_id, started_at_ms, make_timestamptz(started_at_ms * 1000) AS started_at, ended_at_ms,
  ended, deadline_ms, extends, ended_at_ms - started_at_ms AS hold_ms, part_number
FROM claims LEFT JOIN queue_names ON queue_names.queue_number = claims.queue_number, part
