-- Findings of `terms rise`, from events whose term had been replaced.
--
--   check         which check failed, by its name in `CHECKS`
--   store, shard  whose journal
--   message       its number, null if the event is of a queue
--   queue         the queue's number
--   sequence      the first event of an entry that breaks the check
--   at_ms         when it happened
--   detail        the finding in words
SELECT 'terms rise' AS check, events.store, events.shard, message, queue, sequence, at_ms,
  concat('an entry of term ', CAST(events.term AS string),
    ' after that term was replaced at entry ', CAST(at_entry AS string)) AS detail
FROM all_events AS events JOIN replaced_terms AS replaced ON replaced.store = events.store
  AND replaced.shard = events.shard AND replaced.term = events.term
WHERE kind <> 'Damaged' AND entry > at_entry AND index = 0
