-- When a queue may be deleted if it is empty, by the file's wall clock; without a row, never.
CREATE TABLE IF NOT EXISTS tenure_idle (
    queue   INTEGER PRIMARY KEY NOT NULL,
    idle_at REAL NOT NULL
);

-- For how many seconds dead letters are kept; without a row, for ever.
CREATE TABLE IF NOT EXISTS tenure_dead_retention (
    queue   INTEGER PRIMARY KEY NOT NULL,
    seconds REAL NOT NULL
);
