#!lua flags=allow-oom
-- Shows messages in one state. Keys: as in queue.lua.
--
-- ARGV 4: limit; 5: visible, delayed or in_flight; 6: bytes_max (-1: none).
-- Reply: queue number, time, owed, then for each message NUMBER, message, and its state or nil. Visible
-- ones by priority and arrival, the others by when that state ends.

if not open() then return false end
settle()
local owed = close()
local limit, state, room_bytes = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local numbers = {}
if state == 'in_flight' then
  numbers = call('ZRANGE', UNACKED, 0, limit - 1)
elseif state == 'delayed' then
  numbers = call('ZRANGEBYSCORE', QUEUED, DELAYED, '+inf', 'LIMIT', 0, limit)
else
  local plain = call('ZRANGEBYSCORE', QUEUED, '-inf', '(' .. digits(DELAYED), 'WITHSCORES', 'LIMIT', 0, limit)
  local grouped = call('ZRANGE', GROUPED, 0, limit - 1, 'WITHSCORES')
  local one, other = 1, 1
  while #numbers < limit and (plain[one] or grouped[other]) do
    if not grouped[other] or (plain[one] and tonumber(plain[one + 1]) < tonumber(grouped[other + 1])) then
      numbers[#numbers + 1] = plain[one]
      one = one + 2
    else
      numbers[#numbers + 1] = grouped[other]
      other = other + 2
    end
  end
end
local results = {q.identity, digits(now), owed}
for place, number in ipairs(numbers) do
  local payload, text = call('HGET', MESSAGES, number), call('HGET', STATE, number)
  local s = text and read_state(text) or new_state(payload)
  if room_bytes >= 0 then
    room_bytes = room_bytes - s.size
    if place > 1 and room_bytes < 0 then break end
  end
  local at = #results
  results[at + 1], results[at + 2], results[at + 3] = number, payload, text
end
return results
