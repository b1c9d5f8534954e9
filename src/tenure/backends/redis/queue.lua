-- What is asked of queues. The part named "common" stands before each of the others.
--
-- A queue's keys begin with its base, "PREFIXqueue:{NAME}:", and lie in one slot of a cluster:
--   settings          hash    what was declared; a missing field has its default
--   sequence          number  the newest sequence given out
--   retired           number  the same of a queue that was deleted; for eight days, which is longer than any lock
--   state             hash    sequence -> count|sent|priority|expires|place|token|session; times in ms, 0 for never
--                             place: where an unlocked message belongs: q in the queue, f deferred, d dead
--                             token: the lock's, empty if it is not locked
--   head, body        hashes  sequence -> what its sender told (JSON; missing if there is nothing to tell), its content
--   history           hash    sequence -> its attempts, a line each: number|at|outcome|error (JSON)
--   death             hash    sequence -> reason, description, at (JSON)
--   ready             zset    claimable, without session, by rank: priority, then sequence
--   delayed           zset    by the moment they become claimable
--   expiry            zset    claimable or delayed, with a ttl, by its end
--   locked            zset    by the end of the lock; +inf for those that a session's lock covers
--   deferred          zset    by sequence
--   dead              zset    all dead letters by sequence; each of them is in one of the next three
--   dead:ready, dead:delayed, dead:locked            as above
--   ids, inbox        zsets   ids of messages sent, by when; ids completed, by until when they are remembered
--   session:NAME      zset    claimable, of this session, by sequence
--   late:NAME         zset    delivered before and now delayed: they hold up those of their session behind them
--   held:NAME         set     locked under the lock of this session
--   waiting           zset    all that are in some session:NAME, by sequence
--   free              zset    sessions that can be accepted, by the sequence that is next
--   sessions          zset    locked sessions, by the end of the lock
--   session_token, session_state                     hashes by session
--
-- A message is in exactly one of ready, delayed, locked, deferred, dead, waiting: their sizes are the statistics.

-- name: common
local clock = redis.call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local RANK = 2 ^ 48   -- a rank is 9 - priority in these units, plus the sequence
local PART = 4000     -- so many arguments go into one command; a script's stack has a limit
local DUE = 1000      -- so much that time has brought is looked after at once, so that no script runs for long
local HISTORY = 50
local NEVER = math.huge

