-- The statements about tenure_lease. "Live" is holder IS NOT NULL AND (boot <> :boot OR expires_at > :now): a row from
-- another boot can't be compared with the own clock, and counts as live until it is restamped. So does a row that ends
-- later than its ttl from now (:slack is for rounding): then the clock went back under the same name of the boot.
--
-- Where a row can be compared, a new stamp never makes its lease end sooner, and its ttl is always that of its end.

-- name: find
SELECT name, holder, token, expires_at, ttl, boot, metadata, resign_asked, renewals
FROM tenure_lease
WHERE name IN (SELECT value FROM json_each(:names));

-- name: names
SELECT name FROM tenure_lease ORDER BY name;

-- name: claim
INSERT INTO tenure_lease (name, holder, token, expires_at, ttl, boot, metadata, resign_asked, renewals)
VALUES (:name, :holder, 1, :now + :ttl, :ttl, :boot, :metadata, 0, 0)
ON CONFLICT (name) DO UPDATE
SET holder = excluded.holder,
    token = token + 1,
    expires_at = excluded.expires_at,
    ttl = excluded.ttl,
    boot = excluded.boot,
    metadata = excluded.metadata,
    resign_asked = 0,
    renewals = 0
RETURNING token;

-- name: stamp
UPDATE tenure_lease
SET expires_at = max(:now + :ttl, iif(boot = :boot AND expires_at <= :now + ttl + :slack, expires_at, 0)),
    ttl = max(:ttl, iif(boot = :boot AND expires_at <= :now + ttl + :slack, expires_at - :now, 0)),
    boot = :boot,
    renewals = renewals + :by_holder
WHERE name = :name;

-- name: renew
UPDATE tenure_lease
SET expires_at = max(:now + :ttl, iif(boot = :boot AND expires_at <= :now + ttl + :slack, expires_at, 0)),
    ttl = max(:ttl, iif(boot = :boot AND expires_at <= :now + ttl + :slack, expires_at - :now, 0)),
    boot = :boot,
    renewals = renewals + 1
FROM (
    SELECT json_extract(value, '$[0]') AS name,
           json_extract(value, '$[1]') AS holder,
           json_extract(value, '$[2]') AS token
    FROM json_each(:grants)
) AS asked
WHERE tenure_lease.name = asked.name
  AND tenure_lease.holder = asked.holder
  AND tenure_lease.token = asked.token
  AND (tenure_lease.boot <> :boot OR tenure_lease.expires_at > :now)
RETURNING name, holder, token, resign_asked;

-- name: release
UPDATE tenure_lease
SET holder = NULL, expires_at = :now, boot = :boot, metadata = '{}', resign_asked = 0
WHERE name = :name
  AND holder = :holder
  AND token = :token
  AND (boot <> :boot OR expires_at > :now)
RETURNING token;

-- name: ask_to_resign
UPDATE tenure_lease
SET resign_asked = 1
WHERE name = :name
  AND holder IS NOT NULL
  AND (boot <> :boot OR expires_at > :now)
RETURNING token;
