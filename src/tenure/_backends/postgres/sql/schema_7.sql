-- Version 7: limits of queues, and the names of processes. The settings: schema_7_tables.sql.

-- The deliveries of queues with rates: a row for those that follow one another within a 64th of the rate's time.
CREATE TABLE {schema}.delivered (
    began  double precision NOT NULL,         -- when the first of them was delivered
    at     double precision NOT NULL,         -- and the last
    number bigint NOT NULL,
    queue  integer NOT NULL,
    scope  text NOT NULL                      -- '' for the rate of the queue, '=' and a name for that of a session
) WITH (
    fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX delivered_scope ON {schema}.delivered (queue, scope, at);
CREATE INDEX delivered_at ON {schema}.delivered (queue, at);

-- The processes that claim, by the number that their tokens have; see tokens.py. Only people who look at locks need it.
CREATE TABLE {schema}.process (
    origin  bigint PRIMARY KEY,
    name    text NOT NULL,
    seen_at double precision NOT NULL
);

-- The users who may consume may work with these, too: they are those who may work with the sessions.
DO $$
DECLARE
    v_grant record;
BEGIN
    FOR v_grant IN
        SELECT a.privilege_type AS what, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS who
        FROM pg_class AS c, aclexplode(c.relacl) AS a
        WHERE c.oid = '{schema}.session'::regclass
    LOOP
        EXECUTE format('GRANT %s ON {schema}.delivered, {schema}.process TO %s', v_grant.what, v_grant.who);
    END LOOP;
END
$$;
