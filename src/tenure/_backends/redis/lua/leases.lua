-- Scripts about a lease, or about many. Each lease has two keys, which are in one slot of a cluster:
--   KEYS[1]  the lock: a string, the holder, which expires with the lease. redis-py's Lock has the same.
--   KEYS[2]  the term: a hash that never expires, so that its token never falls. holder, metadata and resign are those
--            of the newest term, and valid only while the lock has the same holder. released: the token that was
--            released last, and when (ms since 1970). layout: the version of this layout of keys, if it is not the
--            first.
-- pcall: a hint that can't be published must not undo the change.
-- GT: a request that was given up may be executed after newer ones, so an end is only ever moved forward.

do
    local key = '{' .. KEYS[1] .. '}:term'
    local layout = redis.pcall('HGET', key, 'layout')
    if type(layout) == 'string' and layout ~= '1' then  -- neither read nor write a later layout
        return redis.error_reply('LAYOUT ' .. layout .. ' ' .. key)
    end
end

-- Return whether the token of a term can be read, and rise.
local function can_rise(token)
    return not token or string.find(token, '^%d+$') and (#token < 19 or #token == 19 and token < '9223372036854775807')
end

-- name: acquire (holder, ttl in ms, metadata, channel)
local held = redis.call('GET', KEYS[1])
local term = redis.call('HMGET', KEYS[2], 'holder', 'token', 'metadata', 'resign')
if held and held ~= ARGV[1] then
    return {0, held, term[2] or '0', redis.call('PTTL', KEYS[1]), term[1] == held and term[3] or ''}
end
if held and term[1] == held and term[2] then  -- repeated: the answer was lost
    redis.call('PEXPIRE', KEYS[1], ARGV[2], 'GT')
    return {1, term[2], term[4]}
end
if not can_rise(term[2]) then
    return {2}
end
redis.call('HINCRBY', KEYS[2], 'token', 1)
redis.call('HSET', KEYS[2], 'holder', ARGV[1], 'metadata', ARGV[3], 'resign', '0')
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.pcall('PUBLISH', ARGV[4], 'acquired')
return {1, redis.call('HGET', KEYS[2], 'token'), '0'}  -- as a number, a high one would lose digits

-- name: renew (ttl in ms; holder, token of each lease)
-- The keys of many leases, two for each. Each answer is 0: not held; 1: extended; 2: and asked to resign; -1: there is
-- something else under one of its keys, which fails none of the others.
local answers = {}
for i = 1, #KEYS / 2 do
    local lock, key = KEYS[2 * i - 1], KEYS[2 * i]
    local holder = ARGV[2 * i]
    local term, held = redis.pcall('HMGET', key, 'holder', 'token', 'resign', 'layout'), redis.pcall('GET', lock)
    if (term[4] or '1') ~= '1' then
        return redis.error_reply('LAYOUT ' .. term[4] .. ' ' .. key)
    end
    if term.err or type(held) == 'table' then
        answers[i] = -1
    elseif held ~= holder or term[1] ~= holder or term[2] ~= ARGV[2 * i + 1] then
        answers[i] = 0
    else
        redis.call('PEXPIRE', lock, ARGV[1], 'GT')
        answers[i] = term[3] == '1' and 2 or 1
    end
end
return answers

-- name: release (holder, token, channel)
local term = redis.call('HMGET', KEYS[2], 'holder', 'token')
if redis.call('GET', KEYS[1]) ~= ARGV[1] or term[1] ~= ARGV[1] or term[2] ~= ARGV[2] then
    return 0
end
redis.call('DEL', KEYS[1])
local now = redis.call('TIME')
local at = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000))
redis.call('HSET', KEYS[2], 'holder', '', 'metadata', '', 'resign', '0', 'released', term[2] .. ' ' .. at)
redis.pcall('PUBLISH', ARGV[3], 'released')
return 1

-- name: inspect
-- The locks of many leases: the keys of the terms follow from them, and would double what the server has to read. Each
-- answer begins with 1: held; 0: not held; -1: there is something else under one of its keys.
local answers, now = {}, redis.call('TIME')
for i, lock in ipairs(KEYS) do
    local key = '{' .. lock .. '}:term'
    local held = redis.pcall('GET', lock)
    local term = redis.pcall('HMGET', key, 'holder', 'token', 'metadata', 'resign', 'released', 'layout')
    if not term.err and (term[6] or '1') ~= '1' then
        return redis.error_reply('LAYOUT ' .. term[6] .. ' ' .. key)
    end
    if type(held) == 'table' or term.err then
        answers[i] = {-1}
    elseif held then
        local is_ours = term[1] == held
        local left = redis.call('PTTL', lock)
        answers[i] = {1, held, term[2] or '0', left, is_ours and term[3] or '', is_ours and term[4] or '0'}
    else
        local token, at = string.match(term[5] or '', '^(%d+) (%d+)$')
        if token and token == term[2] then
            answers[i] = {0, term[2], now[1] * 1000 + math.floor(now[2] / 1000) - at}
        else  -- it expired, or an older version released it without the time
            answers[i] = {0, term[2] or '0', ''}
        end
    end
end
return answers

-- name: ask_to_resign (channel)
local held = redis.call('GET', KEYS[1])
if not held or redis.call('HGET', KEYS[2], 'holder') ~= held then
    return 0  -- no holder, or a Lock, which can't resign
end
redis.call('HSET', KEYS[2], 'resign', '1')
redis.pcall('PUBLISH', ARGV[1], 'resign')
return 1
