-- Every event of the lake, those that were dropped by what is kept of them; for checks that compare
-- whole journals.
--
--   store, shard, term, entry, index, sequence, kind, at_ms, queue, message
--              as in `events`
SELECT store, shard, term, entry, index, sequence, kind, at_ms, queue, message FROM events
LEFT ANTI JOIN dropped ON dropped.key = events.key AND events.sequence <= dropped.last_sequence
UNION ALL
SELECT journals.store, journals.shard, term, sequence div {ENTRY_SPAN}, sequence % {ENTRY_SPAN},
  sequence, kind, at_ms, queue, {MESSAGE}
FROM all_irregular_events LEFT SEMI JOIN dropped USING (key)
JOIN kinds USING (code) JOIN journals ON journal = shiftright(key, {MESSAGE_BITS})
UNION ALL
SELECT store, shard, term, step.sequence div {ENTRY_SPAN}, step.sequence % {ENTRY_SPAN}, step.*,
  queue_number, message
FROM dropped LATERAL VIEW stack(3, pushed, 'Pushed', pushed_at_ms,
  claimed, 'Claimed', first_pulled_at_ms, deleted, 'Deleted', ended_at_ms) step AS sequence, kind, at_ms
WHERE regular AND step.sequence IS NOT NULL
