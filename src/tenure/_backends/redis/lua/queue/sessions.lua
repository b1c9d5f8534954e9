-- Sessions: their locks, claims under them, their state.

local function session_holds(base, session, token)
    local ends = redis.call('ZSCORE', base .. 'sessions', session)
    return ends and tonumber(ends) > NOW and redis.call('HGET', base .. 'session_token', session) == token
        and tonumber(ends) or nil
end

-- name: accept (lock in ms, token, whether a session is named, its name, lane, then lanes and marks to give back)
-- Returns the lanes that were given back, and 1, the lock's end, the session and its state; or 0, in how many ms to try
-- again, deaths, and whether the limits hold back a session.
local base, ends, session = KEYS[1], NOW + ARGV[1], ARGV[3] == '1' and ARGV[4]
local found = give_back_claims(base, 6)
local more = apply_due(base)
local limits, is_held_back
if not session then
    session = redis.call('ZRANGE', base .. 'free', 0, 0)[1]
    limits = session and limits_of(base)
    is_held_back = limits and allowance_of(base, limits) == 0
    session = not is_held_back and session or nil
elseif redis.call('HEXISTS', base .. 'session_token', session) == 1 then
    session = nil
end
if not session then
    local keys = {'delayed', 'sessions'}
    local due = more and 0 or is_held_back and due_in_despite(limits, base, keys) or due_in(base, keys)
    return {found, 0, due, take_deaths(base, ARGV[5], ARGV[2], ARGV[1]), is_held_back and 1 or 0, made}
end
keep_deaths(base)
note_claim(base, ARGV[5], ARGV[2], 's', ARGV[2], session, ARGV[1])
redis.call('HSET', base .. 'session_token', session, ARGV[2])
redis.call('ZADD', base .. 'sessions', ends, session)
redis.call('ZREM', base .. 'free', session)
return {found, 1, ends, session, redis.call('HGET', base .. 'session_state', session), made}

-- name: receive_session (session, token, limit, lane, mark, then lanes and marks to give back)
local base, session, token, limit = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local found = give_back_claims(base, 6)
local more = apply_due(base)
local ends = session_holds(base, session, token)
if not ends then
    keep_deaths(base)
    return {0, found}
end
local limits = limits_of(base)
local rate, most, log = limits and limits.session_rate, limit, nil
if limits then
    most = math.min(limit, allowance_of(base, limits))
end
if rate then
    local is_ahead
    log, is_ahead = log_of(rate, redis.call('HGET', base .. 'delivered_in', session))
    if is_ahead then
        note_delivered_in(base, session, rate, log, 0)
    end
    most = math.max(0, math.min(most, left_by(rate, log)))
end
local sequences, states, size = {}, {}, 0
while #sequences < most and size < CLAIM_BYTES do
    local sequence = next_in_session(base, session)
    if not sequence then
        break
    end
    local row = row_of(base, sequence)
    if not row then  -- it was deleted
        redis.call('ZREM', base .. 'session:' .. session, sequence)
        redis.call('ZREM', base .. 'waiting', sequence)
    elseif row.expires > 0 and row.expires <= NOW then  -- more messages have expired than apply_due has handled
        if work <= 0 then
            more = true
            break
        end
        work = work - 1
        row.session = session
        take_out(base, sequence, row)
        put(base, sequence, row, NOW)
    else
        row.session = session
        take_out(base, sequence, row)
        row.count, row.token = math.min(row.count + 1, COUNT_MAX), token
        save(base, sequence, row)
        redis.call('ZADD', base .. 'locked', '+inf', sequence)
        redis.call('SADD', base .. 'held:' .. session, sequence)
        sequences[#sequences + 1], states[#states + 1] = sequence, text_of(row)
        size = size + redis.call('HSTRLEN', base .. 'body', sequence)
    end
end
local left = math.max(1, math.ceil(ends - NOW))
if #sequences > 0 then
    note_claim(base, ARGV[4], ARGV[5], 'q', token, table.concat(sequences, ' '), left)
end
local due, limited, waits = -1, limits and 1 or 0, nil
if limits then
    note_delivered(base, limits, #sequences)
    if rate and #sequences > 0 then
        note_delivered_in(base, session, rate, log, #sequences)
    end
end
if limits or #sequences < limit then
    waits = next_in_session(base, session)
end
local freed = rate and frees_in(rate, log)
freed = freed and math.min(freed, HELD_UP_MAX)
local is_held_up = freed and (waits or redis.call('EXISTS', base .. 'late:' .. session) == 1)
if freed and waits then  -- so that the session is not accepted in vain
    local row = row_of(base, waits) or {}
    row.session = session
    take_out(base, waits, row)
    if row.place then
        put(base, waits, row, math.ceil(MOMENT + freed), true)
    end
end
if #sequences < limit then
    if limits and (waits or is_held_up) and #sequences == most then
        limited = 2
        due = more and 0 or is_held_up and math.ceil(freed) or due_in_despite(limits, base, {'delayed'})
    else
        due = (more or waits) and 0 or due_in(base, {'delayed'})
    end
end
return {ends, due, contents_of(base, sequences, states), found, take_deaths(base, ARGV[4], ARGV[5], left), limited,
    is_held_up and math.ceil(freed) or -1}

-- name: release (session, token)
-- Returns 2 while more messages are left than one script gives back: then the client runs it again.
if not session_holds(KEYS[1], ARGV[1], ARGV[2]) then
    return 0
end
local is_done = end_session_lock(KEYS[1], ARGV[1], false)
keep_deaths(KEYS[1])
if not is_done then
    return 2
end
notify(KEYS[1], false)
return 1

-- name: read_state (session, token)
if not session_holds(KEYS[1], ARGV[1], ARGV[2]) then
    return {0}
end
return {1, redis.call('HGET', KEYS[1] .. 'session_state', ARGV[1])}

-- name: write_state (session, token, and the state, if there is one)
if not session_holds(KEYS[1], ARGV[1], ARGV[2]) then
    return 0
end
if ARGV[3] then
    redis.call('HSET', KEYS[1] .. 'session_state', ARGV[1], ARGV[3])
else
    redis.call('HDEL', KEYS[1] .. 'session_state', ARGV[1])
end
return 1
