#!lua flags=allow-oom
-- Shows the messages that are owed to other queues, and ends or returns them. Keys: as in queue.lua.
--
-- ARGV 4: "show", with 5 a limit; "done", with NUMBERs that have arrived, from 5 on; or "return", with
-- NUMBERs that cannot arrive and go back to their places.
-- Reply: queue number, time, owed; then, of "show", for each NUMBER, message, state, and where
-- it goes: 1 if dead-lettered or 0, and the name.

if not open() then return false end
local results = {q.identity, digits(now), 0}
if ARGV[4] == 'show' then
  for _, number in ipairs(call('ZRANGE', OWED, 0, tonumber(ARGV[5]) - 1)) do
    local at = #results
    results[at + 1], results[at + 2] = number, call('HGET', MESSAGES, number)
    results[at + 3], results[at + 4] = call('HGET', STATE, number), call('HGET', OUTBOX, number)
  end
  results[3] = call('ZCARD', OWED)
  return results
end
for place = 5, #ARGV do
  local number = ARGV[place]
  if call('ZREM', OWED, number) == 1 then
    call('HDEL', OUTBOX, number)
    if ARGV[4] == 'done' then
      call('HDEL', MESSAGES, number)
      call('HDEL', STATE, number)
    else
      local s = state_of(number)
      s.kept = 1
      s.back = now
      keep_state(number, s)
      call('ZADD', ARRIVALS, s.arrived, number)
      if s.expires > 0 then call('ZADD', EXPIRIES, s.expires, number) end
      q.due = now
      if q.fifo then call('ZADD', LINES, 0, line_member(s.group, number)) end
      q.bytes = q.bytes + s.size
      join_order(number, s)
    end
  end
end
results[3] = close()
return results
