-- Version 3: nothing that is kept has changed but for the digest of the functions, by which `tenure migrate` finds out
-- whether they are its own.

ALTER TABLE {schema}.migration ADD COLUMN functions text;
