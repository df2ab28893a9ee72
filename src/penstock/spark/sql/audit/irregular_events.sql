-- Every event of the messages of a part whose lives are not regular.
--
--   store, shard, message   whose
--   sequence, kind, at_ms, queue, term, epoch, dead
--                           as in the journal
--   until_ms                a claim's deadline, or the end of a delay
--   expires_at_ms, to_queue, rank
--                           as in the journal
--   group_hash, dedup_hash  hashes of a group and a dedup id: those of a push itself, and in other
--                           events those of the message; null if there is none
--   until                   of the message, as in `folds`
--
-- Where several parts are made together, part_number says which of them a row is of.
SELECT part.store, part.shard, events.message, sequence, kind, at_ms, events.queue, events.term,
  epoch, dead, coalesce(events.deadline_ms, visible_at_ms) AS until_ms, events.expires_at_ms,
  to_queue, rank,
  CASE WHEN kind = 'Pushed' THEN events.group_hash ELSE folds.group_hash END AS group_hash,
  CASE WHEN kind = 'Pushed' THEN events.dedup_hash ELSE folds.dedup_hash END AS dedup_hash, until,
  folds.part_number
FROM events JOIN folds ON folds.message = events.message, part
WHERE NOT regular