local function many(command, key, arguments)
    for first = 1, #arguments, PART do
        redis.call(command, key, unpack(arguments, first, math.min(first + PART - 1, #arguments)))
    end
end

local function fetch(command, key, fields)
    local found = {}
    for first = 1, #fields, PART do
        local part = redis.call(command, key, unpack(fields, first, math.min(first + PART - 1, #fields)))
        for i = 1, #part do
            found[first + i - 1] = part[i]
        end
    end
    return found
end

local function ring(base, is_dead)
    redis.pcall('PUBLISH', base .. (is_dead and 'dead' or 'live'), '')
end

local function read(text)
    local count, sent, priority, expires, place, token, session =
        string.match(text, '^(%d+)|(%d+)|(%d)|(%d+)|(%a)|([^|]*)|(.*)$')
    return {
        count = tonumber(count), sent = sent, priority = tonumber(priority), expires = tonumber(expires),
        place = place, token = token, session = session ~= '' and session or nil,
    }
end

local function text_of(row)
    return row.count .. '|' .. row.sent .. '|' .. row.priority .. '|' .. row.expires .. '|' .. row.place .. '|'
        .. row.token .. '|' .. (row.session or '')
end

local function row_of(base, sequence)
    local text = redis.call('HGET', base .. 'state', sequence)
    return text and read(text)
end

local function save(base, sequence, row)
    redis.call('HSET', base .. 'state', sequence, text_of(row))
end

local function rank(row, sequence)
    return (9 - row.priority) * RANK + sequence
end

local function setting(base, name, default)
    return tonumber(redis.call('HGET', base .. 'settings', name) or default)
end

-- --- sessions ---

local function next_of(base, session)
    local first = redis.call('ZRANGE', base .. 'session:' .. session, 0, 0)[1]
    if not first then
        return nil
    end
    local late = redis.call('ZRANGE', base .. 'late:' .. session, 0, 0)[1]
    return not (late and tonumber(late) < tonumber(first)) and first or nil
end

local function refresh(base, session)
    local first = redis.call('HEXISTS', base .. 'session_token', session) == 0 and next_of(base, session)
    if first then
        redis.call('ZADD', base .. 'free', first, session)
    else
        redis.call('ZREM', base .. 'free', session)
    end
end

-- --- places ---

local function bury(base, sequence, row, reason, description)
    row.place, row.token, row.expires = 'd', '', 0
    save(base, sequence, row)
    redis.call('HSET', base .. 'death', sequence, cjson.encode({reason, description, NOW}))
    redis.call('ZADD', base .. 'dead', sequence, sequence)
    redis.call('ZADD', base .. 'dead:ready', rank(row, sequence), sequence)
    ring(base, true)
end

-- Put an unlocked message where it belongs, claimable from *visible* on. It must be in no place.
local function put(base, sequence, row, visible)
    row.token = ''
    if row.place == 'q' and row.expires > 0 and row.expires <= NOW then
        return bury(base, sequence, row, 'expired', 'not handled before its ttl had ended')
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
            if row.session and row.count > 0 then
                redis.call('ZADD', base .. 'late:' .. row.session, sequence, sequence)
                refresh(base, row.session)
            end
        elseif row.session then
            redis.call('ZADD', base .. 'session:' .. row.session, sequence, sequence)
            redis.call('ZADD', base .. 'waiting', sequence, sequence)
            refresh(base, row.session)
        else
            redis.call('ZADD', base .. 'ready', rank(row, sequence), sequence)
        end
    end
end

-- Take a message that waits out of its place.
local function take_out(base, sequence, row)
    redis.call('ZREM', base .. 'expiry', sequence)
    redis.call('ZREM', base .. 'delayed', sequence)
    if row.session then
        redis.call('ZREM', base .. 'session:' .. row.session, sequence)
        redis.call('ZREM', base .. 'late:' .. row.session, sequence)
        redis.call('ZREM', base .. 'waiting', sequence)
        refresh(base, row.session)
    else
        redis.call('ZREM', base .. 'ready', sequence)
    end
end

local function remember(base, sequence, row, outcome, error)
    local history = redis.call('HGET', base .. 'history', sequence)
    local line = row.count .. '|' .. NOW .. '|' .. outcome .. '|' .. error
    if history then
        local _, lines = string.gsub(history, '\n', '\n')
        if lines + 1 >= HISTORY then
            history = string.match(history, '^[^\n]*\n(.*)$')
        end
        line = history .. '\n' .. line
    end
    redis.call('HSET', base .. 'history', sequence, line)
end

-- Whether *row* has no delivery left; then it is among the dead.
local function exhausted(base, sequence, row)
    if row.count < setting(base, 'max_deliveries', 10) then
        return false
    end
    bury(base, sequence, row, 'max_deliveries', 'delivered ' .. row.count .. ' times, and never completed')
    return true
end

local function lock_ends(base, sequence)
    local row = row_of(base, sequence)
    remember(base, sequence, row, 'expired', '')
    if not exhausted(base, sequence, row) then
        put(base, sequence, row, NOW)
    end
end

-- End the lock of a session: it has expired, or was released, and what was received under it does not count.
local function leave(base, session, is_expired)
    redis.call('HDEL', base .. 'session_token', session)
    redis.call('ZREM', base .. 'sessions', session)
    local held = redis.call('SMEMBERS', base .. 'held:' .. session)
    redis.call('DEL', base .. 'held:' .. session)
    for _, sequence in ipairs(held) do
        redis.call('ZREM', base .. 'locked', sequence)
        if is_expired then
            lock_ends(base, sequence)
        else
            local row = row_of(base, sequence)
            row.count = row.count - 1
            put(base, sequence, row, NOW)
        end
    end
    refresh(base, session)
end

-- --- time ---

-- Do what time has brought; returns whether there is more of it.
local function catch_up(base)
    local found = 0
    local function due(key)
        local some = redis.call('ZRANGEBYSCORE', base .. key, '-inf', NOW, 'LIMIT', 0, DUE)
        found = math.max(found, #some)
        return some
    end
    for _, sequence in ipairs(due('locked')) do
        redis.call('ZREM', base .. 'locked', sequence)
        lock_ends(base, sequence)
    end
    for _, session in ipairs(due('sessions')) do
        leave(base, session, true)
    end
    for _, sequence in ipairs(due('expiry')) do
        local row = row_of(base, sequence)
        take_out(base, sequence, row)
        put(base, sequence, row, NOW)
    end
    for _, sequence in ipairs(due('delayed')) do
        local row = row_of(base, sequence)
        take_out(base, sequence, row)
        put(base, sequence, row, NOW)
    end
    for _, key in ipairs({'dead:locked', 'dead:delayed'}) do
        for _, sequence in ipairs(due(key)) do
            redis.call('ZREM', base .. key, sequence)
            put(base, sequence, row_of(base, sequence), NOW)
        end
    end
    return found == DUE
end

-- In how many ms the first of these comes due; -1 if none will.
local function due_in(base, keys)
    local first = NEVER
    for _, key in ipairs(keys) do
        local at = redis.call('ZRANGE', base .. key, 0, 0, 'WITHSCORES')[2]
        first = math.min(first, at and tonumber(at) or NEVER)
    end
    return first < NEVER and math.max(0, first - NOW) or -1
end

-- --- claims ---

-- What a receiver is told of *sequences*, which are locked already. Often no message of a queue has a head.
local function told(base, sequences, states, with_death)
    local heads = redis.call('HLEN', base .. 'head') > 0 and fetch('HMGET', base .. 'head', sequences) or {}
    local answer = {sequences, states, heads, fetch('HMGET', base .. 'body', sequences)}
    if with_death then
        answer[5] = fetch('HMGET', base .. 'death', sequences)
        answer[6] = fetch('HMGET', base .. 'history', sequences)
    end
    return answer
end

-- Return the row if *token* locks it, at this moment.
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
        ends = tonumber(redis.call('ZSCORE', base .. 'sessions', row.session) or 0)
    end
    return ends > NOW and row or nil
end

local function session_holds(base, session, token)
    local ends = redis.call('ZSCORE', base .. 'sessions', session)
    return ends and tonumber(ends) > NOW and redis.call('HGET', base .. 'session_token', session) == token
        and tonumber(ends) or nil
end

-- --- sending ---

local is_new = false  -- whether a queue has come into being

-- Give out *size* sequences, and return the last of them. Those of a queue that was deleted are not given out again.
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

-- Keep a message; *control* is delay|at|ttl|priority|session, or nothing. Returns its sequence, or 0 for a duplicate.
local function keep(base, control, id, head, body)
    if id ~= '' then
        local window = setting(base, 'dedupe_window', 600) * 1000
        redis.call('ZREMRANGEBYSCORE', base .. 'ids', '-inf', NOW - window)
        if redis.call('ZSCORE', base .. 'ids', id) then
            return 0
        end
        redis.call('ZADD', base .. 'ids', NOW, id)
    end
    local sequence = next_sequences(base, 1)
    local row = {count = 0, sent = NOW, priority = 0, expires = 0, place = 'q', token = ''}
    local visible = NOW
    if control ~= '' then
        local delay, at, ttl, priority, session = string.match(control, '^(%d+)|(%d+)|(%d+)|(%d)|(.*)$')
        visible = math.max(NOW + delay, tonumber(at))
        row.expires = tonumber(ttl) > 0 and NOW + ttl or 0
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

-- name: declare (names and values)
if #ARGV > 0 then
    redis.call('HSET', KEYS[1] .. 'settings', unpack(ARGV))
end

-- name: send (as keep wants them: control, id, head, body; and so on)
-- Returns the sequences, and whether the queue is new: it may have been deleted, and must be listed again.
local base = KEYS[1]
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
ring(base, false)
return {sequences, is_new and 1 or 0}

-- name: receive (limit, lock in ms, token, whether they are dead letters)
local base, limit, token, is_dead = KEYS[1], tonumber(ARGV[1]), ARGV[3], ARGV[4] == '1'
local room = is_dead and 'dead:' or ''
local ends = NOW + ARGV[2]
local sequences, states = {}, {}
local locks, changes, timed = {}, {}, {}
repeat
    local more = catch_up(base)
    local popped = redis.call('ZPOPMIN', base .. room .. 'ready', limit - #sequences)
    local some = {}
    for i = 1, #popped, 2 do
        some[#some + 1] = popped[i]
    end
    local texts = fetch('HMGET', base .. 'state', some)
    for i, sequence in ipairs(some) do
        -- As read and text_of would do it, but without making a table for each message.
        local count, told_once, expires, place, session =
            string.match(texts[i], '^(%d+)(|%d+|%d|)(%d+)|(%a)||(.*)$')
        if expires ~= '0' and tonumber(expires) <= NOW then
            local row = read(texts[i])
            take_out(base, sequence, row)
            put(base, sequence, row, NOW)
        else
            if not is_dead then
                count = count + 1
                if expires ~= '0' then
                    timed[#timed + 1] = sequence
                end
            end
            local text = count .. told_once .. expires .. '|' .. place .. '|' .. token .. '|' .. session
            local size = #sequences + 1
            sequences[size], states[size] = sequence, text
            locks[size * 2 - 1], locks[size * 2] = ends, sequence
            changes[size * 2 - 1], changes[size * 2] = sequence, text
        end
    end
until #sequences >= limit or (#some == 0 and not more)
many('HSET', base .. 'state', changes)
many('ZADD', base .. room .. 'locked', locks)
many('ZREM', base .. 'expiry', timed)
local due = -1
if #sequences < limit then
    due = due_in(base, {room .. 'delayed', room .. 'locked'})
end
return {ends, due, told(base, sequences, states, is_dead)}

-- name: receive_deferred (lock in ms, token, sequences)
local base, ends, token = KEYS[1], NOW + ARGV[1], ARGV[2]
catch_up(base)
local sequences, states = {}, {}
for i = 3, #ARGV do
    local sequence = ARGV[i]
    if redis.call('ZREM', base .. 'deferred', sequence) == 1 then
        local row = row_of(base, sequence)
        row.count, row.token = row.count + 1, token
        save(base, sequence, row)
        redis.call('ZADD', base .. 'locked', ends, sequence)
        sequences[#sequences + 1], states[#states + 1] = sequence, text_of(row)
    end
end
return {ends, -1, told(base, sequences, states, false)}

-- name: renew (lock in ms; for each: number of its key, q, d or s, token, sequence or session)
local ends = NOW + ARGV[1]
local answers = {}
-- Never to an earlier moment: a question that was given up may come after newer ones, which asked for more.
local function extended(key, which)
    redis.call('ZADD', key, 'GT', ends, which)
    return tonumber(redis.call('ZSCORE', key, which))
end
for i = 2, #ARGV, 4 do
    local base, kind, token, which = KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
    local answer = 0
    if kind == 's' then
        if session_holds(base, which, token) then
            answer = extended(base .. 'sessions', which)
        end
    else
        local key = base .. (kind == 'd' and 'dead:locked' or 'locked')
        local score = redis.call('ZSCORE', key, which)
        local row = locked_row(base, kind == 'd', redis.call('HGET', base .. 'state', which), score, token)
        if row and tonumber(score) == NEVER then
            answer = tonumber(redis.call('ZSCORE', base .. 'sessions', row.session))
        elseif row then
            answer = extended(key, which)
        end
    end
    answers[#answers + 1] = answer
end
return answers

-- name: holds (for each: q or d, token, sequence)
local answers = {}
for i = 1, #ARGV, 3 do
    local is_dead, token, which = ARGV[i] == 'd', ARGV[i + 1], ARGV[i + 2]
    local score = redis.call('ZSCORE', KEYS[1] .. (is_dead and 'dead:locked' or 'locked'), which)
    answers[#answers + 1] = locked_row(KEYS[1], is_dead, redis.call('HGET', KEYS[1] .. 'state', which), score, token) and 1 or 0
end
return answers

-- name: settle (groups, each: number of its key, q or d, token, verdict, how many, their sequences, then what the
-- verdict needs: A delay in ms, error. D reason, description, error. X remember in ms, id, how many sends, and each:
-- number of its key, then as keep wants it)
local answers, rung, done = {}, {}, {}
local at = 1
local function argument()
    at = at + 1
    return ARGV[at - 1]
end
local function forget(base, is_dead, sequences)
    for _, key in ipairs({'state', 'body', 'head', 'history'}) do
        if redis.call('HLEN', base .. key) > 0 then
            many('HDEL', base .. key, sequences)
        end
    end
    if is_dead then
        many('HDEL', base .. 'death', sequences)
        many('ZREM', base .. 'dead', sequences)
    end
end
local function judge(verdict, base, is_dead, sequence, row, extra)
    if verdict == 'A' or verdict == 'G' then
        rung[base .. (is_dead and 'dead' or 'live')] = true
        if not is_dead then
            if verdict == 'G' then
                row.count = row.count - 1
            else
                remember(base, sequence, row, 'abandoned', extra[2])
                if exhausted(base, sequence, row) then
                    return 2
                end
            end
        end
        put(base, sequence, row, NOW + (verdict == 'A' and tonumber(extra[1]) or 0))
        return row.place == 'd' and not is_dead and 2 or 1
    elseif verdict == 'F' then
        row.place = 'f'
        put(base, sequence, row, NOW)
    elseif verdict == 'D' then
        remember(base, sequence, row, 'rejected', extra[3])
        bury(base, sequence, row, extra[1], extra[2])
    end
    return 1
end
while at <= #ARGV do
    local base, is_dead = KEYS[tonumber(argument())], argument() == 'd'
    local token, verdict, size = argument(), argument(), tonumber(argument())
    local sequences, extra, sends = {}, {}, {}
    for i = 1, size do
        sequences[i] = argument()
    end
    for i = 1, verdict == 'A' and 2 or verdict == 'D' and 3 or verdict == 'X' and 2 or 0 do
        extra[i] = argument()
    end
    if verdict == 'X' then
        for i = 1, tonumber(argument()) do
            sends[i] = {KEYS[tonumber(argument())], argument(), argument(), argument(), argument()}
        end
    end
    local locks = base .. (is_dead and 'dead:locked' or 'locked')
    local texts = fetch('HMGET', base .. 'state', sequences)
    local scores = fetch('ZMSCORE', locks, sequences)
    local settled = {}
    local is_complete = verdict == 'C' or verdict == 'X'
    local held = (is_dead and '|d|' or '|q|') .. token .. '|'  -- most are so, and need no table made for them
    for i, sequence in ipairs(sequences) do
        local mark = base .. sequence
        local text, score = texts[i], tonumber(scores[i] or 0)
        local row
        if done[mark] then
            row = nil
        elseif is_complete and token ~= '' and text and score > NOW and score < NEVER and string.find(text, held, 1, true) then
            row = true
        else
            row = locked_row(base, is_dead, text, scores[i], token)
        end
        if row then
            done[mark] = true
            settled[#settled + 1] = sequence
            if score == NEVER then
                redis.call('SREM', base .. 'held:' .. row.session, sequence)
            end
            if is_complete then
                answers[#answers + 1] = 1
            else
                redis.call('ZREM', locks, sequence)
                answers[#answers + 1] = judge(verdict, base, is_dead, sequence, row, extra)
            end
        else
            answers[#answers + 1] = 0
        end
    end
    if is_complete then
        many('ZREM', locks, settled)
        forget(base, is_dead, settled)
        if verdict == 'X' and #settled > 0 then
            if tonumber(extra[1]) > 0 then
                redis.call('ZREMRANGEBYSCORE', base .. 'inbox', '-inf', NOW)
                redis.call('ZADD', base .. 'inbox', NOW + extra[1], extra[2])
            end
            for _, send in ipairs(sends) do
                keep(unpack(send))
                rung[send[1] .. 'live'] = true
            end
        end
    end
end
for channel in pairs(rung) do
    redis.pcall('PUBLISH', channel, '')
end
return answers

-- name: accept (lock in ms, token, and the session's name, or not)
local base, ends, session = KEYS[1], NOW + ARGV[1], ARGV[3]
catch_up(base)
if not session then
    session = redis.call('ZRANGE', base .. 'free', 0, 0)[1]
elseif redis.call('HEXISTS', base .. 'session_token', session) == 1 then
    session = nil
end
if not session then
    return {due_in(base, {'delayed', 'sessions'})}
end
redis.call('HSET', base .. 'session_token', session, ARGV[2])
redis.call('ZADD', base .. 'sessions', ends, session)
redis.call('ZREM', base .. 'free', session)
return {ends, session, redis.call('HGET', base .. 'session_state', session)}

-- name: receive_session (session, token, limit)
local base, session, token, limit = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
catch_up(base)
local ends = session_holds(base, session, token)
if not ends then
    return {0}
end
local sequences, states = {}, {}
while #sequences < limit do
    local sequence = next_of(base, session)
    if not sequence then
        break
    end
    local row = row_of(base, sequence)
    take_out(base, sequence, row)
    if row.expires > 0 and row.expires <= NOW then  -- more of them than were looked after just now
        put(base, sequence, row, NOW)
    else
        row.count, row.token = row.count + 1, token
        save(base, sequence, row)
        redis.call('ZADD', base .. 'locked', '+inf', sequence)
        redis.call('SADD', base .. 'held:' .. session, sequence)
        sequences[#sequences + 1], states[#states + 1] = sequence, text_of(row)
    end
end
return {ends, #sequences < limit and due_in(base, {'delayed'}) or -1, told(base, sequences, states, false)}

-- name: release (session, token)
if not session_holds(KEYS[1], ARGV[1], ARGV[2]) then
    return 0
end
leave(KEYS[1], ARGV[1], false)
ring(KEYS[1], false)
return 1

-- name: read_state (session, token)
if not session_holds(KEYS[1], ARGV[1], ARGV[2]) then
    return {0}
end
return {1, redis.call('HGET', KEYS[1] .. 'session_state', ARGV[1])}

-- name: write_state (session, token, and the state, or not)
if not session_holds(KEYS[1], ARGV[1], ARGV[2]) then
    return 0
end
if ARGV[3] then
    redis.call('HSET', KEYS[1] .. 'session_state', ARGV[1], ARGV[3])
else
    redis.call('HDEL', KEYS[1] .. 'session_state', ARGV[1])
end
return 1

-- name: stats
-- Returns nothing while more has come due than one script looks after: then it is to be asked again.
local base = KEYS[1]
if catch_up(base) then
    return {}
end
local oldest = redis.call('ZRANGE', base .. 'waiting', 0, 0)[1]
for priority = 0, 9 do
    local from = (9 - priority) * RANK
    local first = redis.call('ZRANGEBYSCORE', base .. 'ready', from, from + RANK - 1, 'LIMIT', 0, 1)[1]
    if first and (not oldest or tonumber(first) < tonumber(oldest)) then
        oldest = first
    end
end
local function size(key)
    return redis.call('ZCARD', base .. key)
end
local age = oldest and math.max(0, NOW - row_of(base, oldest).sent) or 0
return {size('ready') + size('waiting'), size('locked'), size('delayed'), size('deferred'), size('dead'), age}

-- name: peek_deferred (limit, after)
local base = KEYS[1]
catch_up(base)
local sequences = redis.call('ZRANGEBYSCORE', base .. 'deferred', '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[1])
return {0, -1, told(base, sequences, fetch('HMGET', base .. 'state', sequences), false)}

-- name: dead (what: peek, count, redrive or purge; how many at most, after, dead before in ms or nothing, reason or
-- nothing, begin of made-up ids, how many sequences, the sequences, how many ids, the ids; -1 for any)
-- Looks at a part of the dead letters. Returns how many were meant, where to go on (-1: at the end), and for peek them.
local base, what, limit, after = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
local before, reason, made_up = tonumber(ARGV[4]), ARGV[5], ARGV[6]
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
local looked_at = redis.call('ZRANGEBYSCORE', base .. 'dead', '(' .. after, '+inf', 'LIMIT', 0, DUE)
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
if #looked_at < DUE and (#looked_at == 0 or go_on == tonumber(looked_at[#looked_at])) then
    go_on = -1
end
if what == 'peek' then
    return {#meant, go_on, told(base, meant, fetch('HMGET', base .. 'state', meant), true)}
end
for _, sequence in ipairs(what ~= 'count' and meant or {}) do
    redis.call('ZREM', base .. 'dead', sequence)
    redis.call('ZREM', base .. 'dead:ready', sequence)
    redis.call('ZREM', base .. 'dead:delayed', sequence)
    redis.call('HDEL', base .. 'death', sequence)
    if what == 'purge' then
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
end
return {#meant, go_on}

-- name: handled (ids)
local answers = {}
for i, ends in ipairs(fetch('ZMSCORE', KEYS[1] .. 'inbox', ARGV)) do
    answers[i] = ends and tonumber(ends) > NOW and 1 or 0
end
return answers

-- name: delete (whether to delete it with what it holds)
-- Returns whether it is gone (1), not empty (0), or too much for one step (2).
local base, force = KEYS[1], ARGV[1] == '1'
catch_up(base)
local rooms = {'ready', 'waiting', 'locked', 'delayed', 'deferred', 'dead'}
local found, names = {}, {}
for _, key in ipairs(rooms) do
    for _, sequence in ipairs(redis.call('ZRANGE', base .. key, 0, DUE - 1)) do
        if #found < DUE then
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
        refresh(base, row.session)
    end
end
for _, key in ipairs({'dead:ready', 'dead:delayed', 'dead:locked', 'expiry', unpack(rooms)}) do
    many('ZREM', base .. key, found)
end
for _, key in ipairs({'state', 'head', 'body', 'history', 'death'}) do
    many('HDEL', base .. key, found)
end
if #found == DUE then
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
    'dead:locked', 'ids', 'inbox', 'free', 'sessions', 'session_token', 'session_state', unpack(rooms),
}) do
    redis.call('UNLINK', base .. key)
end
return 1

-- name: delete_when_idle (name, ms)
return redis.call('ZADD', KEYS[1], NOW + ARGV[2], ARGV[1])

-- name: idle
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', NOW, 'LIMIT', 0, 100)
