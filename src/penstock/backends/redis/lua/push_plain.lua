-- The fast path of push.lua, which runs before it: one message without a group, a dedup id, a delay
-- or a ttl, on a queue without limits or history, on which nothing is due, waits or is owed. It does
-- the same as push.lua, in a third of the time, because most of that is spent on making the
-- functions of queue.lua. In every other case it changes nothing, and push.lua continues.
--
-- ARGV 4: the message, as in push.lua. 5: the queue number whose settings allow this, if any do.
-- 6: that queue's retention_ms. Reply: the message's NUMBER.

if ARGV[5] and ARGV[2] == '0' then
  local call, digits = redis.call, '%.0f'
  local m = call('HMGET', KEYS[1], 'number', 'version', 'next', 'bytes', 'last', 'offset', 'due')
  if m[1] and m[1] .. ':' .. m[2] == ARGV[5] then
    local now = tonumber(ARGV[1])
    if not now then
      local time = call('TIME')
      now = time[1] * 1000 + math.floor(time[2] / 1000)
    end
    now = now + m[6]
    local due = tonumber(m[7])
    if now >= tonumber(m[5]) and now < due and call('EXISTS', KEYS[19], KEYS[18]) == 0 then
      local format, number, number_digits = string.format, tonumber(m[3]), m[3]
      local size, priority = struct.unpack('>I4B', ARGV[4])
      local now_digits, expires = format(digits, now), now + ARGV[6]
      call('HSET', KEYS[2], number_digits,
        struct.pack('>ddI4BI2I2', now, 0, size, priority, 0, 0) .. string.sub(ARGV[4], 30))
      call('ZADD', KEYS[4], format(digits, (9 - priority) * 281474976710656 + number), number_digits)
      call('ZADD', KEYS[10], now_digits, number_digits)
      call('HSET', KEYS[1], 'next', format(digits, number + 1), 'bytes', format(digits, m[4] + size),
        'last', now_digits, 'due', expires < due and format(digits, expires) or m[7])
      return number
    end
  end
end
