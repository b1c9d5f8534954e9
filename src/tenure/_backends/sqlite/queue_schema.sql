-- The tables of queues. The content of a message is in tenure_message, written once and removed once; its place is in
-- exactly one of tenure_ready, tenure_delayed, tenure_deferred and the sequences of a tenure_hold. So claiming,
-- completing and returning move a small key, however large the body; and claims search a small table, however many
-- messages are deferred, dead or delayed.

CREATE TABLE IF NOT EXISTS tenure_schema (
    part       TEXT PRIMARY KEY NOT NULL,
    version    INTEGER NOT NULL,
    written_by TEXT NOT NULL
);

-- One row: the newest sequence given, and the clock of the file.
CREATE TABLE IF NOT EXISTS tenure_queue_clock (
    one      INTEGER PRIMARY KEY NOT NULL CHECK (one = 1),
    origin   TEXT NOT NULL,     -- random: makes generated ids differ from those of any other file
    sequence INTEGER NOT NULL,
    boot     TEXT NOT NULL,
    ahead    REAL NOT NULL,     -- how far the wall clock is ahead of the time since that boot, at most
    seen     REAL NOT NULL      -- the latest wall-clock time that was written, now and then
);
INSERT OR IGNORE INTO tenure_queue_clock VALUES (1, lower(hex(randomblob(4))), 0, '', 0, 0);

-- A row per queue and one for its dead letters: even and odd numbers. Each transaction updates the counts.
CREATE TABLE IF NOT EXISTS tenure_queue (
    queue          INTEGER PRIMARY KEY NOT NULL,
    name           TEXT NOT NULL UNIQUE,
    ready          INTEGER NOT NULL DEFAULT 0,
    locked         INTEGER NOT NULL DEFAULT 0,
    delayed        INTEGER NOT NULL DEFAULT 0,
    deferred       INTEGER NOT NULL DEFAULT 0,
    lock           REAL NOT NULL,
    max_deliveries INTEGER NOT NULL,
    dedupe_window  REAL NOT NULL,
    body_max       INTEGER NOT NULL
);

CREATE TABLE IF NOT EXISTS tenure_message (
    sequence       INTEGER PRIMARY KEY NOT NULL,
    queue          INTEGER NOT NULL,
    deliveries     INTEGER NOT NULL,  -- those that have ended; the one under way is not counted here
    enqueued_at    REAL NOT NULL,
    priority       INTEGER NOT NULL,
    id             TEXT,              -- NULL: generated, from the file's origin and the sequence
    headers        TEXT,              -- a JSON object
    session        TEXT,
    due_at         REAL,              -- the end of its present or last delay
    expires_at     REAL,
    reply_to       TEXT,
    correlation_id TEXT,
    history        TEXT,              -- a JSON array of [number, at, outcome, [type, message, traceback] or null]
    body           BLOB NOT NULL      -- last, so that no other column is read from behind it
);

-- Claimable messages, in the order of claiming. Dead letters that are not locked are here too, under their queue.
CREATE TABLE IF NOT EXISTS tenure_ready (
    queue    INTEGER NOT NULL,
    session  TEXT NOT NULL,           -- '' for none
    rank     INTEGER NOT NULL,        -- the priority, negative; 0 in a session
    sequence INTEGER NOT NULL,
    PRIMARY KEY (queue, session, rank, sequence)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS tenure_delayed (
    queue    INTEGER NOT NULL,
    due_at   REAL NOT NULL,
    sequence INTEGER NOT NULL,
    session  TEXT,                    -- only if it blocks those behind it in this session
    PRIMARY KEY (queue, due_at, sequence)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tenure_delayed_in_session ON tenure_delayed (queue, session, sequence)
WHERE session IS NOT NULL;

-- When ready and delayed messages expire.
CREATE TABLE IF NOT EXISTS tenure_expiry (
    queue      INTEGER NOT NULL,
    expires_at REAL NOT NULL,
    sequence   INTEGER NOT NULL,
    PRIMARY KEY (queue, expires_at, sequence)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS tenure_deferred (
    queue    INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (queue, sequence)
) WITHOUT ROWID;

-- The lock groups: a row per claim, with the messages that it locks. Where only a part of a claim was renewed, that part
-- has a row of its own. A locked session is a row too, with or without messages.
CREATE TABLE IF NOT EXISTS tenure_hold (
    token        INTEGER NOT NULL,
    part         INTEGER NOT NULL,
    queue        INTEGER NOT NULL,
    session      TEXT,
    was_deferred INTEGER NOT NULL,    -- its messages return to the deferred ones
    boot         TEXT NOT NULL,
    until        REAL NOT NULL,       -- seconds since that boot
    lock         REAL NOT NULL,       -- the length of the lock
    sequences    BLOB NOT NULL,       -- 8 bytes each, little-endian
    PRIMARY KEY (token, part)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tenure_hold_until ON tenure_hold (queue, boot, until);
CREATE UNIQUE INDEX IF NOT EXISTS tenure_hold_session ON tenure_hold (queue, session) WHERE session IS NOT NULL;

-- Sessions that have messages ready, a state, or a lock.
CREATE TABLE IF NOT EXISTS tenure_session (
    queue   INTEGER NOT NULL,
    session TEXT NOT NULL,
    first   INTEGER,                  -- sequence of the first message that is ready
    is_free INTEGER NOT NULL,         -- it is not locked, and nothing blocks the first one
    state   BLOB,
    PRIMARY KEY (queue, session)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tenure_session_first ON tenure_session (queue, is_free, first) WHERE first IS NOT NULL;

CREATE TABLE IF NOT EXISTS tenure_death (
    queue       INTEGER NOT NULL,     -- that of the dead letters
    sequence    INTEGER NOT NULL,
    dead_at     REAL NOT NULL,
    reason      TEXT NOT NULL,
    description TEXT NOT NULL,
    PRIMARY KEY (queue, sequence)
) WITHOUT ROWID;

-- Sent ids, and when each was sent.
CREATE TABLE IF NOT EXISTS tenure_dedupe (
    queue   INTEGER NOT NULL,
    id      TEXT NOT NULL,
    sent_at REAL NOT NULL,
    PRIMARY KEY (queue, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tenure_dedupe_age ON tenure_dedupe (queue, sent_at);

-- Handled ids, and until when each is remembered.
CREATE TABLE IF NOT EXISTS tenure_inbox (
    queue INTEGER NOT NULL,
    id    TEXT NOT NULL,
    until REAL NOT NULL,
    PRIMARY KEY (queue, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tenure_inbox_age ON tenure_inbox (queue, until);
