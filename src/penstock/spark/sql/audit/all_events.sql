-- Every event of the lake, those of sealed messages by what is kept of them; for checks that
-- compare whole journals.
--
--   store, shard, term, entry, index, sequence, kind, at_ms, queue, message
--              as in `events`
SELECT store, shard, term, entry, "index", sequence, kind, at_ms, queue, message FROM kept_events
UNION ALL
SELECT store, shard, term, sequence >> {INDEX_BITS}, sequence % {ENTRY_SPAN}, sequence, kind, at_ms,
  queue, message
FROM sealed_irregular
UNION ALL
SELECT store, shard, term, step.sequence >> {INDEX_BITS}, step.sequence % {ENTRY_SPAN},
  step.sequence, step.kind, step.at_ms, queue, message
FROM (SELECT *, unnest([
    {'sequence': pushed, 'kind': 'Pushed', 'at_ms': pushed_ms},
    {'sequence': claimed, 'kind': 'Claimed', 'at_ms': claimed_ms},
    {'sequence': deleted, 'kind': 'Deleted', 'at_ms': deleted_ms}]) AS step
  FROM sealed_folds WHERE regular)
WHERE step.sequence IS NOT NULL
