-- Dead letters: peeked at, redriven, purged and moved to another queue.

-- Store a dead letter of another queue, also if its id is remembered here: its head has the id.
local function keep_dead_letter(base, priority, session, head, body, history)
    local sequence = keep(base, '0|0|0|' .. priority .. '|' .. session, '', head, body)
    if history and history ~= '' then
        redis.call('HSET', base .. 'history', sequence, history)
    end
end

-- name: send_dead_letters (for each: priority, session, head, body, history, any of which may be empty)
if refusal_to_send(KEYS[1]) then
    return refusal_to_send(KEYS[1])
end
for i = 1, #ARGV, 5 do
    keep_dead_letter(KEYS[1], ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4])
end
notify(KEYS[1], false)
return is_new and 1 or 0

-- name: dead (action: peek, count, redrive, purge, or move to the queue of the second key; how many at most; after; dead
-- before in ms (with -: that long ago) or empty; reason or empty; prefix of generated ids; how many sequences, the sequences;
-- how many ids, the ids; -1 for any)
-- Reads a part of the dead letters. Returns how many were selected, where to go on (-1: at the end), and for peek the letters.
local base, action, limit, after = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
local before, reason, id_prefix = tonumber(ARGV[4]), ARGV[5], ARGV[6]
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
apply_due(base)
keep_deaths(base)
local function is_selected(sequence)
    if wanted and not wanted[sequence] or ids and not ids[id_of(base, sequence) or id_prefix .. sequence] then
        return false
    end
    if action ~= 'peek' and redis.call('ZSCORE', base .. 'dead:locked', sequence) then
        return false
    end
    if reason == '' and not before then
        return true
    end
    local death = decoded(redis.call('HGET', base .. 'death', sequence))
    local at = tonumber(death[3]) or 0
    return (reason == '' or death[1] == reason) and (not before or at < before)
end
-- By the scores, not by the members: so each part goes further, whatever the members are.
local letters = redis.call(
    'ZRANGEBYSCORE', base .. 'dead', '(' .. after, '(' .. string.format('%.0f', RANK), 'WITHSCORES', 'LIMIT', 0, WORK)
local selected, go_on, scores, seen = {}, -1, {}, 0
for i = 1, #letters, 2 do
    if #selected >= limit then
        break
    end
    local sequence = letters[i]
    go_on, seen = letters[i + 1], seen + 2  -- as it came: rounded up, it would pass by the next one
    scores[sequence] = go_on
    if is_sequence(sequence) and is_selected(sequence) then
        selected[#selected + 1] = sequence
    end
end
if #letters < 2 * WORK and seen == #letters then
    go_on = -1
end
if #selected > 0 then
    selected = known_in(base, selected)
end
if action == 'peek' then
    local bodies, histories = bodies_of(base, selected, true)
    if #bodies < #selected then  -- the bodies are large: the next part has the rest
        selected = {unpack(selected, 1, #bodies)}
        go_on = scores[selected[#selected]]
    end
    return {#selected, go_on, contents_of(base, selected, fetch('HMGET', base .. 'state', selected), bodies, histories)}
end
local refused = action == 'move' and #selected > 0 and refusal_to_send(KEYS[2])
if refused then
    return refused
end
for _, sequence in ipairs(action ~= 'count' and selected or {}) do
    redis.call('ZREM', base .. 'dead', sequence)
    redis.call('ZREM', base .. 'dead:ready', sequence)
    redis.call('ZREM', base .. 'dead:delayed', sequence)
    redis.call('HDEL', base .. 'death', sequence)
    if action == 'move' then  -- without decoding and encoding the head: large numbers would lose digits
        local row, head = row_of(base, sequence, 'd'), redis.call('HGET', base .. 'head', sequence)
        local named = string.sub(json().encode(id_prefix), 1, -2) .. sequence .. '"'
        if not head then
            head = '[' .. named .. ',{},null,null]'
        elseif string.sub(head, 1, 5) == '[null' then
            head = '[' .. named .. string.sub(head, 6)
        end
        if row then
            keep_dead_letter(KEYS[2], row.priority, row.session or '', head,
                redis.call('HGET', base .. 'body', sequence) or '', redis.call('HGET', base .. 'history', sequence))
        end
    end
    if action == 'purge' or action == 'move' then
        for _, key in ipairs({'state', 'head', 'body', 'history'}) do
            redis.call('HDEL', base .. key, sequence)
        end
    else
        local row = row_of(base, sequence, 'd')
        if row then
            row.count, row.place, row.expires = 0, 'q', 0
            put(base, sequence, row, NOW)
        end
    end
end
if action == 'redrive' and #selected > 0 then
    notify(base, false)
elseif action == 'move' and #selected > 0 then
    notify(KEYS[2], false)
end
return {#selected, go_on, is_new and 1 or 0}
