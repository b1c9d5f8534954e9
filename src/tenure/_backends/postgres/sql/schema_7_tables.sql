-- The change of version 7 to a table that is in use, in a transaction of its own, as in schema_4_tables.sql.

-- name: queue
DO $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_attribute AS a WHERE a.attrelid = '{schema}.queue'::regclass AND a.attname = 'paused'
    ) THEN
        -- How many messages may be locked at once; how many may be delivered in how many seconds, and of each session. NULL
        -- is any number.
        ALTER TABLE {schema}.queue
            ADD COLUMN max_locked bigint,
            ADD COLUMN rate_count bigint,
            ADD COLUMN rate_seconds double precision,
            ADD COLUMN session_rate_count bigint,
            ADD COLUMN session_rate_seconds double precision,
            ADD COLUMN paused boolean NOT NULL DEFAULT false;
    END IF;
END
$$;
