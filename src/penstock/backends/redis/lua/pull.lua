#!lua flags=allow-oom
-- Claims messages, or adds the pull to those that wait. Keys: as in queue.lua.
--
-- ARGV from 4 on: limit, visibility_ms (-1: the queue's own), wait_ms (-1: the queue's own), attempt
-- id or "", holder or "", bytes_max, renew (1 or 0), waiter or "", process and a number of
-- its own to wait under (or ""), and whether this is the last try of a waiter (1 or 0).
-- Reply: queue number, time, owed, a word, then: "claims", the deadline of all of them, and for each
-- NUMBER, message and state; "again" and for each NUMBER, message, state and deadline; "waits" with the waiter's id, the wait in milliseconds and
-- the instant at which something is due next, or 0; "lapsed"; "full" with the number in flight and the
-- limit.

local ATTEMPT_WINDOW_MS, ATTEMPTS_MAX = 1209600000, 10000
local SKIPPED_MAX = 1000

if not open() then return false end
local limit, visibility_ms, wait_ms = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local attempt, holder, bytes_max = ARGV[7], ARGV[8], tonumber(ARGV[9])
local waiter, address, is_last = ARGV[11], ARGV[12], ARGV[13] == '1'
settle(limit)
local settings = call('HMGET', META, 'visibility_ms', 'wait_ms', 'priority_age_ms')
if visibility_ms < 0 then visibility_ms = tonumber(settings[1]) end
if wait_ms < 0 then wait_ms = tonumber(settings[2]) end
-- A message that arrived then or before is pulled before younger ones, whatever their priorities; nil
-- if priority is strict.
local priority_age_ms = tonumber(settings[3] or '')
local aged = priority_age_ms and now - priority_age_ms
local deadline = now + visibility_ms
local deadline_digits = digits(deadline)
local results = {q.identity, digits(now), 0, 'claims', deadline_digits}
local claims, skipped = 0, 0
local in_flight = call('ZCARD', UNACKED)
-- If all that is stored fits, nothing need be counted.
local room_bytes = limit > 1 and bytes_max < q.bytes and bytes_max or nil
local states, deadlines, given = {}, {}, {}
-- A message that arrived then or before has expired by the queue's retention.
local oldest = now - q.retention_ms

-- Adds a claim with its new state; the fields that are the same for all are written at the end.
local function add_claim(number, payload, text, epoch)
  local at = #states
  states[at + 1], states[at + 2] = number, text
  deadlines[at + 1], deadlines[at + 2] = deadline_digits, number
  in_flight = in_flight + 1
  claims = claims + 1
  at = #results
  results[at + 1], results[at + 2], results[at + 3] = number, payload, text
  if attempt ~= '' then given[claims] = number .. ':' .. epoch end
  if history_max > 0 then
    note('Claimed', number, epoch, holder ~= '' and 'holder=' .. holder or '')
  end
end

-- Claims a message that is out of the order.
local function claim_message(number, payload, s)
  s.epoch = s.epoch + 1
  s.kept = 0
  if s.first == 0 then s.first = now end
  count_in_flight(s, 1)
  add_claim(number, payload, state_text(s), s.epoch)
end

-- Whether a message can be claimed; if not, it has expired or become a dead letter. It is out of the
-- order already.
local function can_claim(number, s)
  if is_expired(s) then
    note('Expired', number)
    drop(number, s)
  elseif is_dead(s) then
    depart(number, s, q.dead_letter, true)
  else
    return true
  end
  skipped = skipped + 1
  return false
end

-- Whether there is room for the message in an answer that has some already.
local function fits(s)
  if not room_bytes then return true end
  room_bytes = room_bytes - s.size
  return room_bytes >= 0 or claims == 0
end

local function state_from(text, payload) return text and read_state(text) or new_state(payload) end

-- Claims a message that was never claimed and has not expired, the usual case. False, and nothing has
-- changed, in every other case. The fast path of `can_claim` and `claim_message`.
local function claim_unclaimed(number, payload, text)
  if text or room_bytes then return false end
  local arrived, expires, size, priority = unpack_bytes(HEADER, payload)
  if expires == 0 and arrived > oldest or expires > now then
    text = pack(STATES, 1, 0, size, now, 0, arrived, expires, priority, 0)
    add_claim(number, payload, text, 1)
    return true
  end
  return false
end

