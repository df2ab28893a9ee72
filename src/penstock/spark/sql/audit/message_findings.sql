-- Findings about one message: an event breaks at most one of these checks.
--
--   check      which check failed, by its name in `CHECKS`
--   part_number, message
--              the number of its part among those that are judged, and its own
--   queue      the queue's number
--   sequence   the event that breaks the check
--   at_ms      when it happened
--   detail     the finding in words
WITH judged AS (
  SELECT states.*, max_receives, CASE
    WHEN kind <> 'Pushed' AND state IS NULL THEN 'pushed first'
    WHEN kind = 'Pushed' AND state IS NOT NULL THEN 'pushed once'
    WHEN kind = 'Arrived' AND state <> 'departed' THEN 'arrival of the departed'
    -- What has departed is in no queue: neither a purge nor a removal ends it.
    WHEN state = 'gone' OR (last_emptied > entered AND state <> 'departed')
      OR (state = 'departed' AND kind <> 'Arrived') THEN 'nothing after the end'
    WHEN kind = 'Claimed' AND state = 'in flight' THEN 'one holder'
    WHEN kind = 'Claimed' AND state = 'delayed' THEN 'claim of the visible'
    -- Claims from before the journal's beginning have left no epoch to compare with.
    WHEN kind = 'Claimed' AND (was_pushed OR current_epoch IS NOT NULL)
      AND epoch <> coalesce(current_epoch, 0) + 1 THEN 'epochs rise'
    WHEN kind = 'Claimed' AND entered IS NOT NULL AND strict
      AND receives >= max_receives THEN 'dead letter after N'
    WHEN kind IN ('Deleted', 'Released', 'Lost')
      AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'current claim only'
    -- An extension may renew the last claim after it ran out, until the next claim.
    WHEN kind = 'Extended'
      AND (state = 'delayed' OR epoch <> current_epoch) THEN 'current claim only'
    WHEN kind = 'ClaimExpired'
      AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'expiry of the current claim'
    WHEN kind = 'ClaimExpired' AND at_ms < due_ms THEN 'expiry after the deadline'
    WHEN kind = 'DelayEnded'
      AND (state <> 'delayed' OR at_ms < due_ms) THEN 'delay in full'
    WHEN kind = 'Expired' AND (state = 'in flight' OR at_ms < expires_ms)
      THEN 'expired when due'
    WHEN kind IN ('Moved', 'Departed') AND state <> 'visible' THEN 'move of the visible'
    WHEN (kind = 'Departed' OR (kind = 'Moved' AND dead)) AND entered IS NOT NULL
      AND settings_known AND (max_receives IS NULL OR receives < max_receives
        OR (strict AND receives > max_receives)) THEN 'dead letter after N'
    END AS "check"
  FROM states LEFT JOIN spanned_periods AS periods
    ON periods.queue = states.queue AND span = span_of(sequence)
      AND sequence >= from_sequence AND sequence < to_sequence
)
SELECT "check", part_number, message, queue, sequence, at_ms,
  concat(kind, coalesce(' by claim ' || CAST(epoch AS varchar), ''), ' of a message that ',
    CASE WHEN state IS NULL THEN 'was never pushed'
      WHEN "check" = 'nothing after the end' AND state <> 'departed' THEN 'was gone'
      ELSE concat('was ', state,
        coalesce(', claim ' || CAST(current_epoch AS varchar), '')) END,
    CASE "check" WHEN 'expiry after the deadline'
        THEN concat(', ', CAST(due_ms - at_ms AS varchar), ' ms before its deadline')
      WHEN 'dead letter after N' THEN concat(', pulled ',
        coalesce(CAST(receives AS varchar), 'some'), ' times here where ',
        coalesce(CAST(max_receives AS varchar), 'no number'),
        ' is the limit')
      ELSE '' END) AS detail
FROM judged WHERE "check" IS NOT NULL
