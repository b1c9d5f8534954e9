-- The limits of a queue, by the rules of tenure/_queue/limits.py, in the step that claims. Times in ms.

local MOMENT = clock[1] * 1000 + clock[2] / 1000  -- with its fraction: by NOW, a window could be a ms too short
local BURSTS = 64  -- PARTS in limits.py
local HELD_UP_MAX = 60000  -- in limits.py

local function rate_of(text)
    local most, seconds = string.match(text or '', '^(%d+)/(.+)$')
    most, seconds = number_in(most, 1, COUNT_MAX), number_in(seconds, 0.001, 250e9)
    return most and seconds and {most = most, window = seconds * 1000}
end

local function limits_in(paused, max_locked, rate, session_rate)
    local limits = {
        is_paused = paused == '1', max_locked = number_in(max_locked, 1, COUNT_MAX, NEVER), rate = rate_of(rate),
        session_rate = rate_of(session_rate),
    }
    local is_limited = limits.is_paused or limits.max_locked < NEVER or limits.rate or limits.session_rate
    return is_limited and limits or false
end

-- Return the limits of the live messages of a queue, or false if it has none. The one command brings a setting that
-- bodies_of needs, too.
local limits_read = {}
local function limits_of(base)
    local limits = limits_read[base]
    if limits == nil then
        local texts = redis.call(
            'HMGET', base .. 'settings', 'body_max', 'paused', 'max_locked', 'rate', 'session_rate')
        settings[base .. 'body_max'] = texts[1]
        -- Most queues have none, and need no table.
        limits = (texts[2] or texts[3] or texts[4] or texts[5]) and limits_in(unpack(texts, 2, 5)) or false
        limits_read[base] = limits
    end
    return limits
end

-- Return whether an unlocked message frees a place for another one, so that the consumers are to be hinted.
local function frees_places(base)
    return setting(base, 'max_locked', NEVER) < NEVER
end

-- Read a log of deliveries: its bursts that still count by *rate*, oldest first. Those of the future are of now, as the
-- clock was set back. Return also whether there were any: then the log is to be stored, so that they don't count until
-- the clock is there again.
local function log_of(rate, text)
    local log, is_ahead = {}, false
    for began, at, number in string.gmatch(text or '', '([%d.]+)|([%d.]+)|(%d+)') do
        began, at = tonumber(began), tonumber(at)
        if began and at and at + rate.window > MOMENT then
            began, at = math.min(began, MOMENT), math.min(at, MOMENT)
            log[#log + 1] = {began = began, at = at, number = math.min(tonumber(number), COUNT_MAX)}
            is_ahead = is_ahead or at == MOMENT
        end
    end
    return log, is_ahead
end

-- Add so many deliveries to a log, and return its text.
local function lengthened(rate, log, count)
    local last = log[#log]
    if last and MOMENT - last.began < rate.window / BURSTS then
        last.at, last.number = MOMENT, last.number + count
    else
        log[#log + 1] = {began = MOMENT, at = MOMENT, number = count}
    end
    local texts = {}
    for i, burst in ipairs(log) do
        texts[i] = string.format('%.3f|%.3f|%.0f', burst.began, burst.at, burst.number)
    end
    return table.concat(texts, ' ')
end

-- Return how many deliveries a rate allows after those of its log; it is below 0 after the rate was lowered.
local function left_by(rate, log)
    local left = rate.most
    for _, burst in ipairs(log) do
        left = left - burst.number
    end
    return left
end

-- Return in how many ms a rate allows a delivery again, or nil if it allows one now.
local function frees_in(rate, log)
    local left, i = left_by(rate, log), 0
    while left <= 0 and i < #log do
        i = i + 1
        left = left + log[i].number
    end
    return i > 0 and log[i].at + rate.window - MOMENT or nil
end

-- Return how many more messages may be locked. Locks that have ended, but are not yet applied, count.
local function places_left(base, limits)
    if limits.is_paused then
        return 0
    end
    return limits.max_locked < NEVER and math.max(0, limits.max_locked - redis.call('ZCARD', base .. 'locked')) or NEVER
end

local function store_log(base, limits, count)
    local text = lengthened(limits.rate, limits.log, count)
    redis.call('SET', base .. 'delivered', text, 'PX', math.ceil(limits.rate.window) + 1)
end

-- Return how many more messages a claim may bring.
local function allowance_of(base, limits)
    local left = places_left(base, limits)
    if left > 0 and limits.rate then
        if not limits.log then
            local is_ahead
            limits.log, is_ahead = log_of(limits.rate, redis.call('GET', base .. 'delivered'))
            if is_ahead then
                store_log(base, limits, 0)
            end
        end
        left = math.max(0, math.min(left, left_by(limits.rate, limits.log)))
    end
    return left
end

-- Note so many deliveries by a claim, which allowance_of has allowed. They are never taken back.
local function note_delivered(base, limits, count)
    if count > 0 and limits.rate then
        store_log(base, limits, count)
    end
end

-- Note the same for the rate of a session; forget a few sessions whose last delivery no longer counts.
local function note_delivered_in(base, session, rate, log, count)
    local over = redis.call('ZRANGEBYSCORE', base .. 'delivered_until', '-inf', NOW, 'LIMIT', 0, 8)
    many('HDEL', base .. 'delivered_in', over)
    many('ZREM', base .. 'delivered_until', over)
    redis.call('HSET', base .. 'delivered_in', session, lengthened(rate, log, count))
    redis.call('ZADD', base .. 'delivered_until', math.ceil(MOMENT + rate.window), session)
    for _, key in ipairs({'delivered_in', 'delivered_until'}) do
        redis.call('PEXPIRE', base .. key, math.ceil(rate.window) + 1)
    end
end

-- Return in how many ms time allows a message that is ready, but held back; -1 if it doesn't. Otherwise as due_in.
local function due_in_despite(limits, base, keys)
    local due = due_in(base, limits.max_locked < NEVER and {'delayed', 'locked', 'sessions'} or keys)
    if limits.rate and places_left(base, limits) > 0 then
        local freed = frees_in(limits.rate, limits.log)
        if freed and (due < 0 or freed < due) then
            due = math.ceil(freed)
        end
    end
    return due
end
