-- The limits of queues that have any. NULL: no limit.
CREATE TABLE IF NOT EXISTS tenure_limit (
    queue           INTEGER PRIMARY KEY NOT NULL,
    max_locked      INTEGER,
    rate            INTEGER,
    rate_seconds    REAL,
    session_rate    INTEGER,
    session_seconds REAL,
    paused          INTEGER NOT NULL
);

-- The deliveries that count for a rate: those of a queue under '', those of a session under its name.
CREATE TABLE IF NOT EXISTS tenure_delivered (
    queue   INTEGER NOT NULL,
    session TEXT NOT NULL,
    at      REAL NOT NULL,            -- the last of them
    bursts  TEXT NOT NULL,            -- a JSON array of [began, at, number]
    PRIMARY KEY (queue, session)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tenure_delivered_at ON tenure_delivered (queue, at) WHERE session > '';

-- A process of an older version deletes a queue without these rows, and the number is given to the next queue.
CREATE TRIGGER IF NOT EXISTS tenure_limit_of_none AFTER DELETE ON tenure_queue
BEGIN
    DELETE FROM tenure_limit WHERE queue = old.queue;
    DELETE FROM tenure_delivered WHERE queue = old.queue;
END;