-- Claims messages without a group, in this order, as far as there is room. Returns how many of them the
-- caller must take out of the order, and true if there was no room for the next.
local function claim_listed(numbers)
  local payloads = get_many('HMGET', MESSAGES, numbers)
  local texts = get_many('HMGET', STATE, numbers)
  local taken, is_full = 0, false
  for place, number in ipairs(numbers) do
    if not claim_unclaimed(number, payloads[place], texts[place]) then
      local s = state_from(texts[place], payloads[place])
      if not is_expired(s) and not is_dead(s) and not fits(s) then
        is_full = true
        break
      end
      if can_claim(number, s) then claim_message(number, payloads[place], s) end
    end
    taken = place
  end
  return taken, is_full
end

-- Takes messages without a group, in order, while there are none with one. True if there may be more.
local function take_plain(most)
  local numbers = call('ZRANGEBYSCORE', QUEUED, '-inf', '(' .. digits(DELAYED), 'LIMIT', 0, most)
  if #numbers == 0 then return false end
  local taken, is_full = claim_listed(numbers)
  -- With taken = 0 the range would end at rank -1, which means all messages.
  if taken > 0 then call('ZREMRANGEBYRANK', QUEUED, 0, taken - 1) end
  return not is_full
end

local function is_noisy(line)
  local held = tonumber(call('HGET', GROUPS, line) or 0)
  return held >= NOISY_IN_FLIGHT_MIN and held * NOISY_SHARE > in_flight
end

-- The next message of a standard queue with groups: the first of the highest priority, but one of a
-- noisy group only if no other has a message of that priority. Of the priorities whose scores begin
-- at `from` or later. Returns its number, and where the scores of the next priority begin.
local function choose(from)
  local plain = call('ZRANGEBYSCORE', QUEUED, from, '(' .. digits(DELAYED), 'WITHSCORES', 'LIMIT', 0, 1)
  local plain_score = tonumber(plain[2])
  local heads = call('ZRANGEBYSCORE', HEADS, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 10)
  local first_score = math.min(plain_score or DELAYED, tonumber(heads[2]) or DELAYED)
  if first_score == DELAYED then return nil end
  local band = floor(first_score / BAND)
  local next_band = (band + 1) * BAND
  if plain_score and plain_score >= next_band then plain_score = nil end
  local noisy = nil
  for place = 1, #heads, 2 do
    local score = tonumber(heads[place + 1])
    if score >= next_band or (plain_score and plain_score < score) then break end
    if not is_noisy(heads[place]) then return digits(score % BAND), next_band end
    noisy = noisy or score
  end
  if plain_score then return plain[1], next_band end
  return digits(noisy % BAND), next_band
end

