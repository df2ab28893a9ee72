-- A row for each event of a message of the judged parts whose life is not plain, with the message's
-- state before it.
--
--   part, key, sequence, code, at_ms, queue, epoch, dead
--                  the event
--   state          visible, delayed, in flight, departed, gone; null before its push
--   was_pushed     whether its push is in the journal
--   current_epoch  the epoch of its last claim, null if none is in the journal
--   due_ms         when its claim or delay ends, 0 if it has neither
--   expires_ms     when its TTL ends, 0 if the queue's retention applies
--   entered        where it was pushed, or moved to this queue
--   receives       how many claims it had in this queue, null if that is not known
WITH seen AS (
  SELECT part, key, sequence, code, at_ms, queue, epoch, dead,
    last(CASE WHEN code IN ({Pushed}, {Released})
        THEN if(until_ms IS NULL, 'visible', 'delayed')
      WHEN code IN ({DelayEnded}, {ClaimExpired}, {Moved}) THEN 'visible'
      WHEN code IN ({Claimed}, {Extended}) THEN 'in flight'
      WHEN code = {Departed} THEN 'departed' WHEN {ENDED} THEN 'gone' END, true) OVER earlier
      AS state,
    coalesce(max(if(code = {Pushed}, 1, NULL)) OVER earlier, 0) = 1 AS was_pushed,
    last(if(code = {Claimed}, epoch, NULL), true) OVER earlier AS current_epoch,
    last(if(code IN ({Pushed}, {Claimed}, {Extended}, {Released}), coalesce(until_ms, 0), NULL),
      true) OVER earlier AS due_ms,
    last(CASE WHEN code = {Pushed} THEN coalesce(expires_at_ms, 0) WHEN code = {Moved} THEN 0 END,
      true) OVER earlier AS expires_ms,
    last(if(code IN ({Pushed}, {Moved}), sequence, NULL), true) OVER earlier AS entered
  FROM life_events WHERE code <> {Carried}
  WINDOW earlier AS (PARTITION BY part, key ORDER BY sequence
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
), counted AS (
  SELECT *, coalesce(last(if(code = {Moved},
    if(was_pushed, coalesce(current_epoch, 0), coalesce(current_epoch, -1)), NULL), true)
      OVER earlier, 0) AS epoch_entered
  FROM seen
  WINDOW earlier AS (PARTITION BY part, key ORDER BY sequence
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT *, if(epoch_entered >= 0, coalesce(current_epoch, 0) - epoch_entered, NULL) AS receives
FROM counted
