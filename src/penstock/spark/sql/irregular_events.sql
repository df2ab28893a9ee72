-- Every event of the messages of the parts that are made whose lives are not regular (`messages`).
--
--   key           the journal's number, shifted by 48 bits, and the message's
--   code          the kind of the event, as in `events`
--   the others    as in `events`
SELECT key, sequence, code, at_ms, queue, term, epoch, deadline_ms, visible_at_ms, expires_at_ms,
  `group`, dedup_id, attempt_id, holder, name, to_queue, rank, dead, body_bytes, part
FROM part_events
LEFT SEMI JOIN (SELECT key FROM messages WHERE NOT regular AND NOT dropped) AS irregular USING (key)
