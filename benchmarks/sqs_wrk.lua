-- The same load for every server: `wrk … -s sqs_wrk.lua URL -- PROTOCOL WORK BATCH QUEUE_URL BYTES`.
--
-- PROTOCOL  json, or query for a server without the JSON protocol
-- WORK      send, or receive: what is received is deleted by the next request
-- BATCH     how many messages a call; 1 uses the actions for one message
--
-- At the end it prints one line of JSON with its counts, which benchmarks/sqs_load.py checks.

local AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/sqs/aws4_request, "
  .. "SignedHeaders=content-type;host;x-amz-date;x-amz-target, Signature=" .. string.rep("0", 64)

local protocol, work, batch, queue_url
local send, receive
local claimed = {}
local seen = {}
-- Globals, because `done` reads them from the thread. For `asked` messages a delete was sent, whether
-- or not it was answered; `receives` answers had `received` messages in them.
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

-- The parts of a batch, each made from its number, joined by `between`.
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

local format

function init(args)
  protocol, work, batch, queue_url = args[1], args[2], tonumber(args[3]), args[4]
  format = makers[protocol]
  send = format.send(string.rep("x", tonumber(args[5])))
  receive = format.receive()
  if work == "send" then
    -- One fixed request. Only the answers to batches are read, because they may contain errors.
    request = function() return send end
    if batch == 1 then response = nil end
  end
end

function request()
  local receipts = table.remove(claimed)
  if receipts == nil then return receive end
  asked = asked + #receipts
  return format.delete(receipts)
end

function response(status, headers, body)
  if status ~= 200 then return end
  if body:find(format.failed) then refused = refused + 1 end
  if work == "send" then return end
  local receipts = {}
  for receipt in body:gmatch(format.receipt) do receipts[#receipts + 1] = receipt end
  if #receipts == 0 then return end
  claimed[#claimed + 1] = receipts
  receives = receives + 1
  received = received + #receipts
  for id in body:gmatch(format.id) do
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
