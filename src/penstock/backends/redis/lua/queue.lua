-- What every script of a queue shares: the keys, the clock, and the changes of a message's state.
--
-- KEYS, all of one queue NAME. They have the hash tag {NAME}, so a Redis Cluster keeps them in one
-- slot. NUMBER is a message's number in this queue, in decimal digits; it is given once.
--
--  1 meta      hash    the queue: number, secret, settings (JSON), the settings that scripts need,
--                      version, counters (see COUNTERS), departures, tickets, keeper and timer (the
--                      waiter whose process has the timer, and for when)
--  2 messages  hash    NUMBER -> header and content; never changed while the message is here
--  3 state     hash    NUMBER -> epoch and so on, of messages that were claimed, delayed or moved
--  4 queued    zset    NUMBER by score: (9 - priority) * 2^48 + NUMBER if it can be pulled;
--                      10 * 2^48 + the millisecond at which it is due if it is delayed
--  5 grouped   zset    NUMBER by the same score: messages with a group that are visible
--  6 lines     zset    standard: PRIORITY GROUP \0 NUMBER (hex) of the visible messages with a group;
--                      FIFO: GROUP \0 NUMBER (hex) of all messages. All scores are 0
--  7 heads     zset    standard: PRIORITY GROUP by the score of its first visible message;
--                      FIFO: NUMBER (hex) GROUP of open groups, by when the first became available
--  8 groups    hash    standard: PRIORITY GROUP -> how many are in flight;
--                      FIFO: GROUP -> the member of heads under which it is listed
--  9 unacked   zset    NUMBER of messages in flight, by the millisecond of their deadline
-- 10 arrivals  zset    NUMBER by the millisecond of arrival, until the queue's retention is over
-- 11 overdue   zset    the same after that: messages in flight, or with a TTL of their own
-- 12 expiries  zset    NUMBER of messages with a TTL of their own, by the millisecond of its end
-- 13 dedups    hash    dedup id -> millisecond and NUMBER of the message that an earlier push made
-- 14 dedup_order    list    millisecond and dedup id, oldest first
-- 15 attempts       hash    attempt id -> millisecond and the NUMBER:epoch of its claims
-- 16 attempt_order  list    millisecond and attempt id, oldest first
-- 17 outbox    hash    NUMBER of a message that has left for another queue -> that queue, dead or not
-- 18 owed      zset    the same NUMBERs, in order of departure
-- 19 waiters   zset    WAITER (ticket:process:number) by ticket: pulls that wait, first come first
-- 20 woken     zset    WAITER by the second at which it was woken
-- 21 alive     zset    every WAITER of both, by the second until which its process has renewed it
-- 22 history   stream  what happened to messages, if the client asked to keep that
--
-- ARGV of every script: 1 the time in milliseconds, or "" for that of Redis; 2 how many entries of
-- history to keep, or 0; 3 the beginning of the names of wake-up channels; then its own.
--
-- "queue number" in a reply is the queue's number and the version of its settings, with a colon
-- between. Every script replies false if there is no such queue.

local META, MESSAGES, STATE, QUEUED, GROUPED = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local LINES, HEADS, GROUPS, UNACKED, ARRIVALS = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local OVERDUE, EXPIRIES, DEDUPS, DEDUP_ORDER = KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local ATTEMPTS, ATTEMPT_ORDER, OUTBOX, OWED = KEYS[15], KEYS[16], KEYS[17], KEYS[18]
local WAITERS, WOKEN, ALIVE, HISTORY = KEYS[19], KEYS[20], KEYS[21], KEYS[22]

local call = redis.call
local format, sub, find = string.format, string.sub, string.find
local pack, unpack_bytes = struct.pack, struct.unpack
local floor = math.floor

local BAND = 281474976710656
local DELAYED = 10 * BAND
local NEVER = BAND
local SETTLE_MAX = 500
local CHUNK = 1000
local NOISY_IN_FLIGHT_MIN, NOISY_SHARE = 30, 10
local DEDUP_WINDOW_MS, DEDUPS_MAX = 300000, 10000000
-- How long, in seconds, a waiter counts without being renewed, and a message is kept for a woken one.
local ALIVE_S, WOKEN_S = 15, 1
-- arrived_at_ms, expires_at_ms (0: by retention), size, priority, lengths of group and source
local HEADER = '>ddI4BI2I2'
-- What changes with every push is one field, because each field costs a push more than its bytes: next
-- (NUMBER to give), bytes (stored), last and offset (clock), due (nothing is due before), busy (1 if
-- pulls may wait or messages are owed, and push_plain.lua must not be used); then the queue number.
local COUNTERS = '>dddddB'
-- epoch, epoch on arrival, size, first claimed, came back, arrived, expires, priority, kept
local STATES = '>I4I4I4ddddBB'

