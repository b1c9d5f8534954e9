-- The job, stored before a leader is elected.
CREATE TABLE job (
    folder BLOB NOT NULL,        -- paths are bytes, as a file's name need not be text
    pace   REAL NOT NULL
);

CREATE TABLE file (
    id     INTEGER PRIMARY KEY,
    chunk  INTEGER NOT NULL,
    path   BLOB NOT NULL UNIQUE,
    parsed INTEGER NOT NULL
);

CREATE INDEX file_of_chunk ON file (chunk);

-- The first write of each term; from then on the fence refuses every older term.
CREATE TABLE term (
    token    INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    found    INTEGER NOT NULL -- chunks that were done already
);

-- A chunk's result counts once: this key identifies a repeated one. (The table of counts has no key that would hide a
-- mistake.)
CREATE TABLE result (
    chunk    INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,  -- the instance that counted it
    token    INTEGER NOT NULL,  -- the term that stored it
    came     INTEGER NOT NULL   -- how often it came
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

-- Chunks that could not be counted, from the dead letters.
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
