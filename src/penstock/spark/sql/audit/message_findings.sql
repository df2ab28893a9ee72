-- Findings about one message: an event breaks at most one of these checks.
--
--   check      which check failed, by its name in `CHECKS`
--   part, key  the message
--   queue      the queue's number
--   sequence   the event that breaks the check
--   at_ms      when it happened
--   detail     the finding in words
WITH judged AS (
  SELECT states.*, max_receives, CASE
    WHEN code <> {Pushed} AND state IS NULL THEN 'pushed first'
    WHEN code = {Pushed} AND state IS NOT NULL THEN 'pushed once'
    WHEN code = {Arrived} AND state <> 'departed' THEN 'arrival of the departed'
    -- What has departed is in no queue: neither a purge nor a removal ends it.
    WHEN state = 'gone' OR (last_emptied > entered AND state <> 'departed')
      OR (state = 'departed' AND code <> {Arrived}) THEN 'nothing after the end'
    WHEN code = {Claimed} AND state = 'in flight' THEN 'one holder'
    WHEN code = {Claimed} AND state = 'delayed' THEN 'claim of the visible'
    -- Claims from before the journal's beginning have left no epoch to compare with.
    WHEN code = {Claimed} AND (was_pushed OR current_epoch IS NOT NULL)
      AND epoch <> coalesce(current_epoch, 0) + 1 THEN 'epochs rise'
    WHEN code = {Claimed} AND entered IS NOT NULL AND strict
      AND receives >= max_receives THEN 'dead letter after N'
    WHEN code IN ({Deleted}, {Released}, {Lost})
      AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'current claim only'
    -- An extension may renew the last claim after it ran out, until the next claim.
    WHEN code = {Extended}
      AND (state = 'delayed' OR epoch <> current_epoch) THEN 'current claim only'
    WHEN code = {ClaimExpired}
      AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'expiry of the current claim'
    WHEN code = {ClaimExpired} AND at_ms < due_ms THEN 'expiry after the deadline'
    WHEN code = {DelayEnded}
      AND (state <> 'delayed' OR at_ms < due_ms) THEN 'delay in full'
    WHEN code = {Expired} AND (state = 'in flight' OR at_ms < expires_ms)
      THEN 'expired when due'
    WHEN code IN ({Moved}, {Departed}) AND state <> 'visible' THEN 'move of the visible'
    WHEN (code = {Departed} OR (code = {Moved} AND dead)) AND entered IS NOT NULL
      AND settings_known AND (max_receives IS NULL OR receives < max_receives
        OR (strict AND receives > max_receives)) THEN 'dead letter after N'
    END AS check
  FROM states LEFT JOIN periods
    ON periods.queue_key = shiftright(states.key, {MESSAGE_BITS}) * {QUEUES} + states.queue
      AND sequence >= from_sequence AND sequence < to_sequence
)
SELECT check, part, key, queue, sequence, at_ms,
  concat(kind, coalesce(concat(' by claim ', CAST(epoch AS string)), ''), ' of a message that ',
    CASE WHEN state IS NULL THEN 'was never pushed'
      WHEN check = 'nothing after the end' AND state <> 'departed' THEN 'was gone'
      ELSE concat('was ', state,
        coalesce(concat(', claim ', CAST(current_epoch AS string)), '')) END,
    CASE check WHEN 'expiry after the deadline'
        THEN concat(', ', CAST(due_ms - at_ms AS string), ' ms before its deadline')
      WHEN 'dead letter after N' THEN concat(', pulled ',
        coalesce(CAST(receives AS string), 'some'), ' times here where ',
        coalesce(CAST(max_receives AS string), 'no number'), ' is the limit')
      ELSE '' END) AS detail
FROM judged JOIN kinds ON kinds.code = judged.code WHERE check IS NOT NULL
