-- The job, written before anybody is elected.
CREATE TABLE job (
    folder BLOB NOT NULL,        -- paths are bytes: a file's name need not be text
    pace   REAL NOT NULL
);

CREATE TABLE file (
    id     INTEGER PRIMARY KEY,
    path   BLOB NOT NULL UNIQUE,
    parsed INTEGER NOT NULL
);

-- Each term's first act, so that from this moment the fence refuses every older one.
CREATE TABLE term (
    token    INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    found    INTEGER NOT NULL -- files that were counted already
);

-- A file is counted once: the key refuses a second time.
CREATE TABLE count (
    file   INTEGER PRIMARY KEY REFERENCES file,
    size   INTEGER NOT NULL,
    lines  INTEGER NOT NULL,
    words  INTEGER NOT NULL,
    nodes  INTEGER NOT NULL,
    digest TEXT NOT NULL,
    error  TEXT NOT NULL,
    token  INTEGER NOT NULL   -- the term that counted it
);

CREATE TABLE outcome (
    id    INTEGER PRIMARY KEY CHECK (id = 1),
    total TEXT NOT NULL,      -- JSON
    token INTEGER NOT NULL
);
