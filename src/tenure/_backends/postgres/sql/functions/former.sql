-- Functions of earlier releases that nothing calls any more. Clients never called them.

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN
        SELECT p.oid FROM pg_proc AS p
        WHERE p.pronamespace = to_regnamespace('{schema}') AND p.proname IN (
            '_bury', '_tried', '_tell', '_pass_time', '_put', '_take_back', '_note', '_remember', '_let_go', '_first', '_lows'
        )
    LOOP
        EXECUTE 'DROP FUNCTION ' || v_function;
    END LOOP;
END
$$;
