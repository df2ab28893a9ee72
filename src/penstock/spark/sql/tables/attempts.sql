-- A row for each claim. Columns: docs/formats/lake.md.
WITH folded AS (
  SELECT store, shard, message, epoch, max(queue) AS queue_number,
    max(holder) AS holder, max(attempt_id) AS attempt_id,
    min(at_ms) FILTER (WHERE kind = 'Claimed') AS started_at_ms,
    min(sequence) FILTER (WHERE kind = 'Claimed') AS started,
    max(at_ms) FILTER (WHERE {CLAIM_ENDED}) AS ended_at_ms,
    max_by(kind, sequence) FILTER (WHERE {CLAIM_ENDED}) AS end_kind,
    max_by(deadline_ms, sequence)
      FILTER (WHERE kind IN ('Claimed', 'Extended')) AS deadline_ms,
    count_if(kind = 'Extended') AS extends
  FROM {events}
  WHERE kind IN ('Claimed', 'Extended') OR {CLAIM_ENDED}
  GROUP BY message, epoch, shard, store
), placed AS (
  SELECT folded.*, queue,
    CASE WHEN end_kind IS NULL THEN
      try_element_at(filter(ends, one -> one.sequence > started), 1) END AS swept
  FROM folded LEFT JOIN {queues} USING (store, shard, queue_number)
)
SELECT store, shard, message, {MESSAGE_ID} AS message_id, queue, queue_number, epoch, holder,
  attempt_id, started_at_ms, timestamp_millis(started_at_ms) AS started_at,
  coalesce(ended_at_ms, swept.at_ms) AS ended_at_ms,
  CASE coalesce(end_kind, swept.kind)
    WHEN 'Deleted' THEN 'deleted' WHEN 'Released' THEN 'released'
    WHEN 'ClaimExpired' THEN 'timed out' WHEN 'Lost' THEN 'lost'
    WHEN 'QueuePurged' THEN 'purged' WHEN 'QueueRemoved' THEN 'removed'
    ELSE 'open' END AS ended,
  deadline_ms, extends, coalesce(ended_at_ms, swept.at_ms) - started_at_ms AS hold_ms
FROM placed
