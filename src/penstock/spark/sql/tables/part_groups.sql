-- A row for each queue and group: what the messages of a part add to it.
--
--   store, queue, group  which
--   messages, stored_bytes, claims, timeouts, dead_letters, live
--                        as in `hot_groups`
SELECT store, queue, "group", count(*) AS messages, sum(body_bytes) AS stored_bytes,
  sum(claims) AS claims, sum(timeouts) AS timeouts, sum(dead_letters) AS dead_letters,
  count(standing) AS live
FROM messages WHERE "group" IS NOT NULL GROUP BY store, queue, "group" ORDER BY queue, "group"
