#!lua flags=allow-oom
-- Counts. Keys: as in queue.lua.
--
-- Reply: queue number, time, owed, 1 if more is due, then how many messages are visible, delayed and
-- in flight, the stored bytes, the arrival of the oldest message (0 if there is none), and how many
-- pulls wait.

if not open() then return false end
settle()
for _, waiter in ipairs(call('ZRANGEBYSCORE', ALIVE, '-inf', '(' .. redis_s())) do remove_waiter(waiter) end
local owed = close()
local visible = call('ZCOUNT', QUEUED, '-inf', '(' .. digits(DELAYED)) + call('ZCARD', GROUPED)
local delayed = call('ZCOUNT', QUEUED, DELAYED, '+inf')
local oldest = call('ZRANGE', OVERDUE, 0, 0, 'WITHSCORES')[2] or call('ZRANGE', ARRIVALS, 0, 0, 'WITHSCORES')[2]
return {q.identity, digits(now), owed, has_more and 1 or 0, visible, delayed, call('ZCARD', UNACKED),
  digits(q.bytes), digits(tonumber(oldest or 0)), call('ZCARD', WAITERS) + call('ZCARD', WOKEN)}
