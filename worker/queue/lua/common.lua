-- Put in front of every verb. Only what more than one of them needs.

-- A script that fails halfway is not rolled back, so every key's type is checked before the first write.
local function expect(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then
    error('WRONGTYPE key ' .. key .. ': expected a ' .. kind .. ', found a ' .. found)
  end
end

-- Redis' own clock, in milliseconds: the workers' clocks need not agree.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A full Redis refuses a script's first write if it may grow memory, and none after a first that may not. So what is
-- to be replaced is removed first, and what is to be moved leaves its old place first.
local function set_score(key, score, member)
  redis.call('ZREM', key, member)
  redis.call('ZADD', key, string.format('%.0f', score), member)
end

-- Remember with the commits, and as long, that this claim is over: its id must never claim again.
local function retire(commits, claim_id)
  redis.call('ZADD', commits, string.format('%.0f', now_ms()), claim_id)
end

-- What a claim still owes, oldest first: {{index, payload}, ...}
local function owed_by(claim)
  local flat, owed = redis.call('HGETALL', claim), {}
  for i = 1, #flat, 2 do
    owed[#owed + 1] = {tonumber(flat[i]), flat[i + 1]}
  end
  table.sort(owed, function(a, b) return a[1] < b[1] end)
  return owed
end

-- Lua's unpack takes some 8,000 values; one push takes at most this many.
local CHUNK = 4000

-- Put payloads back at the head of the list, the first of them foremost.
local function push_to_head(list, payloads)
  for last = #payloads, 1, -CHUNK do
    local reversed = {}
    for i = last, math.max(1, last - CHUNK + 1), -1 do
      reversed[#reversed + 1] = payloads[i]
    end
    redis.call('LPUSH', list, unpack(reversed))
  end
end

-- The fields under which the attempts hash counts a payload's crashes and its errors.
local function counters_of(payload)
  local digest = redis.sha1hex(payload)
  return digest, 'errors:' .. digest
end

-- Drop a stream's entries that are older than this; an age of 0 keeps everything. About: some may stay a while.
local function trim_to_age(stream, now, age)
  if tonumber(age) > 0 then
    redis.call('XTRIM', stream, 'MINID', '~', string.format('%.0f', math.max(0, now - age)))
  end
end

-- Append to a stream; a length of 0 keeps everything.
local function append(stream, max_length, fields)
  if tonumber(max_length) > 0 then
    return redis.call('XADD', stream, 'MAXLEN', '~', max_length, '*', unpack(fields))
  end
  return redis.call('XADD', stream, '*', unpack(fields))
end