local q = {}
local now, history_max = 0, tonumber(ARGV[2])
local touched = {}
local has_more = false

local function digits(number) return format('%.0f', number) end

local function redis_ms()
  local time = call('TIME')
  return time[1] * 1000 + floor(time[2] / 1000)
end

local function redis_s() return tonumber(call('TIME')[1]) end

-- Reads the queue and the clock; false if there is no such queue. Time never runs backwards: if the
-- clock was set back, time continues from the last instant stored in meta.
local function open()
  local m = call('HMGET', META, 'number', 'version', 'counters', 'retention_ms', 'fifo', 'dead_letter',
    'max_receives', 'in_flight_max', 'paused')
  if not m[1] then return false end
  q.number, q.identity = m[1], m[1] .. ':' .. m[2]
  if m[3] then
    q.next, q.bytes, q.last, q.offset, q.due = unpack_bytes(COUNTERS, m[3])
  else
    -- Stored by an earlier version, which had a field for each; the end of a script packs them.
    local old = call('HMGET', META, 'next', 'bytes', 'last', 'offset', 'due')
    q.next, q.bytes, q.last = tonumber(old[1]), tonumber(old[2]), tonumber(old[3])
    q.offset, q.due = tonumber(old[4]), tonumber(old[5])
  end
  q.retention_ms, q.fifo, q.dead_letter = tonumber(m[4]), m[5] == '1', m[6]
  q.max_receives, q.in_flight_max, q.paused = tonumber(m[7]), tonumber(m[8]), m[9] == '1'
  local raw = ARGV[1] == '' and redis_ms() or tonumber(ARGV[1])
  now = raw + q.offset
  if now < q.last then
    q.offset = q.last - raw
    now = q.last
  end
  return true
end

local function keep_counters(busy)
  call('HSET', META, 'counters',
    pack(COUNTERS, q.next, q.bytes, now, q.offset, q.due, busy and 1 or 0) .. q.identity)
end

local function note(kind, number, epoch, detail)
  if history_max > 0 then
    call('XADD', HISTORY, 'MAXLEN', '~', history_max, '*', 'at', digits(now), 'kind', kind,
      'number', number, 'epoch', epoch or '', 'detail', detail or '')
  end
end

