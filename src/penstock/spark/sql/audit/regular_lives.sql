-- A row for each message with a regular life of the parts that are judged.
--
--   part, key   which
--   queue_key   of its queue
--   the others  as in `messages`, and `emptied_before` of the period in which its last event is
--   plain       its queue was not emptied before it ended, and its number was not used before by one
--               whose events were dropped: if not, its events are looked at one by one
SELECT part, messages.key, messages.queue_key, queue_number, term, events, pushed, claimed, deleted, pushed_at_ms,
  expires_at_ms, first_pulled_at_ms, deadline_ms, ended_at_ms, `group`, dedup_id,
  coalesce(emptied_before, 0) AS emptied_before,
  coalesce(pushed > coalesce(last_emptied, 0) AND coalesce(max_receives, 1) > 0
    AND twice.key IS NULL, false) AS plain
FROM messages
LEFT JOIN periods ON periods.queue_key = messages.queue_key
  AND coalesce(deleted, claimed, pushed) >= from_sequence
  AND coalesce(deleted, claimed, pushed) < to_sequence
LEFT JOIN twice ON twice.key = messages.key
WHERE regular
