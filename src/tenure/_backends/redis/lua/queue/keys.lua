-- The keys of a queue, and the beginning of every script about queues.
--
-- A queue's keys begin with its base, "PREFIXqueue:{NAME}:", and are in one slot of a cluster:
--   settings          hash    the declared settings; a missing field has its default. layout: the version of this
--                             layout of keys, if it is not the first. made: when the first was declared, which tells
--                             the queue from one of the same name that was deleted
--   sequence          number  the newest sequence
--   retired           number  the same of a queue that was deleted; for eight days, which is longer than any lock
--   state             hash    sequence -> count|sent|priority|expires|place|token|session; times in ms, 0 for never
--                             place: the place of the message when it is not locked: q in the queue, f deferred, d dead
--                             token: the lock's, empty if it is not locked; it tells its process, see tokens.py
--   head, body        hashes  sequence -> id, headers, reply_to, correlation_id (JSON; missing if it has none), its body
--   history           hash    sequence -> its attempts, a line each: number|at|outcome|error (JSON)
--   death             hash    sequence -> reason, description, at (JSON)
--   ready             zset    claimable, without session, by rank: priority, then sequence
--   delayed           zset    by the time at which they become claimable
--   expiry            zset    claimable or delayed ones that expire, by that time
--   locked            zset    by the end of the lock; +inf for those that a session's lock covers
--   deferred          zset    by sequence
--   dead              zset    all dead letters by sequence; each of them is in one of the next three
--   dead:ready, dead:delayed, dead:locked            as above
--   ids, inbox        zsets   ids of sent messages, by the time of sending; of completed ones, by the end of the window
--   session:NAME      zset    claimable, of this session, by sequence
--   late:NAME         zset    delivered before and now delayed, or delayed by the session's rate: they hold up those of
--                             their session behind them
--   held:NAME         set     locked under the lock of this session
--   waiting           zset    all that are in a session:NAME, by sequence
--   free              zset    sessions that can be accepted, by the sequence of their next message
--   sessions          zset    locked sessions, by the end of the lock
--   session_token, session_state                     hashes by session
--   schedules         hash    schedule -> what is kept of it
--   delivered         string  what was received in the window of the queue's rate: bursts of began|at|number, times in
--                             ms with fractions; it expires when none counts
--   delivered_in      hash    session -> the same for the session's rate
--   delivered_until   zset    those sessions, by the time at which none counts
--   untold            list    deaths that no claim has reported yet: sequence|count|reason|id
--   live:quiet, dead:quiet        exist while hints are suppressed, see publish
--   claim:LANE        string  the newest claim of one lane: mark|d, q or s|token|sequences, or the session; it expires
--                             with the lock. So a claim whose answer was lost can be given back
--   named:LANE        string  the mark and the deaths (JSON) of the newest claim of that lane that reported any; as above
--
-- Other programs can write here, too. So nothing is written before all has been read that it needs; what is unreadable of a
-- message is ignored, and what is no message, or has been deleted, is dropped from its place. One that is unreadable thus
-- fails no script, and stops none of the others.
--
-- A message is in exactly one of ready, delayed, locked, deferred, dead, waiting: their sizes are the statistics.

for _, base in ipairs(KEYS) do  -- neither read nor write a later layout
    local layout = string.sub(base, -1) == ':' and redis.call('HGET', base .. 'settings', 'layout')
    if layout and layout ~= '1' then
        return redis.error_reply('LAYOUT ' .. layout .. ' ' .. base)
    end
end
local clock = redis.call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local RANK = 2 ^ 48   -- a rank is 9 - priority in these units, plus the sequence
local PART = 4000     -- the most arguments of one command; a script's stack has a limit
local WORK = 128      -- the most due messages that one script handles, so that none runs for long
local HEAVY = 8192    -- rewritten bytes that count as one message more
local CLAIM_BYTES = {claim_bytes}  -- a claim ends with the message whose body reaches this size
local HISTORY_MAX = {history_max}
local HISTORY_SIZE = {history_size}  -- a longer one was not written by these scripts
local DEATHS_MAX = 10000  -- the most deaths that are kept until a claim reports them, for a day
local QUIET = 5       -- ms
local QUIET_MAX = 100 -- as in wake.py
local NEVER = math.huge
local COUNT_MAX = 2 ^ 31 - 1
local TIME_MAX = 99999999999999  -- ms, in the year 5138; Lua writes larger numbers with an exponent

local work = WORK     -- the number that is left

local made = redis.call('HGET', KEYS[1] .. 'settings', 'made') or ''  -- empty if nothing is declared

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
