-- The places that a message can be in, and its moves between them.

local new_deaths, death_causes = {}, {}  -- the messages that this script has dead-lettered: sequences, and count|reason of each

-- Return the first message in a set of a session; drop what is none.
local function first_in(base, key)
    local first = redis.call('ZRANGE', key, 0, 0)[1]
    while first and not row_of(base, first) do
        redis.call('ZREM', key, first)
        redis.call('ZREM', base .. 'waiting', first)
        first = redis.call('ZRANGE', key, 0, 0)[1]
    end
    return first
end

local function next_in_session(base, session)
    local first = redis.call('ZRANGE', base .. 'session:' .. session, 0, 0)[1]
    if not first then
        return nil
    elseif not is_sequence(first) then
        first = first_in(base, base .. 'session:' .. session)
    end
    local late = first and redis.call('ZRANGE', base .. 'late:' .. session, 0, 0)[1]
    if late and (not is_sequence(late) or tonumber(late) < tonumber(first)) then  -- a deleted one holds up none
        late = first_in(base, base .. 'late:' .. session)
    end
    return first and not (late and tonumber(late) < tonumber(first)) and first or nil
end

local function offer_session(base, session)
    local first = redis.call('HEXISTS', base .. 'session_token', session) == 0 and next_in_session(base, session)
    if first then
        redis.call('ZADD', base .. 'free', first, session)
    else
        redis.call('ZREM', base .. 'free', session)
    end
end

local function dead_letter(base, sequence, row, reason, description)
    local death = json().encode({reason, description, NOW})  -- before anything is written: it might fail
    row.place, row.token, row.expires = 'd', '', 0
    new_deaths[#new_deaths + 1] = sequence
    death_causes[#death_causes + 1] = row.count .. '|' .. reason
    save(base, sequence, row)
    redis.call('HSET', base .. 'death', sequence, death)
    redis.call('ZADD', base .. 'dead', sequence, sequence)
    redis.call('ZADD', base .. 'dead:ready', rank(row, sequence), sequence)
    notify(base, true)
end

-- Put an unlocked message into its place, claimable from *visible* on. It must be in no place before. A retry, or one that
-- *holds_up*, holds up those of its session behind it while it is delayed.
local function put(base, sequence, row, visible, holds_up)
    row.token = ''
    if row.place == 'q' and row.expires > 0 and row.expires <= NOW then
        return dead_letter(base, sequence, row, '{reason_expired}', '{expired_description}')
    end
    save(base, sequence, row)
    if row.place == 'f' then
        redis.call('ZADD', base .. 'deferred', sequence, sequence)
    elseif row.place == 'd' then
        if visible > NOW then
            redis.call('ZADD', base .. 'dead:delayed', visible, sequence)
        else
            redis.call('ZADD', base .. 'dead:ready', rank(row, sequence), sequence)
        end
    else
        if row.expires > 0 then
            redis.call('ZADD', base .. 'expiry', row.expires, sequence)
        end
        if visible > NOW then
            redis.call('ZADD', base .. 'delayed', visible, sequence)
            if row.session and (row.count > 0 or holds_up) then
                redis.call('ZADD', base .. 'late:' .. row.session, sequence, sequence)
                offer_session(base, row.session)
            end
        elseif row.session then
            redis.call('ZADD', base .. 'session:' .. row.session, sequence, sequence)
            redis.call('ZADD', base .. 'waiting', sequence, sequence)
            offer_session(base, row.session)
        else
            redis.call('ZADD', base .. 'ready', rank(row, sequence), sequence)
        end
    end
end

-- Remove a message that waits from its place.
local function take_out(base, sequence, row)
    redis.call('ZREM', base .. 'expiry', sequence)
    redis.call('ZREM', base .. 'delayed', sequence)
    if row.session then
        redis.call('ZREM', base .. 'session:' .. row.session, sequence)
        redis.call('ZREM', base .. 'late:' .. row.session, sequence)
        redis.call('ZREM', base .. 'waiting', sequence)
        offer_session(base, row.session)
    else
        redis.call('ZREM', base .. 'ready', sequence)
    end
end

local function add_attempt(base, sequence, row, outcome, error)
    local history = redis.call('HGET', base .. 'history', sequence)
    local number = math.max(1, row.count)  -- of a dead letter that was never received, the count is 0
    local line = number .. '|' .. NOW .. '|' .. outcome .. '|' .. error
    if history then
        local _, lines = string.gsub(history, '\n', '\n')
        local surplus, start = lines + 2 - HISTORY_MAX, 1
        while surplus > 0 do
            start = (string.find(history, '\n', start, true) or #history) + 1
            surplus = surplus - 1
        end
        history = string.sub(history, start)
        work = work - math.floor(#history / HEAVY)
        line = #history > 0 and #history <= HISTORY_SIZE and history .. '\n' .. line or line
    end
    redis.call('HSET', base .. 'history', sequence, line)
end

-- Dead-letter the message of *row* if it has no delivery left; return whether it has none.
local function dead_letter_if_exhausted(base, sequence, row)
    if row.count < setting(base, 'max_deliveries', 10) then
        return false
    end
    dead_letter(base, sequence, row, '{reason_exhausted}', string.format('{exhausted_description}', row.count))
    return true
end

local function expire_lock(base, sequence)
    local row = row_of(base, sequence)
    if not row then
        return
    end
    add_attempt(base, sequence, row, 'expired', '')
    if not dead_letter_if_exhausted(base, sequence, row) then
        put(base, sequence, row, NOW)
    end
end
