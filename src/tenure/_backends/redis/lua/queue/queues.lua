-- The settings, the inbox and the deletion of a queue.

-- name: declare (whether only settings that were never declared; names and values)
local write = ARGV[1] == '1' and 'HSETNX' or 'HSET'
local limiting = {paused = true, max_locked = true, rate = true, session_rate = true}
local is_limit = false
redis.call('HSETNX', KEYS[1] .. 'settings', 'made', table.concat(clock, '.'))
for i = 2, #ARGV, 2 do
    redis.call(write, KEYS[1] .. 'settings', ARGV[i], ARGV[i + 1])
    is_limit = is_limit or limiting[ARGV[i]]
end
if is_limit then  -- other limits may let messages through
    notify(KEYS[1], false)
end

-- name: handled (ids)
local answers = {}
for i, ends in ipairs(fetch('ZMSCORE', KEYS[1] .. 'inbox', ARGV)) do
    answers[i] = ends and tonumber(ends) > NOW and 1 or 0
end
return answers

-- name: delete (whether to delete it with its messages)
-- Returns 1 if it is deleted, 0 if it is not empty, or 2 if more messages are left than one script deletes.
local base, force = KEYS[1], ARGV[1] == '1'
apply_due(base)
keep_deaths(base)
local places = {'ready', 'waiting', 'locked', 'delayed', 'deferred', 'dead'}
local found, names = {}, {}
for _, key in ipairs(places) do
    for _, sequence in ipairs(redis.call('ZRANGE', base .. key, 0, WORK - 1)) do
        if #found < WORK then
            found[#found + 1] = sequence
        end
    end
end
if #found > 0 and not force then
    return 0
end
local function forget_session(name)
    redis.call('DEL', base .. 'session:' .. name, base .. 'late:' .. name, base .. 'held:' .. name)
end
for i, text in ipairs(fetch('HMGET', base .. 'state', found)) do
    local row = text and read(text)
    if row and row.session then
        redis.call('ZREM', base .. 'session:' .. row.session, found[i])
        redis.call('ZREM', base .. 'late:' .. row.session, found[i])
        redis.call('SREM', base .. 'held:' .. row.session, found[i])
        offer_session(base, row.session)
    end
end
for _, key in ipairs({'dead:ready', 'dead:delayed', 'dead:locked', 'expiry', unpack(places)}) do
    many('ZREM', base .. key, found)
end
for _, key in ipairs({'state', 'head', 'body', 'history', 'death'}) do
    many('HDEL', base .. key, found)
end
if #found == WORK then
    return 2
end
for _, key in ipairs({'session_token', 'session_state'}) do
    for _, name in ipairs(redis.call('HKEYS', base .. key)) do
        forget_session(name)
    end
end
if redis.call('EXISTS', base .. 'sequence') == 1 then
    redis.call('SET', base .. 'retired', redis.call('GET', base .. 'sequence'), 'EX', 8 * 86400)
end
for _, key in ipairs({
    'settings', 'sequence', 'state', 'head', 'body', 'history', 'death', 'expiry', 'dead:ready', 'dead:delayed',
    'dead:locked', 'ids', 'inbox', 'free', 'sessions', 'session_token', 'session_state', 'schedules', 'untold',
    'delivered', 'delivered_in', 'delivered_until', unpack(places),
}) do
    redis.call('UNLINK', base .. key)
end
return 1

-- name: delete_when_idle (name, ms)
return redis.call('ZADD', KEYS[1], NOW + ARGV[2], ARGV[1])

-- name: idle
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', NOW, 'LIMIT', 0, 100)

-- name: holding
-- Which of these queues hold messages, or deaths that no claim has reported yet.
local held = {}
for i, base in ipairs(KEYS) do
    held[i] = redis.call('EXISTS', base .. 'ready', base .. 'locked', base .. 'delayed', base .. 'waiting', base .. 'untold')
end
return held
