//! Text from elsewhere: made safe for a terminal, a log line or a line of JSON.
//!
//! The `leveret` program uses it, too; it is not a part of what is promised.

use std::fmt::Write;

/// The text as a part of one line: characters that would break the line, move the cursor or reorder what is shown are written
/// as escapes, as in `\n` and `\u{1b}`.
pub fn escape(text: &str) -> String {
    escape_except(text, &[])
}

/// The same for a text of several lines: line feeds and tabs stay.
pub fn escape_lines(text: &str) -> String {
    escape_except(text, &['\n', '\t'])
}

/// The same for JSON on one line, in which such characters only occur within strings.
pub fn escape_json(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if !is_unsafe(c) {
            escaped.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(escaped, "\\u{unit:04x}");
        }
    }
    escaped
}

/// The same for TOML, in which such characters have escapes in double quotes, and elsewhere none. Its lines stay.
pub fn escape_toml(toml: &str) -> String {
    let mut escaped = String::with_capacity(toml.len());
    for c in toml.chars() {
        if !is_unsafe(c) || c == '\n' {
            escaped.push(c);
            continue;
        }
        let _ = match u32::from(c) {
            code @ ..=0xffff => write!(escaped, "\\u{code:04x}"),
            code => write!(escaped, "\\U{code:08x}"),
        };
    }
    escaped
}

/// The same, but for some characters.
fn escape_except(text: &str, kept: &[char]) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match is_unsafe(c) && !kept.contains(&c) {
            true => escaped.extend(c.escape_default()),
            false => escaped.push(c),
        }
    }
    escaped
}

/// Control characters (C0, DEL, C1), line separators, and the invisible ones that change the direction of text or hide some.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{200b}'
                | '\u{200e}'
                | '\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// Where in a text a byte is, as `line 3, column 7`.
pub fn place(text: &str, offset: usize) -> String {
    let before = text.get(..offset).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    format!("line {line}, column {column}")
}

/// A message of serde's as a part of one line: without a value of the wrong type, and with the name of a field, which may be
/// anything, made safe.
pub fn without_value(message: &str) -> String {
    escape(&value_left_out(message))
}

fn value_left_out(message: &str) -> String {
    let Some(begin) = ["invalid type: ", "invalid value: "]
        .iter()
        .find_map(|kind| message.find(kind).map(|at| at + kind.len()))
    else {
        return message.to_owned();
    };
    let value = &message[begin..];
    match (value.find(['"', '`']), value.rfind(", expected")) {
        (Some(from), Some(to)) if from < to => {
            format!("{}{}{}", &message[..begin], value[..from].trim_end(), &value[to..])
        }
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "é\r\n\t\u{1b}[2J\u{9b}\u{202e}\u{2028}\u{e0041}";

    #[test]
    fn characters_that_move_the_cursor_or_reorder_text_are_escaped() {
        let escaped = r"é\r\n\t\u{1b}[2J\u{9b}\u{202e}\u{2028}\u{e0041}";
        assert_eq!(escape(HOSTILE), escaped);
        assert_eq!(escape_lines("a\r\n\tb\u{7f}"), "a\\r\n\tb\\u{7f}");
    }

    #[test]
    fn escaped_json_has_the_same_meaning() {
        let json = serde_json::to_string(HOSTILE).unwrap();
        let escaped = escape_json(&json);
        assert!(!escaped.chars().any(is_unsafe), "{escaped:?}");
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), HOSTILE);
    }

    #[test]
    fn escaped_toml_in_double_quotes_has_the_same_meaning() {
        let escaped = escape_toml("a = \"\u{1b}\u{202e}\u{e0041}é\"\nb = 1\n");
        assert_eq!(escaped, "a = \"\\u001b\\u202e\\U000e0041é\"\nb = 1\n");
    }

    #[test]
    fn a_value_of_the_wrong_type_is_not_quoted() {
        for (message, expected) in [
            (
                "invalid type: string \"a, expected b\", expected a sequence",
                "invalid type: string, expected a sequence",
            ),
            (
                "invalid type: integer `5151`, expected a string",
                "invalid type: integer, expected a string",
            ),
            ("invalid type: map, expected a string", "invalid type: map, expected a string"),
            ("unknown field `typ`, expected `type`", "unknown field `typ`, expected `type`"),
            ("unknown field `x\nleveret: forged`", "unknown field `x\\nleveret: forged`"),
        ] {
            assert_eq!(without_value(message), expected);
        }
    }
}
