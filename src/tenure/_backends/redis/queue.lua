-- What is asked of queues. The part named "common" stands before each of the others.
--
-- A queue's keys begin with its base, "PREFIXqueue:{NAME}:", and lie in one slot of a cluster:
--   settings          hash    what was declared; a missing field has its default. layout: the version of this layout of
--                             keys, if it is not the first
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
--   untold            list    deaths that no claim has named yet: sequence|count|reason|id
--   live:quiet, dead:quiet        there while hints are held back, see wake
--   claim:LANE        string  the newest claim of one asker: mark|d, q or s|token|sequences, or the session; it ends with
--                             the lock. So a claim whose answer was lost can be given back
--   named:LANE        string  the mark of the newest claim of that lane that named deaths, and them (JSON); likewise
--
-- A message is in exactly one of ready, delayed, locked, deferred, dead, waiting: their sizes are the statistics.

-- name: common
for _, base in ipairs(KEYS) do  -- of a later layout nothing is read, and nothing written
    local layout = string.sub(base, -1) == ':' and redis.call('HGET', base .. 'settings', 'layout')
    if layout and layout ~= '1' then
        return redis.error_reply('LAYOUT ' .. layout .. ' ' .. base)
    end
end
local clock = redis.call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local RANK = 2 ^ 48   -- a rank is 9 - priority in these units, plus the sequence
local PART = 4000     -- so many arguments go into one command; a script's stack has a limit
local WORK = 128      -- so much that time has brought is looked after at once, so that no script runs for long
local HEAVY = 8192    -- so many bytes that are rewritten count as one more
local CLAIM_BYTES = 4 * 2 ^ 20  -- a claim ends with the message whose body reaches them: as in tenure._queue.broker
local HISTORY = 50
local UNTOLD = 10000  -- so many deaths are kept at most until a claim names them, and not for longer than a day
local QUIET = 5       -- ms
local QUIET_MAX = 100 -- as in wake.py
local NEVER = math.huge

local work = WORK     -- what is left of it
local buried, causes = {}, {}  -- what this script has buried: sequences, and count|reason of each

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

-- Wake those who listen to *channel*, at most once in QUIET ms, or longer if they are many: whatever is done meanwhile
-- wakes nobody. So they are told for how long that is, and look again when it is over. Nothing is missed.
local function wake(channel)
    if redis.call('SET', channel .. ':quiet', '', 'NX', 'PX', QUIET) then
        local heard = redis.pcall('PUBSUB', 'NUMSUB', channel)
        local quiet = math.max(QUIET, math.min(QUIET_MAX, math.floor((tonumber(heard[2]) or 0) / 4)))
        if quiet > QUIET then
            redis.call('PEXPIRE', channel .. ':quiet', quiet)
        end
        redis.pcall('PUBLISH', channel, quiet)
    end
end

local function ring(base, is_dead)
    wake(base .. (is_dead and 'dead' or 'live'))
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

