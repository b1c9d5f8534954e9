-- The statements about leases. "now" is read once in each statement, after the request was sent and before any wait
-- for a lock: a lease is taken over too late rather than too early, and an extension is shorter rather than longer.
--
-- A statement may wait for a row for long, and newer ones overtake it. So an extension never sets an end that is earlier
-- than the one in the row when the row is written. (PostgreSQL evaluates the conditions and the new values again on the
-- newest version of a row that another transaction has changed meanwhile.)
--
-- The wait is bounded by lock_timeout, set for the statement's own transaction, which works behind a pooler, too: the
-- cancel request of a client that has given up may not reach the server.

-- "pg_catalog" stands where a function of another user might fit the types of a call better; see SEARCH_PATH.

-- name: acquire
-- A lease that another candidate holds is only read, not locked: standing by costs no write.
WITH moment AS MATERIALIZED (
    SELECT {schema}.clock() AS now, set_config('lock_timeout', $7, true)
), held AS MATERIALIZED (
    SELECT token, holder, expires_at - now AS remaining, metadata
    FROM {schema}.lease, moment
    WHERE key = sha256(pg_catalog.convert_to($1, 'UTF8')) AND holder <> $2 AND expires_at > now
), won AS (
    INSERT INTO {schema}.lease AS kept (key, name, holder, token, expires_at, metadata, resign_asked)
    SELECT sha256(pg_catalog.convert_to($1, 'UTF8')), $1, $2, 1, now + $3::float8, $4, false
    FROM moment
    WHERE NOT EXISTS (SELECT FROM held)
    ON CONFLICT (key) DO UPDATE
    SET (holder, token, expires_at, metadata, resign_asked) = (
        SELECT excluded.holder,
               kept.token + CASE WHEN again THEN 0 ELSE 1 END,
               CASE WHEN again THEN greatest(kept.expires_at, excluded.expires_at) ELSE excluded.expires_at END,
               CASE WHEN again THEN kept.metadata ELSE excluded.metadata END,
               again AND kept.resign_asked
        FROM (
            SELECT coalesce(kept.holder = excluded.holder, false) AND kept.expires_at > excluded.expires_at - $3::float8
        ) AS asked (again)
    )
    WHERE (kept.holder IS NULL OR kept.holder = excluded.holder OR kept.expires_at <= excluded.expires_at - $3::float8)
      AND {schema}.clock() < excluded.expires_at  -- after the wait for the row: no lease that has ended already
    RETURNING token, resign_asked
)
SELECT token, resign_asked, NULL AS holder, NULL::float8 AS remaining, NULL AS metadata, pg_notify($5, $6)::text
FROM won
UNION ALL
SELECT token, false, holder, remaining, metadata, NULL
FROM held;

-- name: renew
-- Rows are locked in the order of their keys, the same for all renewals: so there are no deadlocks.
WITH moment AS MATERIALIZED (
    SELECT {schema}.clock() AS now, set_config('lock_timeout', $5, true)
), asked AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS a (name, holder, token, place)
), named AS MATERIALIZED (
    SELECT DISTINCT sha256(pg_catalog.convert_to(name, 'UTF8')) AS key, holder, token FROM asked ORDER BY key
), kept AS (
    UPDATE {schema}.lease
    SET expires_at = greatest(lease.expires_at, now + $4::float8)
    FROM named, moment
    WHERE lease.key = named.key
      AND lease.holder = named.holder
      AND lease.token = named.token
      AND lease.expires_at > now
    RETURNING lease.name, lease.holder, lease.token, lease.resign_asked
)
SELECT kept.resign_asked
FROM asked LEFT JOIN kept USING (name, holder, token)
ORDER BY asked.place;

-- name: renew_unlocked
-- As above, but without waiting: "is_locked" marks the rows that another transaction has locked.
WITH moment AS MATERIALIZED (
    SELECT {schema}.clock() AS now
), asked AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS a (name, holder, token, place)
), named AS MATERIALIZED (
    SELECT DISTINCT sha256(pg_catalog.convert_to(name, 'UTF8')) AS key, holder, token FROM asked ORDER BY key
), free AS MATERIALIZED (
    SELECT key FROM {schema}.lease WHERE key = ANY (ARRAY(SELECT key FROM named)) ORDER BY key FOR UPDATE SKIP LOCKED
), kept AS (
    UPDATE {schema}.lease
    SET expires_at = greatest(lease.expires_at, now + $4::float8)
    FROM free JOIN named USING (key), moment
    WHERE lease.key = named.key
      AND lease.holder = named.holder
      AND lease.token = named.token
      AND lease.expires_at > now
    RETURNING lease.name, lease.holder, lease.token, lease.resign_asked
)
SELECT kept.resign_asked, EXISTS (
    SELECT FROM {schema}.lease
    WHERE lease.key = sha256(pg_catalog.convert_to(asked.name, 'UTF8'))
      AND lease.holder = asked.holder
      AND lease.token = asked.token
      AND NOT EXISTS (SELECT FROM free WHERE free.key = lease.key)
) AS is_locked
FROM asked LEFT JOIN kept USING (name, holder, token)
ORDER BY asked.place;

-- name: release
WITH moment AS MATERIALIZED (
    SELECT {schema}.clock() AS now, set_config('lock_timeout', $6, true)
), freed AS (
    UPDATE {schema}.lease
    SET holder = NULL, expires_at = now, metadata = '{}', resign_asked = false
    FROM moment
    WHERE key = sha256(pg_catalog.convert_to($1, 'UTF8')) AND holder = $2 AND token = $3 AND expires_at > now
    RETURNING token
)
SELECT pg_notify($4, $5) FROM freed;

-- name: ask_to_resign
WITH moment AS MATERIALIZED (
    SELECT {schema}.clock() AS now, set_config('lock_timeout', $4, true)
), changed AS (
    UPDATE {schema}.lease
    SET resign_asked = true
    FROM moment
    WHERE key = sha256(pg_catalog.convert_to($1, 'UTF8')) AND holder IS NOT NULL AND expires_at > now
    RETURNING token
)
SELECT pg_notify($2, $3) FROM changed;

-- name: inspect
-- OFFSET 0: each name is looked up by itself. A plan for any number of names would read the whole table for one, too.
WITH moment AS MATERIALIZED (
    SELECT {schema}.clock() AS now
), asked AS MATERIALIZED (
    SELECT sha256(pg_catalog.convert_to(name, 'UTF8')) AS key, place
    FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS a (name, place)
)
SELECT kept.token, kept.holder, kept.expires_at - now AS remaining, kept.metadata, kept.resign_asked
FROM moment, asked LEFT JOIN LATERAL (
    SELECT token, holder, expires_at, metadata, resign_asked FROM {schema}.lease WHERE key = asked.key OFFSET 0
) AS kept ON true
ORDER BY asked.place;

-- name: names
SELECT name FROM {schema}.lease ORDER BY name COLLATE "C";
