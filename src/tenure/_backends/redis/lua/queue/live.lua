-- Counts, and live messages peeked at and purged.

-- name: stats (whether to count at once)
-- Returns an empty list while more is due than one script handles: then the client runs it again. If it is to count at
-- once nevertheless, it counts due messages in their most likely places.
local base = KEYS[1]
local more = apply_due(base)
keep_deaths(base)
if more and ARGV[1] == '0' then
    return {}
end
local oldest = redis.call('ZRANGE', base .. 'waiting', 0, 0)[1]
for priority = 0, 9 do
    local from = (9 - priority) * RANK
    local first = redis.call('ZRANGEBYSCORE', base .. 'ready', from, from + RANK - 1, 'LIMIT', 0, 1)[1]
    if first and is_sequence(first) and (not oldest or not is_sequence(oldest) or tonumber(first) < tonumber(oldest)) then
        oldest = first
    end
end
local function size(key)
    return redis.call('ZCARD', base .. key)
end
local function due(key)
    return redis.call('ZCOUNT', base .. key, '-inf', NOW)
end
oldest = oldest and row_of(base, oldest)
local age = oldest and math.max(0, NOW - oldest.sent) or 0
local orphaned, delayed, expired = due('locked'), due('delayed'), due('expiry')
local ready = size('ready') + size('waiting') + orphaned + delayed - expired
local limits = limits_of(base)
return {
    math.max(0, ready), size('locked') - orphaned, size('delayed') - delayed, size('deferred'), size('dead') + expired, age,
    limits and limits.is_paused and 1 or 0,
}

-- name: waiting (limit, after, whether ready messages are selected, whether deferred ones are)
-- Returns the lowest sequences after *after* in the sets that are ordered by sequence, sorted.
local base, limit, after = KEYS[1], ARGV[1], tonumber(ARGV[2])
local found = {}
local function collect(key, from, till)
    for _, sequence in ipairs(redis.call('ZRANGEBYSCORE', base .. key, from, till, 'LIMIT', 0, limit)) do
        if is_sequence(sequence) and tonumber(sequence) > after then
            found[#found + 1] = tonumber(sequence)
        end
    end
end
if ARGV[3] == '1' then
    for priority = 0, 9 do
        local from = (9 - priority) * RANK
        collect('ready', string.format('%.0f', from + after + 1), string.format('%.0f', from + RANK - 1))
    end
    collect('waiting', '(' .. ARGV[2], '+inf')
end
if ARGV[4] == '1' then
    collect('deferred', '(' .. ARGV[2], '+inf')
end
table.sort(found)
return {unpack(found, 1, math.min(#found, tonumber(limit)))}

-- name: live (action: peek, count or purge; states, of rldf; session or empty; sent before in ms or empty; prefix of
-- generated ids; how many ids, the ids, -1 for any; then sequences)
-- Reads these messages. Returns how many of them were selected and, for peek, their contents, states, and the times of
-- those; if they are large, only of the first ones, and then the sequence after which to go on.
local base, action, states, session, before, id_prefix = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local first, ids = 7 + math.max(0, tonumber(ARGV[6])), nil
if tonumber(ARGV[6]) >= 0 then
    ids = {}
    for i = 7, first - 1 do
        ids[ARGV[i]] = true
    end
end
apply_due(base)
keep_deaths(base)
local selected, letters, moments = {}, {}, {}
for i = first, #ARGV do
    local sequence = ARGV[i]
    local row = row_of(base, sequence)
    if row and row.place ~= 'd' then
        local letter, moment = 'r', 0
        if row.token ~= '' then
            letter, moment = 'l', tonumber(redis.call('ZSCORE', base .. 'locked', sequence) or 0)
            if moment == NEVER then
                moment = not row.session and 0 or tonumber(redis.call('ZSCORE', base .. 'sessions', row.session) or 0)
            end
        elseif row.place == 'f' then
            letter = 'f'
        else
            local due = redis.call('ZSCORE', base .. 'delayed', sequence)
            if due then
                letter, moment = 'd', tonumber(due)
            end
        end
        if string.find(states, letter, 1, true) and (session == '' or row.session == session)
            and (not before or tonumber(row.sent) < before) and (not ids or ids[id_of(base, sequence) or id_prefix .. sequence]) then
            selected[#selected + 1], letters[#letters + 1] = sequence, letter
            moments[#moments + 1] = math.max(0, math.min(moment, TIME_MAX))
            if action == 'purge' then
                take_out(base, sequence, row)
                redis.call('ZREM', base .. 'deferred', sequence)
                for _, key in ipairs({'state', 'head', 'body', 'history'}) do
                    redis.call('HDEL', base .. key, sequence)
                end
                if row.session then  -- the message may have held up others
                    notify(base, false)
                end
            end
        end
    end
end
if action ~= 'peek' then
    return {#selected}
end
local bodies = bodies_of(base, selected, false)
local go_on = -1
if #bodies < #selected then
    selected = {unpack(selected, 1, #bodies)}
    go_on = tonumber(selected[#selected])
end
return {#selected, go_on, contents_of(base, selected, fetch('HMGET', base .. 'state', selected), bodies), letters, moments}

-- name: peek_deferred (limit, after)
local base = KEYS[1]
apply_due(base)
keep_deaths(base)
local sequences, states =
    known_in(base, redis.call('ZRANGEBYSCORE', base .. 'deferred', '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[1]))
return {0, -1, contents_of(base, sequences, states), {}, {}, 0}
