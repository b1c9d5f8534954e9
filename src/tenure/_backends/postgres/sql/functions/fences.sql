-- Fences.

-- Accept a token if no newer one was seen for the resource, which stays locked until the transaction ends.
CREATE OR REPLACE FUNCTION {schema}.fence(p_resource text, p_token bigint) RETURNS void
LANGUAGE plpgsql {path} AS $$
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
