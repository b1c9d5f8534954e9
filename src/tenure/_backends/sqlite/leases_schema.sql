-- The tables of leases. All tables of tenure begin with tenure_, and have a version of their own, because the file may
-- be the user's, and with it application_id and user_version. Not STRICT, which SQLite before 3.37 can't even read.

CREATE TABLE IF NOT EXISTS tenure_schema (
    part       TEXT PRIMARY KEY NOT NULL,
    version    INTEGER NOT NULL,
    written_by TEXT NOT NULL
);

-- A row per name. It expires and is never deleted, so that its token never falls.
CREATE TABLE IF NOT EXISTS tenure_lease (
    name         TEXT PRIMARY KEY NOT NULL,
    holder       TEXT,                        -- NULL once released
    token        INTEGER NOT NULL,
    expires_at   REAL NOT NULL,               -- seconds since the boot that "boot" names
    ttl          REAL NOT NULL,
    boot         TEXT NOT NULL,
    metadata     TEXT NOT NULL,
    resign_asked INTEGER NOT NULL,
    renewals     INTEGER NOT NULL             -- of this token, by its holder; a restamp by another doesn't count
);
