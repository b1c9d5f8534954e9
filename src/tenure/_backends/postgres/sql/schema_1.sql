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

-- Accept a token if no newer one was seen for the resource, which stays locked until the transaction ends.
CREATE FUNCTION {schema}.fence(p_resource text, p_token bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    newest bigint;
BEGIN
    IF p_resource IS NULL OR p_token IS NULL OR p_token < 1 THEN
        RAISE EXCEPTION 'a fence needs a resource and the token of a term, not % and %', p_resource, p_token
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO {schema}.fenced AS seen (key, resource, token)
    VALUES (sha256(convert_to(p_resource, 'UTF8')), p_resource, p_token)
    ON CONFLICT (key) DO UPDATE SET token = excluded.token WHERE excluded.token >= seen.token;
    IF NOT FOUND THEN
        SELECT token INTO newest FROM {schema}.fenced WHERE key = sha256(convert_to(p_resource, 'UTF8'));
        RAISE EXCEPTION 'token % is too old for %: a leader with token % has been here', p_token, p_resource, newest
            USING ERRCODE = 'TN001', HINT = 'Roll back, and let the newer leader work.';
    END IF;
END
$$;
