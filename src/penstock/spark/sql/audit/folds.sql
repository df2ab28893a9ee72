-- A row for each message of a part: where its events are if its life is regular. Every column is
-- an aggregate that does not depend on the order in which events are read.
--
--   store, shard, message   whose
--   events                  how many there are
--   first_sequence, last_sequence
--                           of its events
--   until                   its last event if that ended it and every queue it was in has an event
--                           by which it left; or else no limit: other messages of its group may
--                           have to wait for it. In the table, the purge or removal that ended it,
--                           if it did (`emptied`). Rows with greater values come first in a file
--   queue, least_queue, term, least_term
--                           greatest and least: equal if there is only one
--   pushed                  the sequence of a push without delay
--   claimed, deleted        the sequence of the first claim and of a delete by it
--   first_pushed_ms, pushed_ms, expires_at_ms, claimed_ms, deadline_ms, deleted_ms
--                           of these three events; the first two of any push
--   group_hash, dedup_hash  hashes of its group and its dedup id, null if it has none
--   regular                 pushed without delay, perhaps claimed once, perhaps deleted by that
--                           claim, all in one queue and term, and nothing else: each of the three
--                           events is there at most once, and the count shows there is no other
--
-- For the queries of other tables it also gives what is not in `folds`: group, dedup_id, priority and
-- body_bytes of a message, holder and attempt_id of the claim of a regular life, the rank of a push
-- (push_rank), and whether a message was pushed once, in one queue since, and ended by no event
-- (unmoved).
WITH folded AS (
  SELECT message, count(*) AS events, min(sequence) AS first_sequence,
    max(sequence) AS last_sequence,
    max(sequence) FILTER (WHERE {ENDED}) AS ended, count(*) FILTER (WHERE kind = 'Pushed') AS pushes,
    bool_or(kind = 'Departed') OR NOT bool_or(kind = 'Arrived') AS departed_first,
    max(queue) AS queue, min(queue) AS least_queue, max(term) AS term, min(term) AS least_term,
    max(sequence) FILTER (WHERE kind = 'Pushed' AND visible_at_ms IS NULL) AS pushed,
    max(sequence) FILTER (WHERE kind = 'Claimed' AND epoch = 1) AS claimed,
    max(sequence) FILTER (WHERE kind = 'Deleted' AND epoch = 1) AS deleted,
    min(at_ms) FILTER (WHERE kind = 'Pushed') AS first_pushed_ms,
    max(at_ms) FILTER (WHERE kind = 'Pushed') AS pushed_ms,
    max(expires_at_ms) FILTER (WHERE kind = 'Pushed') AS expires_at_ms,
    max(at_ms) FILTER (WHERE kind = 'Claimed' AND epoch = 1) AS claimed_ms,
    max(deadline_ms) FILTER (WHERE kind = 'Claimed' AND epoch = 1) AS deadline_ms,
    max(at_ms) FILTER (WHERE kind = 'Deleted' AND epoch = 1) AS deleted_ms,
    max(group_hash) AS group_hash, max(dedup_hash) AS dedup_hash,
    max("group") AS "group", max(dedup_id) AS dedup_id, max(priority) AS priority,
    max(body_bytes) AS body_bytes, max(holder) FILTER (WHERE kind = 'Claimed') AS holder,
    max(attempt_id) FILTER (WHERE kind = 'Claimed') AS attempt_id,
    max(rank) FILTER (WHERE kind = 'Pushed') AS push_rank,
    bool_or(to_queue IS NOT NULL OR kind IN ('Moved', 'Departed', 'Arrived')) AS moved
  FROM events GROUP BY message
), misplaced AS (
  -- Messages with an event in another queue than the one they had been pushed or moved to.
  SELECT DISTINCT message FROM (
    SELECT message, queue, coalesce(
      last_value(CASE WHEN kind = 'Moved' THEN to_queue END IGNORE NULLS) OVER earlier,
      first_value(queue) OVER (PARTITION BY message ORDER BY sequence)) AS expected
    FROM events WHERE message IN (SELECT message FROM folded WHERE queue <> least_queue)
    WINDOW earlier AS (PARTITION BY message ORDER BY sequence
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
  WHERE queue <> expected
)
SELECT part.store, part.shard, message, events, first_sequence, last_sequence,
  CASE WHEN ended = last_sequence AND pushes < 2 AND departed_first
      AND message NOT IN (SELECT message FROM misplaced) THEN ended
    ELSE {NO_LIMIT} END AS until,
  queue, least_queue, term, least_term, pushed, claimed, deleted, first_pushed_ms, pushed_ms,
  expires_at_ms, claimed_ms, deadline_ms, deleted_ms, group_hash, dedup_hash,
  coalesce(events = 1 + CAST(claimed IS NOT NULL AS int) + CAST(deleted IS NOT NULL AS int)
    AND (claimed IS NULL OR claimed > pushed) AND (deleted IS NULL OR deleted > claimed)
    AND pushed IS NOT NULL AND queue = least_queue AND term = least_term, false) AS regular,
  "group", dedup_id, priority, body_bytes, holder, attempt_id, push_rank,
  pushes = 1 AND ended IS NULL AND queue = least_queue AND NOT moved AS unmoved
FROM folded, part
