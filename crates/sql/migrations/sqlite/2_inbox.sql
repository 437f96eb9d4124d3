-- What was handled, by its id within a scope.
CREATE TABLE {inbox} (
    scope TEXT NOT NULL,
    id BLOB NOT NULL,
    -- The reply that copies get, as on the wire.
    properties BLOB,
    body BLOB,
    -- Milliseconds since 1970; until it is released, if there are none.
    expires_at INTEGER,
    PRIMARY KEY (scope, id)
);
CREATE INDEX {inbox_expiring} ON {inbox} (expires_at) WHERE expires_at IS NOT NULL;

-- What was handled of senders that count their messages: a mark for each.
CREATE TABLE {inbox_marks} (
    scope TEXT NOT NULL,
    sender TEXT NOT NULL,
    mark BLOB NOT NULL,
    PRIMARY KEY (scope, sender)
);

CREATE TABLE {inbox_replies} (
    scope TEXT NOT NULL,
    sender TEXT NOT NULL,
    number INTEGER NOT NULL,
    properties BLOB NOT NULL,
    body BLOB NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (scope, sender, number)
);
CREATE INDEX {inbox_replies_expiring} ON {inbox_replies} (expires_at);
