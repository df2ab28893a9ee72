-- A row for each queue and group. Columns: docs/formats/lake.md.
SELECT store, queue, `group`, count(*) AS messages, sum(body_bytes) AS stored_bytes,
  sum(claims) AS claims, sum(timeouts) AS timeouts, sum(dead_letters) AS dead_letters,
  count(standing) AS live
FROM {messages} WHERE `group` IS NOT NULL GROUP BY store, queue, `group`
