-- Version 5: which settings of a queue were declared.

-- The settings of queues that were declared, by name; the others have their default values.
CREATE TABLE {schema}.declared (
    queue   integer NOT NULL,
    setting text NOT NULL,
    PRIMARY KEY (queue, setting)
);

-- Of older queues, the settings that differ from the defaults were declared.
INSERT INTO {schema}.declared (queue, setting)
SELECT q.id, s.name
FROM {schema}.queue AS q
CROSS JOIN LATERAL (
    VALUES ('lock', q.lock <> 30), ('max_deliveries', q.max_deliveries <> 10), ('dedupe_window', q.dedupe_window <> 600),
           ('body_max', q.body_max <> 1048576), ('dead_retention', q.dead_retention <> 'infinity')
) AS s (name, is_declared)
WHERE s.is_declared;

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
        EXECUTE format('GRANT %s ON {schema}.declared TO %s', v_grant.what, v_grant.who);
    END LOOP;
END
$$;
