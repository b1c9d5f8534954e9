-- Claims, and the return of claims whose answer was lost.

-- Return the contents of the messages *sequences*. Often no message of a queue has a head.
local function contents_of(base, sequences, states, bodies, histories)
    local heads = redis.call('HLEN', base .. 'head') > 0 and fetch('HMGET', base .. 'head', sequences) or {}
    local answer = {sequences, states, heads, bodies or fetch('HMGET', base .. 'body', sequences)}
    if histories then
        answer[5] = fetch('HMGET', base .. 'death', sequences)
        answer[6] = histories
    end
    return answer
end

-- Return the bodies of the first of *sequences*, up to the one that reaches CLAIM_BYTES; of dead letters with their
-- histories, which count, too. Few are fetched at once, so that few large bodies are fetched in vain.
local function bodies_of(base, sequences, is_dead)
    local step = math.max(1, math.min(50, math.floor(CLAIM_BYTES * 5 / setting(base, 'body_max', 2 ^ 20))))
    local bodies, histories, size = {}, is_dead and {} or nil, 0
    local last = 0
    while last < #sequences do
        local first = last + 1
        last = math.min(last + step, #sequences)
        local some = redis.call('HMGET', base .. 'body', unpack(sequences, first, last))
        local more = is_dead and redis.call('HMGET', base .. 'history', unpack(sequences, first, last))
        for i = 1, #some do
            bodies[first + i - 1] = some[i]
            size = size + #(some[i] or '')
            if more then
                histories[first + i - 1] = more[i]
                size = size + #(more[i] or '')
            end
            if size >= CLAIM_BYTES then
                return bodies, histories
            end
        end
    end
    return bodies, histories
end

-- Return the row if *token* locks it now.
local function locked_row(base, is_dead, text, score, token)
    if not text or not score or token == '' then
        return nil
    end
    local row = read(text)
    if row.token ~= token or (row.place == 'd') ~= is_dead then
        return nil
    end
    local ends = tonumber(score)
    if ends == NEVER then
        ends = not row.session and 0 or tonumber(redis.call('ZSCORE', base .. 'sessions', row.session) or 0)
    end
    return ends > NOW and row or nil
end

-- Store a claim, so that it can be given back if its answer is lost. Each claim that waits for its answer has a lane of
-- its own.
local function note_claim(base, lane, mark, kind, token, held, lock)
    redis.call('SET', base .. 'claim:' .. lane, mark .. '|' .. kind .. '|' .. token .. '|' .. held, 'PX', lock)
end

local function give_back(base, kind, token, held)
    if kind == 's' then
        if redis.call('HGET', base .. 'session_token', held) == token then
            end_session_lock(base, held, false)
        end
        return
    end
    local is_dead = kind == 'd'
    local locks = base .. (is_dead and 'dead:locked' or 'locked')
    for sequence in string.gmatch(held, '%d+') do
        local score = redis.call('ZSCORE', locks, sequence)
        local row = score and row_of(base, sequence, is_dead and 'd' or 'q')
        if row and row.token == token then
            work = work - 1
            redis.call('ZREM', locks, sequence)
            if row.session then
                redis.call('SREM', base .. 'held:' .. row.session, sequence)
            end
            if not is_dead then
                row.count = math.max(0, row.count - 1)
            end
            put(base, sequence, row, NOW)
        end
    end
end

-- Give back the claims that ARGV names from *first* on, by lane and mark, uncounted: their answers were lost. Return the
-- lanes of those that were found. The others may still be executed.
local function give_back_claims(base, first)
    local found = {}
    for i = first, #ARGV, 2 do
        local key = base .. 'claim:' .. ARGV[i]
        local mark, kind, token, held = string.match(redis.call('GET', key) or '', '^([^|]*)|(%a)|([^|]*)|(.*)$')
        if mark == ARGV[i + 1] then
            redis.call('DEL', key)
            give_back(base, kind, token, held)
            if kind ~= 'd' and frees_places(base) then  -- this claim may leave them to others
                notify(base, false)
            end
            found[#found + 1] = ARGV[i]
        end
        local named = redis.call('GET', base .. 'named:' .. ARGV[i])
        named = named and decoded(named)
        if named and named[1] == ARGV[i + 1] then
            redis.call('DEL', base .. 'named:' .. ARGV[i])
            for _, one in ipairs(type(named[2]) == 'table' and named[2] or {}) do
                redis.call('RPUSH', base .. 'untold', tostring(one))
            end
            found[#found + 1] = ARGV[i]
        end
    end
    return found
end

-- The answer to a claim ends with 0 if the queue has no limits, 1 if it has some, 2 if they hold back a message; and with
-- what tells the queue from one that was deleted.

-- name: receive (limit, lock in ms, token, whether they are dead letters, lane, then lanes and marks to give back)
local base, limit, token, is_dead = KEYS[1], tonumber(ARGV[1]), ARGV[3], ARGV[4] == '1'
local prefix, place = is_dead and 'dead:' or '', is_dead and 'd' or 'q'
local ends = NOW + ARGV[2]
local sequences, states, left = {}, {}, {}
local locks, changes, timed = {}, {}, {}
local found = give_back_claims(base, 6)
local more = apply_due(base)
local limits = not is_dead and limits_of(base)
local most = limits and math.min(limit, allowance_of(base, limits)) or limit
local bodies, histories
repeat
    local popped = redis.call('ZPOPMIN', base .. prefix .. 'ready', most)
    local some, ranks = {}, {}
    for i = 1, #popped, 2 do
        some[#some + 1], ranks[#ranks + 1] = popped[i], popped[i + 1]
    end
    local texts = fetch('HMGET', base .. 'state', some)
    for i = #some, 1, -1 do
        if not texts[i] or not is_sequence(some[i]) then
            work = work - 1
            local row = row_of(base, some[i], place)
            if row then
                texts[i] = text_of(row)
            else
                table.remove(some, i)
                table.remove(texts, i)
                table.remove(ranks, i)
            end
        end
    end
    local live = {}
    if is_dead or redis.call('EXISTS', base .. 'expiry') == 0 then  -- none expires
        live, some = some, {}
    end
    for i, sequence in ipairs(some) do
        local expires = tonumber(string.match(texts[i], '^%d+|%d+|%d|(%d+)') or 0)
        if expires == 0 or expires > NOW then
            live[#live + 1], texts[#live + 1], ranks[#live + 1] = sequence, texts[i], ranks[i]
        elseif work > 0 then
            work = work - 1
            local row = read(texts[i])
            take_out(base, sequence, row)
            put(base, sequence, row, NOW)
        else
            left[#left + 1], left[#left + 2] = ranks[i], sequence
        end
    end
    bodies, histories = bodies_of(base, live, is_dead)
    for i, sequence in ipairs(live) do
        if i <= #bodies then
            -- The same as with read and text_of, but without a table for each message.
            local count, fixed, expires, found_in, session =
                string.match(texts[i], '^(%d+)(|%d+|%d|)(%d+)|([qfd])||(.*)$')
            if not count or #count > 9 then
                local row = read(texts[i], place)
                row.token = ''
                count, fixed, expires, found_in, session =
                    string.match(text_of(row), '^(%d+)(|%d+|%d|)(%d+)|(%a)||(.*)$')
            end
            if not is_dead then
                count = math.min(count + 1, COUNT_MAX)
                if expires ~= '0' then
                    timed[#timed + 1] = sequence
                end
            end
            local text = count .. fixed .. expires .. '|' .. found_in .. '|' .. token .. '|' .. session
            sequences[i], states[i] = sequence, text
            locks[i * 2 - 1], locks[i * 2] = ends, sequence
            changes[i * 2 - 1], changes[i * 2] = sequence, text
        else
            left[#left + 1], left[#left + 2] = ranks[i], sequence
        end
    end
-- Otherwise all popped messages have expired.
until #sequences > 0 or #left > 0 or work <= 0 or #popped < math.max(1, most * 2)
many('ZADD', base .. prefix .. 'ready', left)
many('HSET', base .. 'state', changes)
many('ZADD', base .. prefix .. 'locked', locks)
many('ZREM', base .. 'expiry', timed)
if #sequences > 0 then
    note_claim(base, ARGV[5], token, is_dead and 'd' or 'q', token, table.concat(sequences, ' '), ARGV[2])
end
local due, limited = -1, limits and 1 or 0
if limits then
    note_delivered(base, limits, #sequences)
end
if #sequences < limit then
    local is_ready = redis.call('EXISTS', base .. prefix .. 'ready') == 1
    if limits and is_ready and #sequences == most then
        due, limited = more and 0 or due_in_despite(limits, base, {'delayed', 'locked'}), 2
    else
        due = (more or is_ready) and 0 or due_in(base, {prefix .. 'delayed', prefix .. 'locked'})
    end
end
local died = {}
if is_dead then
    keep_deaths(base)
else
    died = take_deaths(base, ARGV[5], token, ARGV[2])
end
return {ends, due, contents_of(base, sequences, states, bodies, histories), found, died, limited, made}

-- name: receive_deferred (lock in ms, token, lane, how many sequences, the sequences, then lanes and marks to give back)
local base, ends, token, last = KEYS[1], NOW + ARGV[1], ARGV[2], 4 + ARGV[4]
local found = give_back_claims(base, last + 1)
apply_due(base)
keep_deaths(base)
local limits = limits_of(base)
local most, limited = limits and allowance_of(base, limits) or NEVER, limits and 1 or 0
local sequences, states = {}, {}
for i = 5, last do
    local sequence = ARGV[i]
    if #sequences >= most then
        if redis.call('ZSCORE', base .. 'deferred', sequence) then
            limited = 2
            break
        end
    elseif redis.call('ZREM', base .. 'deferred', sequence) == 1 then
        local row = row_of(base, sequence, 'f')
        if row then
            row.count, row.token = math.min(row.count + 1, COUNT_MAX), token
            save(base, sequence, row)
            redis.call('ZADD', base .. 'locked', ends, sequence)
            sequences[#sequences + 1], states[#states + 1] = sequence, text_of(row)
        end
    end
end
if #sequences > 0 then
    note_claim(base, ARGV[3], token, 'q', token, table.concat(sequences, ' '), ARGV[1])
end
if limits then
    note_delivered(base, limits, #sequences)
end
return {ends, -1, contents_of(base, sequences, states), found, {}, limited, made}
