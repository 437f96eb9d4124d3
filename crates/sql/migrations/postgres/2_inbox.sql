-- What was handled, by its id within a scope.
CREATE TABLE {inbox} (
    scope text NOT NULL,
    id bytea NOT NULL,
    -- The reply that copies get, as on the wire.
    properties bytea,
    body bytea,
    -- Milliseconds since 1970; until it is released, if there are none.
    expires_at bigint,
    PRIMARY KEY (scope, id)
) WITH (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000
);
CREATE INDEX inbox_expiring ON {inbox} (expires_at) WHERE expires_at IS NOT NULL;

-- What was handled of senders that count their messages: a mark for each.
CREATE TABLE {inbox_marks} (
    scope text NOT NULL,
    sender text NOT NULL,
    mark bytea NOT NULL,
    PRIMARY KEY (scope, sender)
) WITH (
    -- Every message changes a row, and none of what is indexed: there is room for it beside the old one.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000
);

CREATE TABLE {inbox_replies} (
    scope text NOT NULL,
    sender text NOT NULL,
    number bigint NOT NULL,
    properties bytea NOT NULL,
    body bytea NOT NULL,
    expires_at bigint NOT NULL,
    PRIMARY KEY (scope, sender, number)
);
CREATE INDEX inbox_replies_expiring ON {inbox_replies} (expires_at);
