#!lua flags=allow-oom
-- Deletes, extends and releases claims. Keys: as in queue.lua.
--
-- ARGV 4: the number of the queue that the receipts are for. 5: claims one after another: a verb (D, E
-- or R), NUMBER, epoch, visibility_ms or delay_ms, the longest it may be held in all (-1: no limit),
-- and whether its receipt may be late (1 or 0).
-- Reply: queue number, time, owed, then for each claim: D: 1, or 0 if it was gone; E: the deadline;
-- R: 1; or why it was refused.

local ITEM, ITEM_BYTES = '>c1ddddB', 34
-- The beginning of a state, and the length of one without a group.
local CLAIMED, PLAIN_BYTES = '>I4I4I4', 46

if not open() then return false end
local results = {q.identity, digits(now), 0}
local items = ARGV[5]
local count = #items / ITEM_BYTES
if q.number ~= ARGV[4] then
  for place = 1, count do results[place + 3] = 'other' end
  return results
end
settle()
local gone, dropped = {}, {}
local numbers = {}
for place = 1, count do
  local _, number = unpack_bytes('>c1d', items, (place - 1) * ITEM_BYTES + 1)
  numbers[place] = digits(number)
end
local texts = get_many('HMGET', STATE, numbers)
local deadlines = get_many('ZMSCORE', UNACKED, numbers)

-- The state of a message whose claim is valid, or was and is used late; or nil and the reason. The
-- third value is true if it is used late.
local function claimed_state(number, epoch, late, text)
  if not text or gone[number] or call('HEXISTS', OUTBOX, number) == 1 then return nil, 'gone' end
  local s = read_state(text)
  if s.epoch ~= epoch then return nil, 'again' end
  local until_ms = tonumber(call('ZSCORE', UNACKED, number))
  if until_ms and until_ms <= now then
    note('ClaimExpired', number, s.epoch)
    end_claim(number, s, 0)
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

-- Deletes a message; the calls that are the same for all deletes are made once at the end.
local function delete(number, size, epoch, s)
  gone[number] = true
  dropped[#dropped + 1] = number
  if s then
    count_in_flight(s, -1)
    leave_line(number, s)
  end
  q.bytes = q.bytes - size
  if history_max > 0 then note('Deleted', number, epoch) end
end

-- Whether an earlier item of this batch may have changed the message.
local is_changed = {}

-- Deletes the message of a valid claim, the usual item. False in every other case.
local function delete_held(place, epoch)
  local number, text, until_ms = numbers[place], texts[place], deadlines[place]
  if not text or not until_ms or gone[number] or is_changed[number] or tonumber(until_ms) <= now then
    return false
  end
  local current, _, size = unpack_bytes(CLAIMED, text)
  if current ~= epoch then return false end
  delete(number, size, epoch, #text > PLAIN_BYTES and read_state(text))
  return true
end

local function extend(number, s, ms)
  local deadline = now + ms
  call('ZADD', UNACKED, deadline, number)
  note_due(deadline)
  note('Extended', number, s.epoch, 'deadline_ms=' .. digits(deadline))
  return deadline
end

local function change(place)
  local verb, _, epoch, ms, held_max, late = unpack_bytes(ITEM, items, (place - 1) * ITEM_BYTES + 1)
  if verb == 'D' and delete_held(place, epoch) then return 1 end
  local number = numbers[place]
  -- Read again: an earlier item may have changed it.
  local s, why, is_late = claimed_state(number, epoch, late == 1, texts[place] and call('HGET', STATE, number))
  is_changed[number] = true
  if not s then return verb == 'D' and why == 'gone' and 0 or why end
  if verb == 'E' and held_max >= 0 and s.epoch == 1 and now + ms - s.first > held_max then
    return 'long:' .. digits(now + ms - s.first)
  end
  if is_late then
    leave_order(number, s)
    count_in_flight(s, 1)
  end
  if verb == 'D' then
    delete(number, s.size, epoch, s)
    return 1
  end
  if verb == 'E' then return extend(number, s, ms) end
  note('Released', number, s.epoch)
  end_claim(number, s, ms)
  return 1
end

for place = 1, count do results[place + 3] = change(place) end
call_many('ZREM', UNACKED, dropped)
call_many('HDEL', MESSAGES, dropped)
call_many('HDEL', STATE, dropped)
call_many('ZREM', ARRIVALS, dropped)
if call('EXISTS', OVERDUE, EXPIRIES) > 0 then
  call_many('ZREM', OVERDUE, dropped)
  call_many('ZREM', EXPIRIES, dropped)
end
results[3] = close()
return results
