-- The statements about tenure_fence, on the user's own connection.

-- name: create
CREATE TABLE IF NOT EXISTS tenure_fence (
    resource TEXT PRIMARY KEY NOT NULL,
    token    INTEGER NOT NULL
);

-- name: check
INSERT INTO tenure_fence (resource, token)
VALUES (:resource, :token)
ON CONFLICT (resource) DO UPDATE SET token = excluded.token
WHERE excluded.token >= tenure_fence.token;

-- name: newest
SELECT token FROM tenure_fence WHERE resource = :resource;
