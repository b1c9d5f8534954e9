-- Version 6: schedules.

-- What is kept of the schedules of queues.
CREATE TABLE {schema}.schedule (
    queue  integer NOT NULL,
    name   text COLLATE "C" NOT NULL,
    record text NOT NULL,
    PRIMARY KEY (queue, name)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 200);

-- The users who may work with the queues may work with this, too.
DO $$
DECLARE
    v_grant record;
BEGIN
    FOR v_grant IN
        SELECT a.privilege_type AS what, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS who
        FROM pg_class AS c, aclexplode(c.relacl) AS a
        WHERE c.oid = '{schema}.queue'::regclass
    LOOP
        EXECUTE format('GRANT %s ON {schema}.schedule TO %s', v_grant.what, v_grant.who);
    END LOOP;
END
$$;
