-- Version 3: locks that are extended while another transaction has locked the message's row, and the digest of the
-- functions, by which `tenure migrate` recognises its own.

-- The end of a lock, if it could not be written into the message's own row. A row with another token, or whose time is
-- over, has no effect; tidy() removes it.
CREATE TABLE {schema}.extended (
    seq   bigint NOT NULL,
    token bigint NOT NULL,                    -- of the claim that holds the message
    until double precision NOT NULL,
    PRIMARY KEY (seq, token)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 200);

-- The users who may work with the messages may work with this, too.
DO $$
DECLARE
    v_grant record;
BEGIN
    FOR v_grant IN
        SELECT a.privilege_type AS what, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS who
        FROM pg_class AS c, aclexplode(c.relacl) AS a
        WHERE c.oid = '{schema}.message'::regclass
    LOOP
        EXECUTE format('GRANT %s ON {schema}.extended TO %s', v_grant.what, v_grant.who);
    END LOOP;
END
$$;

ALTER TABLE {schema}.migration ADD COLUMN functions text;