local settings = {}
local function setting(base, name, default)
    local key = base .. name
    if not settings[key] then
        settings[key] = tonumber(redis.call('HGET', base .. 'settings', name) or default)
    end
    return settings[key]
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
    buried[#buried + 1] = sequence
    causes[#causes + 1] = row.count .. '|' .. reason
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
        work = work - math.floor(#history / HEAVY)
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

-- End the lock of a session: it has expired, or was released, and what was received under it does not count. Returns
-- whether that is done: of many messages, a part is looked after, and until all are, the session is nobody else's.
local function leave(base, session, is_expired)
    local held = redis.call('SPOP', base .. 'held:' .. session, math.max(work, 1))
    work = work - #held - 1
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
    if redis.call('EXISTS', base .. 'held:' .. session) == 1 then
        return false
    end
    redis.call('HDEL', base .. 'session_token', session)
    redis.call('ZREM', base .. 'sessions', session)
    refresh(base, session)
    return true
end

-- --- time ---

-- Do a part of what time has brought; returns whether there may be more of it.
local function catch_up(base)
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
    local function put_anew(sequence)
        local row = row_of(base, sequence)
        take_out(base, sequence, row)
        put(base, sequence, row, NOW)
    end
    each('locked', function(sequence)
        redis.call('ZREM', base .. 'locked', sequence)
        lock_ends(base, sequence)
    end)
    each('sessions', function(session)
        leave(base, session, true)
    end)
    each('expiry', put_anew)
    each('delayed', put_anew)
    for _, key in ipairs({'dead:locked', 'dead:delayed'}) do
        each(key, function(sequence)
            redis.call('ZREM', base .. key, sequence)
            put(base, sequence, row_of(base, sequence), NOW)
        end)
    end
    return work <= 0
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
local function told(base, sequences, states, bodies, histories)
    local heads = redis.call('HLEN', base .. 'head') > 0 and fetch('HMGET', base .. 'head', sequences) or {}
    local answer = {sequences, states, heads, bodies or fetch('HMGET', base .. 'body', sequences)}
    if histories then
        answer[5] = fetch('HMGET', base .. 'death', sequences)
        answer[6] = histories
    end
    return answer
end

-- Return the bodies of the first of *sequences*, up to the one that reaches CLAIM_BYTES; with histories where they are
-- dead, which count, too. Few are fetched at once, so that large ones are not fetched for nothing.
local function weighed(base, sequences, is_dead)
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

-- --- claims without an answer ---

-- Note a claim, so that it can be given back if its answer is lost. An asker has a lane for each claim under way.
local function note_claim(base, lane, mark, kind, token, what, lock)
    redis.call('SET', base .. 'claim:' .. lane, mark .. '|' .. kind .. '|' .. token .. '|' .. what, 'PX', lock)
end

local function give_back(base, kind, token, what)
    if kind == 's' then
        if redis.call('HGET', base .. 'session_token', what) == token then
            leave(base, what, false)
        end
        return
    end
    local is_dead = kind == 'd'
    local locks = base .. (is_dead and 'dead:locked' or 'locked')
    for sequence in string.gmatch(what, '%d+') do
        local score = redis.call('ZSCORE', locks, sequence)
        local row = score and row_of(base, sequence)
        if row and row.token == token then
            work = work - 1
            redis.call('ZREM', locks, sequence)
            if row.session then
                redis.call('SREM', base .. 'held:' .. row.session, sequence)
            end
            if not is_dead then
                row.count = row.count - 1
            end
            put(base, sequence, row, NOW)
        end
    end
end

-- Give back the claims that ARGV names from *first* on, by lane and mark, uncounted: nobody knows of them. Returns the
-- lanes of those that were there. The others may still come.
local function give_back_claims(base, first)
    local found = {}
    for i = first, #ARGV, 2 do
        local key = base .. 'claim:' .. ARGV[i]
        local mark, kind, token, what = string.match(redis.call('GET', key) or '', '^([^|]*)|(%a)|([^|]*)|(.*)$')
        if mark == ARGV[i + 1] then
            redis.call('DEL', key)
            give_back(base, kind, token, what)
            found[#found + 1] = ARGV[i]
        end
        local named = redis.call('GET', base .. 'named:' .. ARGV[i])
        named = named and cjson.decode(named)
        if named and named[1] == ARGV[i + 1] then
            redis.call('DEL', base .. 'named:' .. ARGV[i])
            many('RPUSH', base .. 'untold', named[2])
            found[#found + 1] = ARGV[i]
        end
    end
    return found
end

-- --- deaths of no verdict ---

-- Name what this script has buried, each with its id, or none if that was made up.
local function deaths(base)
    local named = {}
    for i, head in ipairs(#buried > 0 and fetch('HMGET', base .. 'head', buried) or {}) do
        local id = head and cjson.decode(head)[1]
        named[i] = buried[i] .. '|' .. causes[i] .. '|' .. (type(id) == 'string' and id or '')
    end
    return named
end

-- Keep those for the next claim: the answer of this script names none.
local function keep_deaths(base)
    if #buried > 0 then
        many('RPUSH', base .. 'untold', deaths(base))
        redis.call('LTRIM', base .. 'untold', -UNTOLD, -1)
        redis.call('EXPIRE', base .. 'untold', 86400)
    end
end

-- Name them, and of those that were kept a part; note what is named, so that it can be named again if that is lost.
local function told_deaths(base, lane, mark, lock)
    local named = deaths(base)
    for _, one in ipairs(redis.call('LPOP', base .. 'untold', WORK) or {}) do
        named[#named + 1] = one
    end
    if #named > 0 then
        redis.call('SET', base .. 'named:' .. lane, cjson.encode({mark, named}), 'PX', lock)
    end
    return named
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

-- Forget ids that are older than their window: a few more than come in, so that it never is much at once.
local function sweep(base, set, until_then, size)
    local old = redis.call('ZRANGEBYSCORE', base .. set, '-inf', until_then, 'LIMIT', 0, size * 2 + 8)
    many('ZREM', base .. set, old)
end

-- Keep a message; *control* is delay|at|ttl|priority|session, or nothing. Returns its sequence, or 0 for a duplicate.
local function keep(base, control, id, head, body)
    if id ~= '' then
        local window = setting(base, 'dedupe_window', 600) * 1000
        sweep(base, 'ids', NOW - window, 1)
        local known = redis.call('ZSCORE', base .. 'ids', id)
        if known and tonumber(known) > NOW - window then
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

-- Keep a dead letter of another queue, whatever ids are remembered here: its head tells its id.
local function keep_anew(base, priority, session, head, body, history)
    local sequence = keep(base, '0|0|0|' .. priority .. '|' .. session, '', head, body)
    if history and history ~= '' then
        redis.call('HSET', base .. 'history', sequence, history)
    end
end

-- name: keep_anew (for each: priority, session, head, body, history, any of which may be empty)
for i = 1, #ARGV, 5 do
    keep_anew(KEYS[1], ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4])
end
ring(KEYS[1], false)
return is_new and 1 or 0

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

-- name: receive (limit, lock in ms, token, whether they are dead letters, lane, then lanes and marks to give back)
local base, limit, token, is_dead = KEYS[1], tonumber(ARGV[1]), ARGV[3], ARGV[4] == '1'
local room = is_dead and 'dead:' or ''
local ends = NOW + ARGV[2]
local sequences, states, left = {}, {}, {}
local locks, changes, timed = {}, {}, {}
local found = give_back_claims(base, 6)
local more = catch_up(base)
local bodies, histories
repeat
    local popped = redis.call('ZPOPMIN', base .. room .. 'ready', limit)
    local some, ranks = {}, {}
    for i = 1, #popped, 2 do
        some[#some + 1], ranks[#ranks + 1] = popped[i], popped[i + 1]
    end
    local texts = fetch('HMGET', base .. 'state', some)
    local live = {}
    if is_dead or redis.call('EXISTS', base .. 'expiry') == 0 then  -- none has a ttl
        live, some = some, {}
    end
    for i, sequence in ipairs(some) do
        local expires = tonumber(string.match(texts[i], '^%d+|%d+|%d|(%d+)'))
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
    bodies, histories = weighed(base, live, is_dead)
    for i, sequence in ipairs(live) do
        if i <= #bodies then
            -- As read and text_of would do it, but without making a table for each message.
            local count, told_once, expires, place, session =
                string.match(texts[i], '^(%d+)(|%d+|%d|)(%d+)|(%a)||(.*)$')
            if not is_dead then
                count = count + 1
                if expires ~= '0' then
                    timed[#timed + 1] = sequence
                end
            end
            local text = count .. told_once .. expires .. '|' .. place .. '|' .. token .. '|' .. session
            sequences[i], states[i] = sequence, text
            locks[i * 2 - 1], locks[i * 2] = ends, sequence
            changes[i * 2 - 1], changes[i * 2] = sequence, text
        else
            left[#left + 1], left[#left + 2] = ranks[i], sequence
        end
    end
until #sequences > 0 or #left > 0 or #popped < limit * 2  -- else all that was popped has expired
many('ZADD', base .. room .. 'ready', left)
many('HSET', base .. 'state', changes)
many('ZADD', base .. room .. 'locked', locks)
many('ZREM', base .. 'expiry', timed)
if #sequences > 0 then
    note_claim(base, ARGV[5], token, is_dead and 'd' or 'q', token, table.concat(sequences, ' '), ARGV[2])
end
local due = -1
if #sequences < limit then
    due = (more or redis.call('EXISTS', base .. room .. 'ready') == 1) and 0
        or due_in(base, {room .. 'delayed', room .. 'locked'})
end
local died = {}
if is_dead then
    keep_deaths(base)
else
    died = told_deaths(base, ARGV[5], token, ARGV[2])
end
return {ends, due, told(base, sequences, states, bodies, histories), found, died}

-- name: receive_deferred (lock in ms, token, lane, how many sequences, the sequences, then lanes and marks to give back)
local base, ends, token, last = KEYS[1], NOW + ARGV[1], ARGV[2], 4 + ARGV[4]
local found = give_back_claims(base, last + 1)
catch_up(base)
keep_deaths(base)
local sequences, states = {}, {}
for i = 5, last do
    local sequence = ARGV[i]
    if redis.call('ZREM', base .. 'deferred', sequence) == 1 then
        local row = row_of(base, sequence)
        row.count, row.token = row.count + 1, token
        save(base, sequence, row)
        redis.call('ZADD', base .. 'locked', ends, sequence)
        sequences[#sequences + 1], states[#states + 1] = sequence, text_of(row)
    end
end
if #sequences > 0 then
    note_claim(base, ARGV[3], token, 'q', token, table.concat(sequences, ' '), ARGV[1])
end
return {ends, -1, told(base, sequences, states), found, {}}

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
                sweep(base, 'inbox', NOW, 1)
                redis.call('ZADD', base .. 'inbox', 'GT', NOW + extra[1], extra[2])
            end
            for _, send in ipairs(sends) do
                keep(unpack(send))
                rung[send[1] .. 'live'] = true
            end
        end
    end
end
for channel in pairs(rung) do
    wake(channel)
end
return answers

-- name: accept (lock in ms, token, whether a session is named, its name, lane, then lanes and marks to give back)
local base, ends, session = KEYS[1], NOW + ARGV[1], ARGV[3] == '1' and ARGV[4]
local found = give_back_claims(base, 6)
local more = catch_up(base)
if not session then
    session = redis.call('ZRANGE', base .. 'free', 0, 0)[1]
elseif redis.call('HEXISTS', base .. 'session_token', session) == 1 then
    session = nil
end
if not session then
    local due = more and 0 or due_in(base, {'delayed', 'sessions'})
    return {found, due, told_deaths(base, ARGV[5], ARGV[2], ARGV[1])}
end
keep_deaths(base)
note_claim(base, ARGV[5], ARGV[2], 's', ARGV[2], session, ARGV[1])
redis.call('HSET', base .. 'session_token', session, ARGV[2])
redis.call('ZADD', base .. 'sessions', ends, session)
redis.call('ZREM', base .. 'free', session)
return {found, ends, session, redis.call('HGET', base .. 'session_state', session)}

-- name: receive_session (session, token, limit, lane, mark, then lanes and marks to give back)
local base, session, token, limit = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local found = give_back_claims(base, 6)
local more = catch_up(base)
local ends = session_holds(base, session, token)
if not ends then
    keep_deaths(base)
    return {0, found}
end
local sequences, states, size = {}, {}, 0
while #sequences < limit and size < CLAIM_BYTES do
    local sequence = next_of(base, session)
    if not sequence then
        break
    end
    local row = row_of(base, sequence)
    if row.expires > 0 and row.expires <= NOW then  -- more of them than were looked after just now
        if work <= 0 then
            more = true
            break
        end
        work = work - 1
        take_out(base, sequence, row)
        put(base, sequence, row, NOW)
    else
        take_out(base, sequence, row)
        row.count, row.token = row.count + 1, token
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
local due = -1
if #sequences < limit then
    due = (more or next_of(base, session)) and 0 or due_in(base, {'delayed'})
end
return {ends, due, told(base, sequences, states), found, told_deaths(base, ARGV[4], ARGV[5], left)}

-- name: release (session, token)
-- Returns 2 while more was received under the lock than one script gives back: then it is to be asked again.
if not session_holds(KEYS[1], ARGV[1], ARGV[2]) then
    return 0
end
local is_done = leave(KEYS[1], ARGV[1], false)
keep_deaths(KEYS[1])
if not is_done then
    return 2
end
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

-- name: stats (whether to count at once)
-- Returns nothing while more has come due than one script looks after: then it is to be asked again. What is counted at
-- once all the same is counted where it most likely belongs.
local base = KEYS[1]
local more = catch_up(base)
keep_deaths(base)
if more and ARGV[1] == '0' then
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
local function due(key)
    return redis.call('ZCOUNT', base .. key, '-inf', NOW)
end
local age = oldest and math.max(0, NOW - row_of(base, oldest).sent) or 0
local orphaned, delayed, expired = due('locked'), due('delayed'), due('expiry')
local ready = size('ready') + size('waiting') + orphaned + delayed - expired
return {
    math.max(0, ready), size('locked') - orphaned, size('delayed') - delayed, size('deferred'), size('dead') + expired, age,
}

-- name: waiting (limit, after, whether those that are ready are meant, and those that are deferred)
-- Returns the lowest sequences behind *after* of what is there in order of them, sorted.
local base, limit, after = KEYS[1], ARGV[1], tonumber(ARGV[2])
local found = {}
local function look(key, from, till)
    for _, sequence in ipairs(redis.call('ZRANGEBYSCORE', base .. key, from, till, 'LIMIT', 0, limit)) do
        found[#found + 1] = tonumber(sequence)
    end
end
if ARGV[3] == '1' then
    for priority = 0, 9 do
        local from = (9 - priority) * RANK
        look('ready', string.format('%.0f', from + after + 1), string.format('%.0f', from + RANK - 1))
    end
    look('waiting', '(' .. ARGV[2], '+inf')
end
if ARGV[4] == '1' then
    look('deferred', '(' .. ARGV[2], '+inf')
end
table.sort(found)
return {unpack(found, 1, math.min(#found, tonumber(limit)))}

-- name: live (what: peek, count or purge; states, of rldf; session or nothing; sent before in ms or nothing; begin of made-up
-- ids; how many ids, the ids, -1 for any; then sequences)
-- Looks at these messages. Returns how many of them were meant and, for peek, them with their states and the moments that
-- go with those; if they are large, of the first only, and then the one behind which to go on.
local base, what, states, session, before, made_up = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local first, ids = 7 + math.max(0, tonumber(ARGV[6])), nil
if tonumber(ARGV[6]) >= 0 then
    ids = {}
    for i = 7, first - 1 do
        ids[ARGV[i]] = true
    end
end
catch_up(base)
keep_deaths(base)
local function id_of(sequence)
    local head = redis.call('HGET', base .. 'head', sequence)
    local id = head and cjson.decode(head)[1]
    return type(id) == 'string' and id or made_up .. sequence
end
local meant, letters, moments = {}, {}, {}
for i = first, #ARGV do
    local sequence = ARGV[i]
    local row = row_of(base, sequence)
    if row and row.place ~= 'd' then
        local letter, moment = 'r', 0
        if row.token ~= '' then
            letter, moment = 'l', tonumber(redis.call('ZSCORE', base .. 'locked', sequence) or 0)
            if moment == NEVER then
                moment = tonumber(redis.call('ZSCORE', base .. 'sessions', row.session) or 0)
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
            and (not before or tonumber(row.sent) < before) and (not ids or ids[id_of(sequence)]) then
            meant[#meant + 1], letters[#letters + 1], moments[#moments + 1] = sequence, letter, moment
            if what == 'purge' then
                take_out(base, sequence, row)
                redis.call('ZREM', base .. 'deferred', sequence)
                for _, key in ipairs({'state', 'head', 'body', 'history'}) do
                    redis.call('HDEL', base .. key, sequence)
                end
                if row.session then  -- it may have held up others
                    ring(base, false)
                end
            end
        end
    end
end
if what ~= 'peek' then
    return {#meant}
end
local bodies = weighed(base, meant, false)
local go_on = -1
if #bodies < #meant then
    meant = {unpack(meant, 1, #bodies)}
    go_on = tonumber(meant[#meant])
end
return {#meant, go_on, told(base, meant, fetch('HMGET', base .. 'state', meant), bodies), letters, moments}

-- name: peek_deferred (limit, after)
local base = KEYS[1]
catch_up(base)
keep_deaths(base)
local sequences = redis.call('ZRANGEBYSCORE', base .. 'deferred', '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[1])
return {0, -1, told(base, sequences, fetch('HMGET', base .. 'state', sequences)), {}, {}}

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
keep_deaths(base)
local rooms = {'ready', 'waiting', 'locked', 'delayed', 'deferred', 'dead'}
local found, names = {}, {}
for _, key in ipairs(rooms) do
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
        refresh(base, row.session)
    end
end
for _, key in ipairs({'dead:ready', 'dead:delayed', 'dead:locked', 'expiry', unpack(rooms)}) do
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
    'dead:locked', 'ids', 'inbox', 'free', 'sessions', 'session_token', 'session_state', 'untold', unpack(rooms),
}) do
    redis.call('UNLINK', base .. key)
end
return 1

-- name: delete_when_idle (name, ms)
return redis.call('ZADD', KEYS[1], NOW + ARGV[2], ARGV[1])

-- name: idle
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', NOW, 'LIMIT', 0, 100)
