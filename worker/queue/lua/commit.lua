-- commit: publish one batch of a claim, whole or not at all: labels, dead letters, metrics, acknowledgement.
--
-- KEYS  1 claim (hash)  2 leases (zset)  3 commits (zset)  4 results (stream)  5 metrics (stream)  6 dead (stream)
--       7 published (zset)  8 attempts (hash)  9 totals (hash)  10 waiting (list)
-- ARGV  1 claim id  2 commit id  3 window in ms  4-6 most entries of results, metrics, dead (0: all)
--       7 the batch, MessagePack: {labels = {{index, id or false, fields}}, dead = {{index, fields}}, retry = {index, ...},
--         report = fields, totals = {name, number, ...}}
--       8-9 most age in ms of results, metrics (0: any)
-- Gives {'OK', published, duplicates, depth}, {'ALREADY'} if this very commit was done before and its reply was lost,
-- or {'FENCED'} if the claim was taken over: then nothing was written.

local REMEMBER_COMMITS_MS = 3600 * 1000

expect(KEYS[1], 'hash')
expect(KEYS[2], 'zset')
expect(KEYS[3], 'zset')
expect(KEYS[4], 'stream')
expect(KEYS[5], 'stream')
expect(KEYS[6], 'stream')
expect(KEYS[7], 'zset')
expect(KEYS[8], 'hash')
expect(KEYS[9], 'hash')
expect(KEYS[10], 'list')

if redis.call('ZSCORE', KEYS[3], ARGV[2]) then return {'ALREADY'} end
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {'FENCED'} end

local batch, now = cmsgpack.unpack(ARGV[7]), now_ms()
local indexes, payloads = {}, {}
for _, entry in ipairs(batch.labels) do indexes[#indexes + 1] = entry[1] end
for _, entry in ipairs(batch.dead) do indexes[#indexes + 1] = entry[1] end
local done = #indexes -- the indexes beyond are to be tried again
for _, index in ipairs(batch.retry) do indexes[#indexes + 1] = index end

-- One command for many tickets: a command takes about as long as what it does for one.
local function in_chunks(act)
  for first = 1, #indexes, CHUNK do act(first, math.min(#indexes, first + CHUNK - 1)) end
end
in_chunks(function(first, last)
  for i, payload in ipairs(redis.call('HMGET', KEYS[1], unpack(indexes, first, last))) do
    local index = indexes[first + i - 1]
    if not payload then error('claim ' .. ARGV[1] .. ' does not owe index ' .. index) end
    payloads[index] = payload
  end
end)

-- Writing begins here, with what frees memory.
local any_counts = redis.call('EXISTS', KEYS[8]) == 1
in_chunks(function(first, last) redis.call('HDEL', KEYS[1], unpack(indexes, first, last)) end)
for i = 1, any_counts and done or 0 do
  redis.call('HDEL', KEYS[8], counters_of(payloads[indexes[i]]))
end
-- What an error was raised over goes to the end, so that the others go first, and keeps its count of crashes.
for _, index in ipairs(batch.retry) do
  local _, errors = counters_of(payloads[index])
  redis.call('HINCRBY', KEYS[8], errors, 1)
  redis.call('RPUSH', KEYS[10], payloads[index])
end
redis.call('ZREMRANGEBYSCORE', KEYS[7], '-inf', now - tonumber(ARGV[3]))
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - REMEMBER_COMMITS_MS)
trim_to_age(KEYS[4], now, ARGV[8])
trim_to_age(KEYS[5], now, ARGV[9])
redis.call('ZADD', KEYS[3], string.format('%.0f', now), ARGV[2])

local published, duplicates, now_text = 0, 0, string.format('%.0f', now)
for _, entry in ipairs(batch.labels) do
  local id = entry[2]
  if id and redis.call('ZADD', KEYS[7], 'NX', now_text, id) == 0 then
    duplicates = duplicates + 1
  else
    append(KEYS[4], ARGV[4], entry[3])
    published = published + 1
  end
end

for _, entry in ipairs(batch.dead) do
  local fields = entry[2]
  fields[#fields + 1] = 'payload'
  fields[#fields + 1] = payloads[entry[1]]
  append(KEYS[6], ARGV[6], fields)
end

if redis.call('HLEN', KEYS[1]) == 0 then redis.call('ZREM', KEYS[2], ARGV[1]) end

for i = 1, #batch.totals, 2 do
  redis.call('HINCRBY', KEYS[9], batch.totals[i], batch.totals[i + 1])
end
local report, depth = batch.report, redis.call('LLEN', KEYS[10])
local function tell(name, value)
  report[#report + 1] = name
  report[#report + 1] = value
end
tell('published', published)
tell('duplicates', duplicates)
tell('depth', depth)
-- Our producer writes the push time as a ticket's last field, outside of any text a customer can write.
local head = redis.call('LINDEX', KEYS[10], 0)
local pushed_at = head and string.match(string.sub(head, -40), '"pushed_at_ms":(%d+)}$')
if pushed_at then tell('oldest_age_ms', string.format('%.0f', math.max(0, now - pushed_at))) end
tell('total_published', redis.call('HINCRBY', KEYS[9], 'published', published))
tell('total_duplicates', redis.call('HINCRBY', KEYS[9], 'duplicates', duplicates))
tell('total_dead', redis.call('HINCRBY', KEYS[9], 'dead', #batch.dead))
tell('total_batches', redis.call('HINCRBY', KEYS[9], 'batches', 1))
append(KEYS[5], ARGV[5], report)

return {'OK', published, duplicates, depth}
