-- The changes of version 4 to the tables that are in use, "message" excepted. Each block is run in a transaction of its
-- own before schema_4.sql: a migration that waits for one of these tables then holds no other that a sender or a consumer
-- needs. These lock several tables in more than one order, so there would be deadlocks otherwise. A block that was run
-- before locks nothing. The functions of version 3 work with these tables before and after each block.

-- name: queue
DO $$
BEGIN
    IF to_regclass('{schema}.queue_deleted') IS NULL THEN
        -- When a queue may be deleted if it is empty, and when it was: its row stays for a day, and is its again if it is
        -- used. For how many seconds dead letters are kept.
        ALTER TABLE {schema}.queue
            ADD COLUMN idle_at double precision,
            ADD COLUMN deleted_at double precision,
            ADD COLUMN dead_retention double precision NOT NULL DEFAULT 'infinity';
        CREATE INDEX queue_idle ON {schema}.queue (idle_at) WHERE idle_at IS NOT NULL;
        CREATE INDEX queue_deleted ON {schema}.queue (deleted_at) WHERE deleted_at IS NOT NULL;
    END IF;
END
$$;

-- name: tally
DO $$
BEGIN
    IF to_regclass('{schema}.tally_order') IS NULL THEN  -- an order that has a mark
        ALTER TABLE {schema}.tally ADD COLUMN n bigint GENERATED ALWAYS AS IDENTITY;
        DROP INDEX {schema}.tally_queue;
        CREATE INDEX tally_order ON {schema}.tally (queue, n);
    END IF;
END
$$;

-- name: session
DO $$
BEGIN
    IF to_regclass('{schema}.session_locked') IS NULL THEN
        CREATE INDEX session_locked ON {schema}.session ((queue + 0), (until + 0)) WHERE token IS NOT NULL;
    END IF;
END
$$;