-- Calls a command with many members, a thousand at a time: Lua's stack takes no more than 8,000.
local function call_many(command, key, members)
  local total = 0
  for first = 1, #members, CHUNK do
    local reply = call(command, key, unpack(members, first, math.min(first + CHUNK - 1, #members)))
    if type(reply) == 'number' then total = total + reply end
  end
  return total
end

local function get_many(command, key, members)
  if #members <= CHUNK then
    if #members == 0 then return {} end
    return call(command, key, unpack(members))
  end
  local values = {}
  for first = 1, #members, CHUNK do
    local part = call(command, key, unpack(members, first, math.min(first + CHUNK - 1, #members)))
    for place = 1, #part do values[first + place - 1] = part[place] end
  end
  return values
end

local function score_of(priority, number) return (9 - priority) * BAND + tonumber(number) end

-- The state of a message.

local function new_state(payload)
  local arrived, expires, size, priority, group_bytes, _, at = unpack_bytes(HEADER, payload)
  return {
    epoch = 0, arrival_epoch = 0, size = size, first = 0, back = 0, arrived = arrived,
    expires = expires, priority = priority, kept = 0,
    group = group_bytes > 0 and sub(payload, at, at + group_bytes - 1) or nil,
  }
end

local function read_state(text)
  local s, at = {}, nil
  s.epoch, s.arrival_epoch, s.size, s.first, s.back, s.arrived, s.expires, s.priority, s.kept, at =
    unpack_bytes(STATES, text)
  if #text >= at then s.group = sub(text, at) end
  return s
end

local function state_text(s)
  local text = pack(STATES, s.epoch, s.arrival_epoch, s.size, s.first, s.back, s.arrived, s.expires,
    s.priority, s.kept)
  return s.group and text .. s.group or text
end

-- The state of a message that is here, or nil if it is gone.
local function state_of(number)
  local text = call('HGET', STATE, number)
  if text then return read_state(text) end
  local payload = call('HGET', MESSAGES, number)
  return payload and new_state(payload) or nil
end

local function keep_state(number, s) call('HSET', STATE, number, state_text(s)) end

local function is_expired(s)
  return (s.expires > 0 and s.expires or s.arrived + q.retention_ms) <= now
end

-- Whether a message was claimed as often as it may be. One that came back because its dead-letter
-- queue is missing is kept until its next claim ends.
local function is_dead(s)
  return q.max_receives and s.kept == 0 and s.epoch - s.arrival_epoch >= q.max_receives
end

-- The order: which message is next.

local function line_of(s) return q.fifo and s.group or s.priority .. s.group end

local function line_member(line, number) return line .. '\0' .. format('%012x', number) end

-- The first of a line, as the member of lines; nil if there is none.
local function first_of(line, limit)
  local found = call('ZRANGEBYLEX', LINES, '[' .. line .. '\0', '(' .. line .. '\1',
    'LIMIT', 0, limit or 1)
  if limit then return found end
  return found[1]
end

local function number_in(member) return digits(tonumber(sub(member, -12), 16)) end

-- FIFO: lists the group as open if its first message is visible, and no longer if it is not.
local function relist(group)
  local first, member, turn = first_of(group), nil, nil
  if first then
    local number = number_in(first)
    if call('ZSCORE', GROUPED, number) then
      local text = call('HGET', STATE, number)
      local s = text and read_state(text)
      if s and s.back > 0 then
        turn = s.back * 2 + 1
      else
        turn = 2 * (s and s.arrived or tonumber(
          call('ZSCORE', ARRIVALS, number) or call('ZSCORE', OVERDUE, number) or 0))
      end
      member = sub(first, -12) .. group
    end
  end
  local listed = call('HGET', GROUPS, group)
  if listed and listed ~= member then call('ZREM', HEADS, listed) end
  if member then
    call('ZADD', HEADS, turn, member)
    if listed ~= member then call('HSET', GROUPS, group, member) end
  elseif listed then
    call('HDEL', GROUPS, group)
  end
end

local function relist_touched()
  for group in pairs(touched) do relist(group) end
  touched = {}
end

-- Puts a message in its place among the visible ones.
local function join_order(number, s)
  local score = score_of(s.priority, number)
  if not s.group then
    call('ZADD', QUEUED, score, number)
    return
  end
  call('ZADD', GROUPED, score, number)
  local line = line_of(s)
  if q.fifo then
    touched[line] = true
    return
  end
  call('ZADD', LINES, 0, line_member(line, number))
  local head = call('ZSCORE', HEADS, line)
  if not head or score < tonumber(head) then call('ZADD', HEADS, score, line) end
end

-- Standard queue: lists a line under its first visible message.
local function list_line(line)
  local first = first_of(line)
  if first then
    call('ZADD', HEADS, score_of(tonumber(sub(line, 1, 1)), number_in(first)), line)
  else
    call('ZREM', HEADS, line)
  end
end

-- Takes a message out of its place, visible or delayed. In a FIFO queue it stays in its line.
local function leave_order(number, s)
  if call('ZREM', QUEUED, number) == 0 and call('ZREM', GROUPED, number) == 1 and not q.fifo then
    local line = line_of(s)
    call('ZREM', LINES, line_member(line, number))
    list_line(line)
  end
  if q.fifo then touched[s.group] = true end
end

-- Notes that something is due then: before the earliest of these instants, settle does nothing.
local function note_due(at)
  if at < q.due then q.due = at end
end

local function hide(number, until_ms)
  call('ZADD', QUEUED, DELAYED + until_ms, number)
  note_due(until_ms)
end

-- How many messages could be pulled now; of a FIFO queue, how many groups; none of a paused queue.
local function pullable()
  if q.paused then return 0 end
  if q.fifo then return call('ZCARD', HEADS) end
  return call('ZCOUNT', QUEUED, '-inf', '(' .. digits(DELAYED)) + call('ZCARD', GROUPED)
end

-- Changes of a message's state.

local function remove_times(number)
  call('ZREM', ARRIVALS, number)
  call('ZREM', OVERDUE, number)
  call('ZREM', EXPIRIES, number)
end

local function leave_line(number, s)
  if q.fifo then
    call('ZREM', LINES, line_member(s.group, number))
    touched[s.group] = true
  end
end

-- Ends a message that is no longer in the order nor in flight.
local function drop(number, s)
  call('HDEL', MESSAGES, number)
  call('HDEL', STATE, number)
  remove_times(number)
  leave_line(number, s)
  q.bytes = q.bytes - s.size
end

-- Puts a message that is in no other place into the outbox.
local function depart(number, s, to, dead)
  remove_times(number)
  leave_line(number, s)
  q.bytes = q.bytes - s.size
  keep_state(number, s)
  call('HSET', OUTBOX, number, (dead and '1' or '0') .. to)
  call('ZADD', OWED, call('HINCRBY', META, 'departures', 1), number)
  note('Moved', number, nil, 'to=' .. to)
end

local function count_in_flight(s, change)
  if s.group and not q.fifo then
    local line = line_of(s)
    if call('HINCRBY', GROUPS, line, change) <= 0 then call('HDEL', GROUPS, line) end
  end
end

-- Ends a claim: its message expires, is dead-lettered, is delayed or comes back.
local function end_claim(number, s, delay_ms)
  call('ZREM', UNACKED, number)
  count_in_flight(s, -1)
  if is_expired(s) then
    note('Expired', number)
    drop(number, s)
  elseif is_dead(s) then
    depart(number, s, q.dead_letter, true)
  elseif delay_ms > 0 then
    keep_state(number, s)
    hide(number, now + delay_ms)
    if q.fifo then touched[s.group] = true end
  else
    s.back = now
    keep_state(number, s)
    join_order(number, s)
  end
end

-- Settles what is due, a limited number of messages of each kind, and notes what is due next. The
-- functions are made only here, because in most calls nothing is due.
local function settle_due(most)
  local function settle_claims(limit)
    local found = call('ZRANGEBYSCORE', UNACKED, '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
    local due, deadline = {}, {}
    for place = 1, #found, 2 do
      due[#due + 1] = found[place]
      deadline[found[place]] = tonumber(found[place + 1])
    end
    -- Redis orders members of one score as text, 10 before 9; messages of a group that end
    -- together as dead letters must leave in their own order.
    table.sort(due, function(one, other)
      if deadline[one] ~= deadline[other] then return deadline[one] < deadline[other] end
      return tonumber(one) < tonumber(other)
    end)
    for _, number in ipairs(due) do
      local s = state_of(number)
      note('ClaimExpired', number, s.epoch)
      end_claim(number, s, 0)
    end
    return #due
  end

  local function settle_delays(limit)
    local due = call('ZRANGEBYSCORE', QUEUED, DELAYED, DELAYED + now, 'LIMIT', 0, limit)
    for _, number in ipairs(due) do
      local s = state_of(number)
      call('ZREM', QUEUED, number)
      if s.epoch > s.arrival_epoch then
        s.back = now
        keep_state(number, s)
      elseif s.epoch == 0 then
        call('HDEL', STATE, number)
      end
      join_order(number, s)
    end
    return #due
  end

  local function settle_expiries(limit)
    local due = call('ZRANGEBYSCORE', EXPIRIES, '-inf', now, 'LIMIT', 0, limit)
    for _, number in ipairs(due) do
      call('ZREM', EXPIRIES, number)
      -- A message in flight expires when its claim ends.
      if not call('ZSCORE', UNACKED, number) then
        local s = state_of(number)
        leave_order(number, s)
        note('Expired', number)
        drop(number, s)
      end
    end
    return #due
  end

  local function settle_retention(limit)
    local due = call('ZRANGEBYSCORE', ARRIVALS, '-inf', now - q.retention_ms, 'WITHSCORES',
      'LIMIT', 0, limit)
    for place = 1, #due, 2 do
      local number = due[place]
      if call('ZSCORE', UNACKED, number) or call('ZSCORE', EXPIRIES, number) then
        call('ZREM', ARRIVALS, number)
        call('ZADD', OVERDUE, due[place + 1], number)
      else
        local s = state_of(number)
        leave_order(number, s)
        note('Expired', number)
        drop(number, s)
      end
    end
    return #due / 2
  end

  local claims, delays = settle_claims(most), settle_delays(most)
  local expiries, retention = settle_expiries(most), settle_retention(most)
  has_more = claims == most or delays == most or expiries == most or retention == most
  if next(touched) then relist_touched() end
  q.due = NEVER
  for _, key in ipairs({UNACKED, EXPIRIES}) do
    note_due(tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or NEVER))
  end
  note_due(tonumber(call('ZRANGEBYSCORE', QUEUED, DELAYED, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    or DELAYED + NEVER) - DELAYED)
  note_due((call('ZRANGE', ARRIVALS, 0, 0, 'WITHSCORES')[2] or NEVER) + q.retention_ms)
end

-- The same, if anything may be due.
local function settle(limit)
  if now >= q.due then settle_due(limit and limit > SETTLE_MAX and limit or SETTLE_MAX) end
end

-- Dedup ids and attempt ids, kept for a limited time.

local function find_id(key, id, window_ms)
  local text = call('HGET', key, id)
  if not text then return nil end
  local colon = find(text, ':', 1, true)
  if tonumber(sub(text, 1, colon - 1)) + window_ms <= now then return nil end
  return sub(text, colon + 1)
end

local function store_id(key, order, id, value, window_ms, count_max)
  local at = digits(now)
  call('HSET', key, id, at .. ':' .. value)
  local count = call('RPUSH', order, at .. ':' .. id)
  -- Two old ids are examined for each new one, so that old ones do not accumulate.
  for _ = 1, 2 do
    local oldest = call('LINDEX', order, 0)
    local colon = find(oldest, ':', 1, true)
    local at_ms = sub(oldest, 1, colon - 1)
    if count <= count_max and tonumber(at_ms) + window_ms > now then break end
    call('LPOP', order)
    count = count - 1
    local old = sub(oldest, colon + 1)
    local text = call('HGET', key, old)
    if text and sub(text, 1, colon) == at_ms .. ':' then call('HDEL', key, old) end
  end
end

-- Waiting pulls.

local function process_of(waiter) return string.match(waiter, ':(.*):') end

local function publish_to(waiter, kind, text)
  return call('PUBLISH', ARGV[3] .. process_of(waiter), kind .. '\n' .. q.number .. '\n' .. text)
end

local function remove_waiter(waiter)
  call('ZREM', WAITERS, waiter)
  call('ZREM', WOKEN, waiter)
  call('ZREM', ALIVE, waiter)
end

-- When something is due next that may make a message visible; nil if nothing is.
local function next_due()
  local claim = call('ZRANGE', UNACKED, 0, 0, 'WITHSCORES')[2]
  local delay = call('ZRANGEBYSCORE', QUEUED, DELAYED, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  claim, delay = tonumber(claim), delay and tonumber(delay) - DELAYED
  if claim and delay then return math.min(claim, delay) end
  return claim or delay
end

-- Wakes as many waiters as there are messages, in the order in which they came. A waiter whose
-- process has ended, so that nothing can be published to it, is removed from the line. Returns false
-- if none waits then.
local function serve()
  if call('ZCARD', WAITERS) == 0 then return false end

  -- Publishes to the process of the first waiter when something is due, unless that was done.
  local function set_timer(woken)
    local due = next_due() or NEVER
    -- If a woken waiter does not pull its message in time, the next in line is woken.
    if woken > 0 then due = math.min(due, now + 1000 * (WOKEN_S + 1)) end
    if due == NEVER then return end
    local known = call('HMGET', META, 'keeper', 'timer')
    local timer = tonumber(known[2] or 0)
    local first = call('ZRANGE', WAITERS, 0, 0)[1]
    while first do
      if known[1] == first and timer > now and timer <= due then return end
      if publish_to(first, 'T', digits(math.max(0, due - now)) .. ':' .. first) > 0 then
        call('HSET', META, 'keeper', first, 'timer', digits(due))
        return
      end
      remove_waiter(first)
      first = call('ZRANGE', WAITERS, 0, 0)[1]
    end
  end

  local room = pullable()
  if q.in_flight_max then room = math.min(room, q.in_flight_max - call('ZCARD', UNACKED)) end
  local woken = call('ZCOUNT', WOKEN, redis_s() - WOKEN_S, '+inf')
  while woken < room do
    local first = call('ZRANGE', WAITERS, 0, 0)[1]
    if not first then return false end
    if publish_to(first, 'W', first) > 0 then
      call('ZREM', WAITERS, first)
      call('ZADD', WOKEN, redis_s(), first)
      woken = woken + 1
    else
      remove_waiter(first)
    end
  end
  set_timer(woken)
  return true
end

-- Writes the changes back, and wakes waiting pulls. Returns how many messages are in the outbox.
local function close()
  if next(touched) then relist_touched() end
  local has_waiters, owed = serve(), call('ZCARD', OWED)
  keep_counters(has_waiters or owed > 0)
  return owed
end
