-- Messages that a purge or a removal ended, by minute; and those without a push, which were there
-- before the beginning of the journal: their minute is null.
--
-- A purge counts the messages it ended by its own account; of those in a journal without its
-- beginning some are not known, so here the messages that it ended are counted.
SELECT part, 'minute' AS what, held_in_number AS queue_number, ended_at_ms div {MINUTE_MS} AS at,
  -1 AS messages, 1 AS changes
FROM messages WHERE state IN ('purged', 'removed')
UNION ALL
SELECT part, 'minute', queue_number, NULL, 1, 1
FROM messages WHERE pushed_at_ms IS NULL AND state <> 'arrived'
