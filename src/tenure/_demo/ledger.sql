-- The job, written before anybody is elected.
CREATE TABLE job (
    folder BLOB NOT NULL,        -- paths are bytes: a file's name need not be text
    pace   REAL NOT NULL
);

CREATE TABLE file (
    id     INTEGER PRIMARY KEY,
    chunk  INTEGER NOT NULL,
    path   BLOB NOT NULL UNIQUE,
    parsed INTEGER NOT NULL
);

CREATE INDEX file_of_chunk ON file (chunk);

-- Each term's first act, so that from this moment the fence refuses every older one.
CREATE TABLE term (
    token    INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    found    INTEGER NOT NULL -- chunks that were accounted for already
);

-- A chunk's result counts once: by this key, one that comes again is known. (The table of counts has no key that would
-- hide it if not.)
CREATE TABLE result (
    chunk    INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,  -- who counted it
    token    INTEGER NOT NULL,  -- the term that wrote it down
    came     INTEGER NOT NULL   -- how often
);

CREATE TABLE count (
    file   INTEGER NOT NULL REFERENCES file,
    size   INTEGER NOT NULL,
    lines  INTEGER NOT NULL,
    words  INTEGER NOT NULL,
    nodes  INTEGER NOT NULL,
    digest TEXT NOT NULL,
    error  TEXT NOT NULL
);

-- Chunks that nobody could count: what the dead letters say.
CREATE TABLE dead (
    chunk      INTEGER PRIMARY KEY,
    reason     TEXT NOT NULL,
    why        TEXT NOT NULL,
    deliveries INTEGER NOT NULL,
    token      INTEGER NOT NULL
);

CREATE TABLE outcome (
    id    INTEGER PRIMARY KEY CHECK (id = 1),
    total TEXT NOT NULL,      -- JSON
    token INTEGER NOT NULL
);
