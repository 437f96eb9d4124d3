-- A lane is what one relay works on at a time: it locks the row. All messages of an ordering key are in the same lane.
CREATE TABLE {outbox_lanes} (
    lane smallint PRIMARY KEY
);
INSERT INTO {outbox_lanes} (lane) SELECT generate_series(0, 63);

CREATE TABLE {outbox} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    lane smallint NOT NULL,
    -- 0: to be sent; 1: set aside; 2: sent.
    state smallint NOT NULL DEFAULT 0,
    -- How often the broker has refused it.
    attempts integer NOT NULL DEFAULT 0,
    ordering_key text,
    exchange text NOT NULL,
    routing_key text NOT NULL,
    -- Whether it has to reach a queue.
    mandatory boolean NOT NULL,
    -- As on the wire.
    properties bytea NOT NULL,
    body bytea NOT NULL,
    written_at timestamptz NOT NULL DEFAULT now(),
    -- Not before this time.
    due_at timestamptz,
    -- Since when it has been in its state, if that is not 0.
    settled_at timestamptz,
    -- Why it was refused the last time.
    error text
) WITH (
    -- Rows come and go by the thousand: what is left of them must not wait for a fifth of the table.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000
);
CREATE INDEX outbox_waiting ON {outbox} (lane, id) WHERE state = 0;
-- What holds back the later messages of its key. Few, if all is well.
CREATE INDEX outbox_refused ON {outbox} (lane, ordering_key, id) WHERE attempts > 0 AND state < 2;
CREATE INDEX outbox_settled ON {outbox} (state, settled_at) WHERE state > 0;
