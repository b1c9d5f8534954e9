-- Sending.

local is_new = false  -- whether a queue was created

-- Return an error if the newest sequence of a queue can't rise. To be called before anything is written.
local function refusal_to_send(base)
    local newest = redis.call('GET', base .. 'sequence')
    if newest and (not is_sequence(newest) or tonumber(newest) >= RANK) then
        return redis.error_reply('SEQUENCE ' .. base .. 'sequence')
    end
end

-- Reserve *size* sequences, and return the last of them. A deleted queue's sequences are not used again.
local function next_sequences(base, size)
    local last = redis.call('INCRBY', base .. 'sequence', size)
    is_new = is_new or last == size
    local before = last == size and redis.call('GET', base .. 'retired')
    if before then
        redis.call('DEL', base .. 'retired')
        last = redis.call('INCRBY', base .. 'sequence', before)
    end
    return last
end

-- Forget ids that are older than their window: a few more than are added, so that there are never many at once.
local function forget_expired(base, set, until_then, size)
    local old = redis.call('ZRANGEBYSCORE', base .. set, '-inf', until_then, 'LIMIT', 0, size * 2 + 8)
    many('ZREM', base .. set, old)
end

-- Store a message; *control* is delay|at|expires_in|priority|session, or empty. Return its sequence, or 0 for a duplicate.
local function keep(base, control, id, head, body)
    if id ~= '' then
        local window = setting(base, 'dedupe_window', 600) * 1000
        forget_expired(base, 'ids', NOW - window, 1)
        local known = redis.call('ZSCORE', base .. 'ids', id)
        if known and tonumber(known) > NOW - window then
            return 0
        end
    end
    local sequence = next_sequences(base, 1)
    if id ~= '' then
        redis.call('ZADD', base .. 'ids', NOW, id)
    end
    local row = {count = 0, sent = NOW, priority = 0, expires = 0, place = 'q', token = ''}
    local visible = NOW
    if control ~= '' then
        local delay, at, expires_in, priority, session = string.match(control, '^(%d+)|(%d+)|(%d+)|(%d)|(.*)$')
        visible = math.max(NOW + delay, tonumber(at))
        row.expires = tonumber(expires_in) > 0 and NOW + expires_in or 0
        row.priority = tonumber(priority)
        row.session = session ~= '' and session or nil
    end
    if head ~= '' then
        redis.call('HSET', base .. 'head', sequence, head)
    end
    redis.call('HSET', base .. 'body', sequence, body)
    put(base, sequence, row, visible)
    return sequence
end

-- name: send (for each, the arguments of keep: control, id, head, body)
-- Returns the sequences, whether the queue is new (it may have been deleted, and must be listed again), and what tells it
-- from one that was deleted.
local base = KEYS[1]
local refused = refusal_to_send(base)
if refused then
    return refused
end
local is_plain = true
for i = 1, #ARGV, 4 do
    if ARGV[i] ~= '' or ARGV[i + 1] ~= '' then
        is_plain = false
        break
    end
end
local sequences = {}
if is_plain then  -- many at once
    local size = #ARGV / 4
    local last = next_sequences(base, size)
    local states, heads, bodies, ranks = {}, {}, {}, {}
    local state = '0|' .. NOW .. '|0|0|q||'
    for i = 1, size do
        local sequence, head = last - size + i, ARGV[i * 4 - 1]
        sequences[i] = sequence
        states[i * 2 - 1], states[i * 2] = sequence, state
        bodies[i * 2 - 1], bodies[i * 2] = sequence, ARGV[i * 4]
        ranks[i * 2 - 1], ranks[i * 2] = 9 * RANK + sequence, sequence
        if head ~= '' then
            heads[#heads + 1] = sequence
            heads[#heads + 1] = head
        end
    end
    many('HSET', base .. 'state', states)
    many('HSET', base .. 'head', heads)
    many('HSET', base .. 'body', bodies)
    many('ZADD', base .. 'ready', ranks)
else
    for i = 1, #ARGV, 4 do
        sequences[#sequences + 1] = keep(base, ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
    end
end
notify(base, false)
return {sequences, is_new and 1 or 0, made}
