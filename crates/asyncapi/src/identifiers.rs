//! [`Identifiers`] names the channels, operations, messages and schemas of a document, each name once, in the characters that AsyncAPI
//! allows. [`identifier`] turns any text into such a name.

use std::collections::BTreeMap;

/// The identifiers of one kind of object, by what the object is.
#[derive(Clone, Debug)]
pub(crate) struct Identifiers<K>(BTreeMap<K, String>);

impl<K> Default for Identifiers<K> {
    fn default() -> Self {
        Identifiers(BTreeMap::new())
    }
}

impl<K: Ord> Identifiers<K> {
    /// The identifier of this object: of the wanted ones the first that no other object has, or else the last with a number.
    pub(crate) fn assign(&mut self, key: K, wanted: &[&str]) -> String {
        if let Some(id) = self.0.get(&key) {
            return id.clone();
        }
        let last = identifier(wanted.last().unwrap_or(&""));
        let numbered = (2..).map(|number| format!("{last}-{number}"));
        let mut candidates = wanted.iter().map(|text| identifier(text)).chain(numbered);
        let is_free = |id: &String| !self.0.values().any(|taken| taken == id);
        let id = candidates.find(is_free).expect("numbers do not end");
        self.0.insert(key, id.clone());
        id
    }
}

/// The text in letters, digits, dots, dashes and underscores: `stock_STOCK._symbol_` for `stock STOCK.{symbol}`.
pub(crate) fn identifier(text: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let words = text.split(|c| !is_allowed(c)).filter(|word| !word.is_empty());
    match words.collect::<Vec<_>>().join("_") {
        empty if empty.is_empty() => "_".to_owned(),
        identifier => identifier,
    }
}

/// The name of a type without paths: `Vec<Tick>` for `alloc::vec::Vec<app::Tick>`.
pub(crate) fn without_paths(type_name: &str) -> String {
    let is_of_path = |c: char| c.is_alphanumeric() || matches!(c, '_' | ':');
    let paths = type_name.split_inclusive(|c| !is_of_path(c));
    paths.filter_map(|path| path.rsplit("::").next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_has_only_characters_that_asyncapi_allows() {
        for (text, expected) in [
            ("stock STOCK.{symbol}.#", "stock_STOCK._symbol_."),
            ("dc0.qa.q.ledger", "dc0.qa.q.ledger"),
            ("a::b", "a_b"),
            ("()", "_"),
        ] {
            assert_eq!(identifier(text), expected);
        }
    }

    #[test]
    fn names_of_types_lose_their_paths() {
        for (type_name, expected) in [
            ("app::prices::Tick", "Tick"),
            ("alloc::vec::Vec<app::Tick>", "Vec<Tick>"),
            ("(u32, &app::Tick)", "(u32, &Tick)"),
        ] {
            assert_eq!(without_paths(type_name), expected);
        }
    }

    #[test]
    fn no_two_objects_have_the_same_identifier() {
        let mut identifiers = Identifiers::default();
        assert_eq!(identifiers.assign(1, &["a b"]), "a_b");
        assert_eq!(identifiers.assign(2, &["a_b"]), "a_b-2");
        assert_eq!(identifiers.assign(1, &["other"]), "a_b");
        assert_eq!(identifiers.assign(3, &["a_b", "path.a_b"]), "path.a_b");
        assert_eq!(identifiers.assign(4, &["a_b", "path.a_b"]), "path.a_b-2");
    }
}
