//! Text from elsewhere: made safe for a terminal, a log line or a line of JSON.

pub(crate) use leveret::text::{
    escape, escape_json, escape_lines, escape_toml, place, without_value,
};
