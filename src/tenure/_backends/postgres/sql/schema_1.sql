-- Version 1: leases and fences. Times are Unix seconds by the server's clock.

-- A row per name. It expires and is never deleted, so that its token never falls; the table is LOGGED, so that a crash
-- of the server loses neither rows nor tokens.
CREATE TABLE {schema}.lease (
    key          bytea PRIMARY KEY,           -- sha256 of the name, which may be too long for an index
    name         text NOT NULL,
    holder       text,                        -- NULL once released
    token        bigint NOT NULL,
    expires_at   double precision NOT NULL,
    metadata     text NOT NULL,
    resign_asked boolean NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 200);

-- The newest token that was seen for each resource.
CREATE TABLE {schema}.fenced (
    key      bytea PRIMARY KEY,               -- sha256 of the resource
    resource text NOT NULL,
    token    bigint NOT NULL
) WITH (fillfactor = 70);

CREATE FUNCTION {schema}.clock() RETURNS double precision
LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
    SELECT extract(epoch FROM clock_timestamp())::double precision
$$;
