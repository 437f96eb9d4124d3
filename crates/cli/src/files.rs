//! TOML and YAML files. Their errors name line and column, and quote nothing of a file: it may have passwords in it.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::failure::Failure;
use crate::text::without_value;

/// Reads a file: TOML, or YAML if its name ends in `.yaml` or `.yml`.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let named = |text: String| Failure::wrong(format_args!("{}: {text}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
    let is_yaml = path.extension().is_some_and(|ending| {
        ending.eq_ignore_ascii_case("yaml") || ending.eq_ignore_ascii_case("yml")
    });
    match is_yaml {
        true => serde_saphyr::from_str(&text).map_err(|error| named(yaml_mistake(&error))),
        false => from_toml(&text).map_err(named),
    }
}

/// Reads a value from TOML.
pub(crate) fn from_toml<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| toml_mistake(text, &error))
}

fn toml_mistake(text: &str, error: &toml::de::Error) -> String {
    let start = error.span().map_or(0, |span| span.start);
    let before = text.get(..start).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    format!("line {line}, column {column}: {}", without_value(error.message()))
}

fn yaml_mistake(error: &serde_saphyr::Error) -> String {
    without_value(&error.without_snippet().to_string())
}
