#!lua flags=allow-oom
-- Deletes, extends and releases claims. Keys: as in queue.lua.
--
-- ARGV 4: the number of the queue that the receipts are for. From 5 on: each a claim: a verb (D, E or
-- R), NUMBER, epoch, visibility_ms or delay_ms, the longest it may be held in all (-1: no limit), and
-- whether its receipt may be late (1 or 0).
-- Reply: queue number, time, owed, then for each claim: D: 1, or 0 if it was gone; E: the deadline;
-- R: 1; or why it was refused.

local ITEM = '>c1ddddB'

if not open() then return false end
local results = {q.identity, digits(now), 0}
if q.number ~= ARGV[4] then
  for place = 5, #ARGV do results[place - 1] = 'other' end
  return results
end
settle()
local gone, dropped = {}, {}
local numbers, items = {}, {}
for place = 5, #ARGV do
  local verb, number, epoch, ms, held_max, late = unpack_bytes(ITEM, ARGV[place])
  items[place - 4] = {verb, epoch, ms, held_max, late == 1}
  numbers[place - 4] = digits(number)
end
local texts = get_many('HMGET', STATE, numbers)
local deadlines = get_many('ZMSCORE', UNACKED, numbers)

-- The state of a message whose claim lives, or may be taken up again; or nil and the reason. True
-- after it if the claim is to be taken up again.
local function held(number, epoch, late, text)
  if not text or gone[number] or call('HEXISTS', OUTBOX, number) == 1 then return nil, 'gone' end
  local s = read_state(text)
  if s.epoch ~= epoch then return nil, 'again' end
  local until_ms = tonumber(call('ZSCORE', UNACKED, number))
  if until_ms and until_ms <= now then
    note('ClaimExpired', number, s.epoch)
    come_back(number, s, 0)
    text, until_ms = call('HGET', STATE, number), nil
    if not text or call('HEXISTS', OUTBOX, number) == 1 then return nil, 'gone' end
    s = read_state(text)
  end
  if until_ms then return s, nil, false end
  if late and not q.fifo and s.epoch > s.arrival_epoch then
    local score = call('ZSCORE', QUEUED, number) or call('ZSCORE', GROUPED, number)
    if score and tonumber(score) < DELAYED then return s, nil, true end
  end
  return nil, 'ended'
end

-- Ends a message; what is alike for all is done at once when all have been read.
local function delete(number, s)
  gone[number] = true
  dropped[#dropped + 1] = number
  count_in_flight(s, -1)
  leave_line(number, s)
  q.bytes = q.bytes - s.size
  note('Deleted', number, s.epoch)
end

local function extend(number, s, ms)
  local deadline = now + ms
  call('ZADD', UNACKED, deadline, number)
  note('Extended', number, s.epoch, 'deadline_ms=' .. digits(deadline))
  return deadline
end

local function change(place)
  local number, item = numbers[place], items[place]
  local verb, epoch, ms, held_max, late = item[1], item[2], item[3], item[4], item[5]
  local text, until_ms = texts[place], tonumber(deadlines[place])
  if verb == 'D' and text and not gone[number] and until_ms and until_ms > now then
    local s = read_state(text)
    if s.epoch ~= epoch then return 'again' end
    -- An earlier item may have released it.
    if call('ZREM', UNACKED, number) == 1 then
      delete(number, s)
      return 1
    end
  end
  -- Read again: an earlier item may have changed it.
  local s, why, is_late = held(number, epoch, late, text and call('HGET', STATE, number))
  if not s then return verb == 'D' and why == 'gone' and 0 or why end
  if verb == 'E' and held_max >= 0 and s.epoch == 1 and now + ms - s.first > held_max then
    return 'long:' .. digits(now + ms - s.first)
  end
  if is_late then
    leave_order(number, s)
    count_in_flight(s, 1)
  end
  if verb == 'D' then
    call('ZREM', UNACKED, number)
    delete(number, s)
    return 1
  end
  if verb == 'E' then return extend(number, s, ms) end
  note('Released', number, s.epoch)
  come_back(number, s, ms)
  return 1
end

for place = 1, #numbers do results[place + 3] = change(place) end
call_many('HDEL', MESSAGES, dropped)
call_many('HDEL', STATE, dropped)
call_many('ZREM', ARRIVALS, dropped)
if call('EXISTS', OVERDUE, EXPIRIES) > 0 then
  call_many('ZREM', OVERDUE, dropped)
  call_many('ZREM', EXPIRIES, dropped)
end
results[3] = close()
return results
