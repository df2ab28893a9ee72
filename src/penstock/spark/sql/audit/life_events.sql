-- Every event of the messages whose lives are not plain. Of a regular life the row in `folds` says
-- all three.
--
--   message                 its number
--   part_number             of its part among those that are judged, null if it is of another
--   sequence, kind, at_ms, queue, term, epoch, dead, until_ms, expires_at_ms, to_queue, rank,
--   group_hash, dedup_hash  as in `irregular_events`
SELECT message, part_number, sequence, kind, at_ms, queue, term, epoch, dead, until_ms,
  expires_at_ms, to_queue, rank, group_hash, dedup_hash
FROM irregular_events
UNION ALL
SELECT message, part_number, pushed, 'Pushed', pushed_ms, queue, term, NULL, NULL, NULL,
  expires_at_ms, NULL, NULL, group_hash, dedup_hash
FROM messages WHERE NOT plain
UNION ALL
SELECT message, part_number, claimed, 'Claimed', claimed_ms, queue, term, 1, NULL, deadline_ms,
  NULL, NULL, NULL, NULL, NULL
FROM messages WHERE NOT plain AND claimed IS NOT NULL
UNION ALL
SELECT message, part_number, deleted, 'Deleted', deleted_ms, queue, term, 1, NULL, NULL, NULL,
  NULL, NULL, NULL, NULL
FROM messages WHERE NOT plain AND deleted IS NOT NULL
