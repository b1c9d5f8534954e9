-- Dead letters: a look at them, and what is done to many of them.

-- Keep a dead letter of another queue, whatever ids are remembered here: its head tells its id.
local function keep_anew(base, priority, session, head, body, history)
    local sequence = keep(base, '0|0|0|' .. priority .. '|' .. session, '', head, body)
    if history and history ~= '' then
        redis.call('HSET', base .. 'history', sequence, history)
    end
end

-- name: send_dead_letters (for each: priority, session, head, body, history, any of which may be empty)
for i = 1, #ARGV, 5 do
    keep_anew(KEYS[1], ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4])
end
ring(KEYS[1], false)
return is_new and 1 or 0

-- name: dead (what: peek, count, redrive, purge or move, to the queue of the second key; how many at most, after, dead before in ms (with -, so long ago) or nothing, reason or
-- nothing, begin of made-up ids, how many sequences, the sequences, how many ids, the ids; -1 for any)
-- Looks at a part of the dead letters. Returns how many were meant, where to go on (-1: at the end), and for peek them.
local base, what, limit, after = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
local before, reason, made_up = tonumber(ARGV[4]), ARGV[5], ARGV[6]
if string.sub(ARGV[4], 1, 1) == '-' then
    before = NOW + before
end
local at = 7
local function set_of()
    local size = tonumber(ARGV[at])
    at = at + 1
    if size < 0 then
        return nil
    end
    local set = {}
    for i = at, at + size - 1 do
        set[ARGV[i]] = true
    end
    at = at + size
    return set
end
local wanted, ids = set_of(), set_of()
catch_up(base)
keep_deaths(base)
local function id_of(sequence)
    local head = redis.call('HGET', base .. 'head', sequence)
    local id = head and cjson.decode(head)[1]
    return type(id) == 'string' and id or made_up .. sequence
end
local function is_meant(sequence)
    if wanted and not wanted[sequence] or ids and not ids[id_of(sequence)] then
        return false
    end
    if what ~= 'peek' and redis.call('ZSCORE', base .. 'dead:locked', sequence) then
        return false
    end
    if reason == '' and not before then
        return true
    end
    local death = cjson.decode(redis.call('HGET', base .. 'death', sequence))
    return (reason == '' or death[1] == reason) and (not before or death[3] < before)
end
local looked_at = redis.call('ZRANGEBYSCORE', base .. 'dead', '(' .. after, '+inf', 'LIMIT', 0, WORK)
local meant, go_on = {}, -1
for _, sequence in ipairs(looked_at) do
    if #meant >= limit then
        break
    end
    go_on = tonumber(sequence)
    if is_meant(sequence) then
        meant[#meant + 1] = sequence
    end
end
if #looked_at < WORK and (#looked_at == 0 or go_on == tonumber(looked_at[#looked_at])) then
    go_on = -1
end
if what == 'peek' then
    local bodies, histories = weighed(base, meant, true)
    if #bodies < #meant then  -- a large part: the rest is for the next one
        meant = {unpack(meant, 1, #bodies)}
        go_on = tonumber(meant[#meant])
    end
    return {#meant, go_on, told(base, meant, fetch('HMGET', base .. 'state', meant), bodies, histories)}
end
for _, sequence in ipairs(what ~= 'count' and meant or {}) do
    redis.call('ZREM', base .. 'dead', sequence)
    redis.call('ZREM', base .. 'dead:ready', sequence)
    redis.call('ZREM', base .. 'dead:delayed', sequence)
    redis.call('HDEL', base .. 'death', sequence)
    if what == 'move' then  -- the head is not written anew: numbers would lose their last digits
        local row, head = row_of(base, sequence), redis.call('HGET', base .. 'head', sequence)
        local named = string.sub(cjson.encode(made_up), 1, -2) .. sequence .. '"'
        if not head then
            head = '[' .. named .. ',{},null,null]'
        elseif string.sub(head, 1, 5) == '[null' then
            head = '[' .. named .. string.sub(head, 6)
        end
        keep_anew(KEYS[2], row.priority, row.session or '', head, redis.call('HGET', base .. 'body', sequence),
            redis.call('HGET', base .. 'history', sequence))
    end
    if what == 'purge' or what == 'move' then
        for _, key in ipairs({'state', 'head', 'body', 'history'}) do
            redis.call('HDEL', base .. key, sequence)
        end
    else
        local row = row_of(base, sequence)
        row.count, row.place, row.expires = 0, 'q', 0
        put(base, sequence, row, NOW)
    end
end
if what == 'redrive' and #meant > 0 then
    ring(base, false)
elseif what == 'move' and #meant > 0 then
    ring(KEYS[2], false)
end
return {#meant, go_on, is_new and 1 or 0}
