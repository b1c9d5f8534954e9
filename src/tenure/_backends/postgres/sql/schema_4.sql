-- Version 4: the sessions to offer next, indexes with which a deep session costs no more, and marks with which consumed
-- messages are not read again. Of the tables in use, only "message" is locked here; see schema_4_tables.sql.

-- A session that may be accepted, with the number of the message for which it may: a row for each statement that has made
-- a message claimable, or unlocked a session. The rows of a session that turns out to be locked, empty or held up are
-- removed: the statement that changes this adds one.
CREATE TABLE {schema}.waiting (
    queue   integer NOT NULL,
    seq     bigint NOT NULL,
    session text NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX waiting_order ON {schema}.waiting (queue, seq);
CREATE INDEX waiting_session ON {schema}.waiting (queue, session);

-- Where searches in a queue begin; see marks.sql. kind: 0 lowered, 1 proposed, 2 raised.
CREATE TABLE {schema}.mark (
    queue integer NOT NULL,
    n     bigint GENERATED ALWAYS AS IDENTITY,
    kind  smallint NOT NULL,
    keys  double precision[] NOT NULL,
    PRIMARY KEY (queue, n)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX mark_lowered ON {schema}.mark (queue, n) WHERE kind = 0;
CREATE INDEX mark_raised ON {schema}.mark (queue, n) WHERE kind = 2;

INSERT INTO {schema}.mark (queue, kind, keys) SELECT id, 0, array_fill(0::double precision, '{14}') FROM {schema}.queue;
INSERT INTO {schema}.waiting (queue, seq, session)
SELECT queue, min(seq), session FROM {schema}.message WHERE state = 0 AND session IS NOT NULL GROUP BY queue, session;

-- The users who may work with the messages may work with these, too.
DO $$
DECLARE
    v_grant record;
BEGIN
    FOR v_grant IN
        SELECT a.privilege_type AS what, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS who
        FROM pg_class AS c, aclexplode(c.relacl) AS a
        WHERE c.oid = '{schema}.message'::regclass
    LOOP
        EXECUTE format('GRANT %s ON {schema}.waiting, {schema}.mark TO %s', v_grant.what, v_grant.who);
    END LOOP;
END
$$;

-- In orders that have a mark, and that no other index has. (The indexes of messages that are not locked: indexes.sql.)
DROP INDEX {schema}.message_due;
CREATE INDEX message_due ON {schema}.message (queue, state, due_at) WHERE due_at IS NOT NULL;

-- Each claim adds an entry for the same number: a page that has no room for them is split, or searched for dead entries,
-- and that costs a claim more than all its other changes to this index.
ALTER INDEX {schema}.message_pkey SET (fillfactor = 50);

-- The oldest version of this code that works with the schema as it is now.
ALTER TABLE {schema}.migration ADD COLUMN oldest integer;
