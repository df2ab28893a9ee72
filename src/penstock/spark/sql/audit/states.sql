-- A row for each event of an irregular message, with the message's state before it.
--
--   shard_key      hash of the store and the shard
--   message        its number
--   sequence, kind, at_ms, queue, epoch, dead
--                  the event
--   state          visible, delayed, in flight, gone; null before its push
--   current_epoch  the epoch of its last claim
--   due_ms         when its claim or delay ends, 0 if it has neither
--   expires_ms     when its TTL ends, 0 if the queue's retention applies
--   entered        where it was pushed, or moved to this queue
--   receives       how many claims it had in this queue
WITH seen AS (
  SELECT shard_key, message, sequence, kind, at_ms, queue, epoch, dead,
    last_value(CASE WHEN kind IN ('Pushed', 'Released')
        THEN if(until_ms IS NULL, 'visible', 'delayed')
      WHEN kind IN ('DelayEnded', 'ClaimExpired', 'Moved') THEN 'visible'
      WHEN kind IN ('Claimed', 'Extended') THEN 'in flight'
      WHEN kind IN ('Deleted', 'Expired', 'Lost') THEN 'gone' END)
      IGNORE NULLS OVER earlier AS state,
    last_value(CASE WHEN kind = 'Claimed' THEN epoch END) IGNORE NULLS OVER earlier
      AS current_epoch,
    last_value(CASE WHEN kind IN ('Pushed', 'Claimed', 'Extended', 'Released')
      THEN coalesce(until_ms, 0) END) IGNORE NULLS OVER earlier AS due_ms,
    last_value(CASE WHEN kind = 'Pushed' THEN coalesce(expires_at_ms, 0)
      WHEN kind = 'Moved' THEN 0 END) IGNORE NULLS OVER earlier AS expires_ms,
    last_value(CASE WHEN kind IN ('Pushed', 'Moved') THEN sequence END)
      IGNORE NULLS OVER earlier AS entered
  FROM {irregular_events} WHERE kind <> 'Carried'
  WINDOW earlier AS (PARTITION BY message, shard_key ORDER BY sequence
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT *, coalesce(current_epoch, 0) - coalesce(
  last_value(CASE WHEN kind = 'Moved' THEN coalesce(current_epoch, 0) END)
    IGNORE NULLS OVER earlier, 0) AS receives
FROM seen
WINDOW earlier AS (PARTITION BY message, shard_key ORDER BY sequence
  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
