-- The load for every server alike: `wrk … -s sqs_wrk.lua URL -- PROTOCOL WORK BATCH QUEUE_URL BYTES`.
--
-- PROTOCOL  json, or query for a server that knows no other
-- WORK      send, or receive: what is received is deleted by the next request
-- BATCH     how many messages a call; 1 uses the actions for one message
--
-- At the end one line of JSON says what happened; whether it may be believed is for others to judge.

local AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/sqs/aws4_request, "
  .. "SignedHeaders=content-type;host;x-amz-date;x-amz-target, Signature=" .. string.rep("0", 64)

local protocol, work, batch, queue_url
local send, receive
local claimed = {}
local seen = {}
-- Read by `done` from the thread, and so globals. Of `asked` messages the delete was sent, whether or
-- not it was answered; `receives` answers had `received` messages in them.
asked, receives, received, doubled, refused = 0, 0, 0, 0, 0

local the_thread
function setup(thread) the_thread = thread end

local function escaped(text)
  return (text:gsub("[^%w%-_.~]", function(c) return ("%%%02X"):format(c:byte()) end))
end

local function json(action, rest)
  return wrk.format("POST", "/", {
    ["Host"] = wrk.host .. ":" .. wrk.port,
    ["Content-Type"] = "application/x-amz-json-1.0",
    ["X-Amz-Target"] = "AmazonSQS." .. action,
    ["X-Amz-Date"] = "20260101T000000Z",
    ["Authorization"] = AUTHORIZATION,
  }, '{"QueueUrl":"' .. queue_url .. '",' .. rest .. "}")
end

local function query(action, rest)
  return wrk.format("POST", queue_url:match("^%w+://[^/]+(/.*)$"), {
    ["Host"] = wrk.host .. ":" .. wrk.port,
    ["Content-Type"] = "application/x-www-form-urlencoded",
    ["X-Amz-Date"] = "20260101T000000Z",
    ["Authorization"] = AUTHORIZATION,
  }, "Action=" .. action .. "&Version=2012-11-05" .. rest)
end

-- The parts of a batch, each made from its number, with what stands between them.
local function each(count, between, part)
  local parts = {}
  for n = 1, count do parts[n] = part(n) end
  return table.concat(parts, between)
end

local makers = {
  json = {
    send = function(body)
      if batch == 1 then return json("SendMessage", '"MessageBody":"' .. body .. '"') end
      return json("SendMessageBatch", '"Entries":[' .. each(batch, ",", function(n)
        return '{"Id":"' .. n .. '","MessageBody":"' .. body .. '"}'
      end) .. "]")
    end,
    receive = function() return json("ReceiveMessage", '"MaxNumberOfMessages":' .. batch) end,
    delete = function(receipts)
      if batch == 1 then return json("DeleteMessage", '"ReceiptHandle":"' .. receipts[1] .. '"') end
      return json("DeleteMessageBatch", '"Entries":[' .. each(#receipts, ",", function(n)
        return '{"Id":"' .. n .. '","ReceiptHandle":"' .. receipts[n] .. '"}'
      end) .. "]")
    end,
    receipt = '"ReceiptHandle":%s*"([^"]*)"',
    id = '"MessageId":%s*"([^"]*)"',
    failed = '"Failed":%s*%[%s*{',
  },
  query = {
    send = function(body)
      if batch == 1 then return query("SendMessage", "&MessageBody=" .. body) end
      return query("SendMessageBatch", each(batch, "", function(n)
        local entry = "&SendMessageBatchRequestEntry." .. n
        return entry .. ".Id=" .. n .. entry .. ".MessageBody=" .. body
      end))
    end,
    receive = function() return query("ReceiveMessage", "&MaxNumberOfMessages=" .. batch) end,
    delete = function(receipts)
      if batch == 1 then
        return query("DeleteMessage", "&ReceiptHandle=" .. escaped(receipts[1]))
      end
      return query("DeleteMessageBatch", each(#receipts, "", function(n)
        local entry = "&DeleteMessageBatchRequestEntry." .. n
        return entry .. ".Id=" .. n .. entry .. ".ReceiptHandle=" .. escaped(receipts[n])
      end))
    end,
    receipt = "<ReceiptHandle>([^<]*)<",
    id = "<MessageId>([^<]*)<",
    failed = "<BatchResultErrorEntry>",
  },
}

local speech

function init(args)
  protocol, work, batch, queue_url = args[1], args[2], tonumber(args[3]), args[4]
  speech = makers[protocol]
  send = speech.send(string.rep("x", tonumber(args[5])))
  receive = speech.receive()
  if work == "send" then
    -- One fixed request: reading answers would only slow the load down, unless they may hide errors.
    request = function() return send end
    if batch == 1 then response = nil end
  end
end

function request()
  local receipts = table.remove(claimed)
  if receipts == nil then return receive end
  asked = asked + #receipts
  return speech.delete(receipts)
end

function response(status, headers, body)
  if status ~= 200 then return end
  if body:find(speech.failed) then refused = refused + 1 end
  if work == "send" then return end
  local receipts = {}
  for receipt in body:gmatch(speech.receipt) do receipts[#receipts + 1] = receipt end
  if #receipts == 0 then return end
  claimed[#claimed + 1] = receipts
  receives = receives + 1
  received = received + #receipts
  for id in body:gmatch(speech.id) do
    if seen[id] then doubled = doubled + 1 end
    seen[id] = true
  end
end

function done(summary, latency, requests)
  local errors = summary.errors
  local figures = {
    requests = summary.requests,
    took_us = summary.duration,
    broken = errors.connect + errors.read + errors.write + errors.timeout,
    status = errors.status,
    p50_us = latency:percentile(50),
    p99_us = latency:percentile(99),
  }
  for _, name in ipairs { "asked", "receives", "received", "doubled", "refused" } do
    figures[name] = the_thread:get(name)
  end
  local parts = {}
  for name, value in pairs(figures) do parts[#parts + 1] = ('"%s":%d'):format(name, value) end
  io.write("{" .. table.concat(parts, ",") .. "}\n")
end