-- By age. The functions are made only if some message, in whatever state, has the queue's priority age.
local take_aged, choose_aged = nil, nil
if aged and (call('ZCOUNT', ARRIVALS, '-inf', aged) > 0 or call('EXISTS', OVERDUE) == 1) then
  local function has_age(number, arrived)
    return tonumber(arrived or call('ZSCORE', OVERDUE, number)) <= aged
  end

  -- The first messages of each priority, at most so many, in the order of arrival, which is that of
  -- numbers: those without a group that have the age.
  local function aged_numbers(most)
    local found, from = {}, 0
    while true do
      local first = call('ZRANGEBYSCORE', QUEUED, from, '(' .. digits(DELAYED), 'WITHSCORES', 'LIMIT', 0, 1)[2]
      if not first then break end
      from = (floor(tonumber(first) / BAND) + 1) * BAND
      local numbers = call('ZRANGEBYSCORE', QUEUED, first, '(' .. digits(from), 'LIMIT', 0, most)
      for place = 1, #numbers do found[#found + 1] = tonumber(numbers[place]) end
    end
    table.sort(found)
    local numbers, aged_ones = {}, {}
    for place = 1, math.min(most, #found) do numbers[place] = digits(found[place]) end
    local arrivals = get_many('ZMSCORE', ARRIVALS, numbers)
    for place, number in ipairs(numbers) do
      if not has_age(number, arrivals[place]) then break end
      aged_ones[place] = number
    end
    return aged_ones
  end

  -- The same as `take_plain` for messages of the age, a part at a time; nil if there are none.
  function take_aged(most)
    local numbers = aged_numbers(math.min(most, CHUNK))
    if #numbers == 0 then return nil end
    local taken, is_full = claim_listed(numbers)
    for later = #numbers, taken + 1, -1 do numbers[later] = nil end
    call_many('ZREM', QUEUED, numbers)
    return not is_full
  end

  -- The same as `choose` for messages of the age: of the first messages of all priorities, the one that
  -- arrived first; nil if it is too young, because so are the others then.
  function choose_aged()
    local oldest = nil
    local number, from = choose(0)
    while number do
      if not oldest or tonumber(number) < tonumber(oldest) then oldest = number end
      number, from = choose(from)
    end
    return oldest and has_age(oldest, call('ZSCORE', ARRIVALS, oldest)) and oldest or nil
  end
end

local function take_one(number)
  if not number then return false end
  local payload = call('HGET', MESSAGES, number)
  local s = state_from(call('HGET', STATE, number), payload)
  if not is_expired(s) and not is_dead(s) and not fits(s) then return false end
  leave_order(number, s)
  if can_claim(number, s) then claim_message(number, payload, s) end
  return true
end

-- Takes as many messages as it may from the first open group. True if there may be more.
local function take_group(most)
  local head = call('ZRANGE', HEADS, 0, 0)[1]
  if not head then return false end
  local group = sub(head, 13)
  for _, member in ipairs(first_of(group, most)) do
    local number = number_in(member)
    if not call('ZSCORE', GROUPED, number) then break end
    local payload = call('HGET', MESSAGES, number)
    local s = state_from(call('HGET', STATE, number), payload)
    if not is_expired(s) and not is_dead(s) and not fits(s) then return false end
    call('ZREM', GROUPED, number)
    if can_claim(number, s) then claim_message(number, payload, s) end
  end
  touched[group] = nil
  relist(group)
  return true
end

local function take(most)
  while claims < most and skipped < SKIPPED_MAX do
    local left, may_have_more = most - claims, nil
    if q.fifo then
      may_have_more = take_group(left)
    elseif call('ZCARD', HEADS) > 0 then
      may_have_more = take_one(choose_aged and choose_aged() or choose(0))
    else
      if take_aged then may_have_more = take_aged(left) end
      if may_have_more == nil then may_have_more = take_plain(left) end
    end
    if not may_have_more then break end
  end
  call_many('HSET', STATE, states)
  call_many('ZADD', UNACKED, deadlines)
  if claims > 0 then note_due(deadline) end
  if attempt ~= '' and claims > 0 then
    store_id(ATTEMPTS, ATTEMPT_ORDER, attempt, table.concat(given, ','), ATTEMPT_WINDOW_MS, ATTEMPTS_MAX)
  end
end

-- Returns the claims of an earlier pull of this attempt: true if all of them are valid.
local function repeat_attempt(text)
  local found = {}
  results[4], results[5] = 'again', nil
  for number, epoch in string.gmatch(text, '(%d+):(%d+)') do
    local kept, until_ms = call('HGET', STATE, number), tonumber(call('ZSCORE', UNACKED, number))
    local s = kept and read_state(kept)
    if not s or s.epoch ~= tonumber(epoch) or not until_ms then return false end
    if ARGV[10] == '1' then until_ms = deadline end
    found[#found + 1] = {number, s, until_ms}
  end
  for _, each in ipairs(found) do
    if ARGV[10] == '1' then
      call('ZADD', UNACKED, deadline, each[1])
      note_due(deadline)
      note('Extended', each[1], each[2].epoch, 'deadline_ms=' .. digits(deadline))
    end
    local at = #results
    results[at + 1], results[at + 2] = each[1], call('HGET', MESSAGES, each[1])
    results[at + 3], results[at + 4] = state_text(each[2]), digits(each[3])
  end
  return true
end

-- How many messages this pull may take: those that are kept for woken waiters do not count.
local function allowed()
  if q.paused then return 0 end
  local most = limit
  if q.in_flight_max then most = math.min(most, q.in_flight_max - in_flight) end
  if waiter == '' and call('ZCARD', WOKEN) > 0 then
    local kept_for = call('ZCOUNT', WOKEN, redis_s() - WOKEN_S, '+inf')
    if kept_for > 0 then most = math.min(most, pullable() - kept_for) end
  end
  return most
end

local function join_waiters()
  if waiter == '' then
    waiter = format('%016.0f', call('HINCRBY', META, 'tickets', 1)) .. ':' .. address
  end
  call('ZADD', WAITERS, tonumber(sub(waiter, 1, 16)), waiter)
  call('ZADD', ALIVE, redis_s() + ALIVE_S, waiter)
  results[4], results[5], results[6], results[7] = 'waits', waiter, wait_ms, digits(next_due() or 0)
end

if waiter ~= '' then remove_waiter(waiter) end
local earlier = attempt ~= '' and find_id(ATTEMPTS, attempt, ATTEMPT_WINDOW_MS)
local can_wait = wait_ms > 0 and address ~= '' and not is_last
if earlier then
  if not repeat_attempt(earlier) then results[4] = 'lapsed' end
else
  local most = allowed()
  if most > 0 then take(most) end
  if claims == 0 then
    if can_wait then
      join_waiters()
    elseif q.in_flight_max and in_flight >= q.in_flight_max and not is_last then
      results[4], results[5], results[6] = 'full', in_flight, digits(q.in_flight_max)
    end
  end
end
results[3] = close()
return results
