-- Which process has claimed, and when by the wall clock; NULL in rows of a process of an older version.
ALTER TABLE tenure_hold ADD COLUMN holder TEXT;
ALTER TABLE tenure_hold ADD COLUMN since REAL;
