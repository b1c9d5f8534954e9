-- Due times: locks, delays and ttls that have ended.

-- End the lock of a session: it has expired; or it was released, and deliveries under it don't count. Return whether that
-- is complete: of many messages, a part is put back, and the session can't be accepted until all are.
local function end_session_lock(base, session, is_expired)
    local held = redis.call('SPOP', base .. 'held:' .. session, math.max(work, 1))
    work = work - #held - 1
    for _, sequence in ipairs(held) do
        redis.call('ZREM', base .. 'locked', sequence)
        if is_expired then
            expire_lock(base, sequence)
        else
            local row = row_of(base, sequence)
            if row then
                row.count = math.max(0, row.count - 1)
                put(base, sequence, row, NOW)
            end
        end
    end
    if redis.call('EXISTS', base .. 'held:' .. session) == 1 then
        return false
    end
    redis.call('HDEL', base .. 'session_token', session)
    redis.call('ZREM', base .. 'sessions', session)
    offer_session(base, session)
    return true
end

-- Handle a part of the due messages; return whether there may be more.
local function apply_due(base)
    local function each(key, act)
        if work > 0 then
            for _, which in ipairs(redis.call('ZRANGEBYSCORE', base .. key, '-inf', NOW, 'LIMIT', 0, work)) do
                if work <= 0 then
                    return
                end
                work = work - 1
                act(which)
            end
        end
    end
    local function put_back(sequence)
        local row = row_of(base, sequence)
        take_out(base, sequence, row or {})
        if row then
            put(base, sequence, row, NOW)
        end
    end
    each('locked', function(sequence)
        redis.call('ZREM', base .. 'locked', sequence)
        expire_lock(base, sequence)
    end)
    each('sessions', function(session)
        end_session_lock(base, session, true)
    end)
    each('expiry', put_back)
    each('delayed', put_back)
    for _, key in ipairs({'dead:locked', 'dead:delayed'}) do
        each(key, function(sequence)
            redis.call('ZREM', base .. key, sequence)
            local row = row_of(base, sequence, 'd')
            if row then
                put(base, sequence, row, NOW)
            end
        end)
    end
    return work <= 0
end

-- Return in how many ms the first entry of these sets comes due; -1 if none will.
local function due_in(base, keys)
    local first = NEVER
    for _, key in ipairs(keys) do
        local at = redis.call('ZRANGE', base .. key, 0, 0, 'WITHSCORES')[2]
        first = math.min(first, at and tonumber(at) or NEVER)
    end
    return first < NEVER and math.min(math.max(0, first - NOW), TIME_MAX) or -1
end
