-- A row for each event of a message of the judged parts whose life is not plain, with the message's
-- state before it.
--
--   message        its number
--   part_number    of its part among those that are judged
--   sequence, kind, at_ms, queue, epoch, dead
--                  the event
--   state          visible, delayed, in flight, departed, gone; null before its push. A message
--                  that ended in a sealed part is gone before its first event here
--   was_pushed     whether its push is in the journal
--   current_epoch  the epoch of its last claim, null if none is in the journal
--   due_ms         when its claim or delay ends, 0 if it has neither
--   expires_ms     when its TTL ends, 0 if the queue's retention applies
--   entered        where it was pushed, or moved to this queue
--   receives       how many claims it had in this queue, null if that is not known
WITH seen AS (
  SELECT message, part_number, sequence, kind, at_ms, queue, epoch, dead,
    coalesce(last_value(CASE WHEN kind IN ('Pushed', 'Released')
        THEN CASE WHEN until_ms IS NULL THEN 'visible' ELSE 'delayed' END
      WHEN kind IN ('DelayEnded', 'ClaimExpired', 'Moved') THEN 'visible'
      WHEN kind IN ('Claimed', 'Extended') THEN 'in flight'
      WHEN kind = 'Departed' THEN 'departed'
      WHEN {ENDED} THEN 'gone' END IGNORE NULLS) OVER earlier,
      CASE WHEN message IN (SELECT message FROM ended_before) THEN 'gone' END) AS state,
    coalesce(max(CASE WHEN kind = 'Pushed' THEN 1 END) OVER earlier, 0) = 1 AS was_pushed,
    last_value(CASE WHEN kind = 'Claimed' THEN epoch END IGNORE NULLS) OVER earlier
      AS current_epoch,
    last_value(CASE WHEN kind IN ('Pushed', 'Claimed', 'Extended', 'Released')
      THEN coalesce(until_ms, 0) END IGNORE NULLS) OVER earlier AS due_ms,
    last_value(CASE WHEN kind = 'Pushed' THEN coalesce(expires_at_ms, 0)
      WHEN kind = 'Moved' THEN 0 END IGNORE NULLS) OVER earlier AS expires_ms,
    last_value(CASE WHEN kind IN ('Pushed', 'Moved') THEN sequence END IGNORE NULLS)
      OVER earlier AS entered
  FROM life_events WHERE part_number IS NOT NULL AND kind <> 'Carried'
  WINDOW earlier AS (PARTITION BY message ORDER BY sequence
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
), counted AS (
  SELECT *, coalesce(
    last_value(CASE WHEN kind = 'Moved' THEN CASE WHEN was_pushed THEN coalesce(current_epoch, 0)
      ELSE coalesce(current_epoch, -1) END END IGNORE NULLS) OVER earlier, 0) AS epoch_entered
  FROM seen
  WINDOW earlier AS (PARTITION BY message ORDER BY sequence
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT message, part_number, sequence, kind, at_ms, queue, epoch, dead, state, was_pushed,
  current_epoch, due_ms, expires_ms, entered,
  CASE WHEN epoch_entered >= 0 THEN coalesce(current_epoch, 0) - epoch_entered END AS receives
FROM counted
