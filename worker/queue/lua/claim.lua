-- claim: move tickets from the head of the list into a claim, and lease it.
--
-- KEYS  1 waiting (list)  2 claim (hash)  3 leases (zset)  4 attempts (hash)  5 commits (zset)
-- ARGV  1 claim id  2 most tickets  3 most bytes  4 lease in ms
-- Gives {index, payload, crashes, errors, index, payload, crashes, errors, ...}, oldest first.
--
-- The same claim id again gives the same tickets, so a lost reply is safe to repeat. Once they were handed back or taken
-- over it gives none: a copy of the request that comes late, out of a connection long given up, must not bring other
-- tickets under an id by which a worker may still commit the old ones.

-- Tickets read at a time, at most, and as many as were chosen before: huge ones come into memory one by one.
local PIECE = 16

local function crashes_and_errors_of(payload)
  local counts = redis.call('HMGET', KEYS[4], counters_of(payload))
  return tonumber(counts[1] or 0), tonumber(counts[2] or 0)
end

-- A ticket that was in k crashes is handed out with N/2^k others at most: one that kills its worker is soon alone.
local function choose(most, most_bytes)
  local any_counts = redis.call('EXISTS', KEYS[4]) == 1
  local chosen, bytes = {}, 0
  while #chosen < most do
    local piece = redis.call('LRANGE', KEYS[1], #chosen, #chosen + math.max(1, math.min(PIECE, #chosen)) - 1)
    if #piece == 0 then return chosen end
    for _, payload in ipairs(piece) do
      local crashes, errors = 0, 0
      if any_counts then crashes, errors = crashes_and_errors_of(payload) end
      most = math.min(most, math.max(1, math.floor(tonumber(ARGV[2]) / 2 ^ crashes)))
      bytes = bytes + #payload
      if #chosen >= most or (#chosen > 0 and bytes > most_bytes) then return chosen end
      chosen[#chosen + 1] = {#chosen + 1, payload, crashes, errors}
    end
  end
  return chosen
end

local function keep(claim, chosen)
  for first = 1, #chosen, CHUNK / 2 do
    local pairs_ = {}
    for i = first, math.min(#chosen, first + CHUNK / 2 - 1) do
      pairs_[#pairs_ + 1] = chosen[i][1]
      pairs_[#pairs_ + 1] = chosen[i][2]
    end
    redis.call('HSET', claim, unpack(pairs_))
  end
end

expect(KEYS[1], 'list')
expect(KEYS[2], 'hash')
expect(KEYS[3], 'zset')
expect(KEYS[4], 'hash')
expect(KEYS[5], 'zset')

local tickets
if redis.call('EXISTS', KEYS[2]) == 1 then
  tickets = owed_by(KEYS[2])
  for _, ticket in ipairs(tickets) do
    ticket[3], ticket[4] = crashes_and_errors_of(ticket[2])
  end
elseif redis.call('ZSCORE', KEYS[5], ARGV[1]) then
  return {}
else
  tickets = choose(tonumber(ARGV[2]), tonumber(ARGV[3]))
  if #tickets == 0 then return {} end
  redis.call('LPOP', KEYS[1], #tickets) -- first, so that a full Redis can be drained
  keep(KEYS[2], tickets)
end
set_score(KEYS[3], now_ms() + tonumber(ARGV[4]), ARGV[1])

local reply = {}
for _, ticket in ipairs(tickets) do
  reply[#reply + 1] = ticket[1]
  reply[#reply + 1] = ticket[2]
  reply[#reply + 1] = ticket[3]
  reply[#reply + 1] = ticket[4]
end
return reply
