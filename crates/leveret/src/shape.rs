//! What is known of a body from its type.

use bytes::Bytes;

/// What the body of a message is, as far as a type tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub(crate) content_type: Option<&'static str>,
    pub(crate) type_name: &'static str,
}

impl Shape {
    /// A value of this type, written in this way; none, if that differs from message to message.
    pub fn new<T: ?Sized>(content_type: Option<&'static str>) -> Self {
        Shape { content_type, type_name: std::any::type_name::<T>() }
    }

    /// A body that is taken as it is.
    pub(crate) fn bytes() -> Self {
        Shape::new::<Bytes>(Some("application/octet-stream"))
    }

    /// A body that is text.
    pub(crate) fn text() -> Self {
        Shape::new::<String>(Some("text/plain"))
    }
}

/// A name without paths, of characters that names in a document may have: `Vec_Tick` for `alloc::vec::Vec<app::Tick>`.
pub(crate) fn plain(name: &str) -> String {
    let mut words = Vec::new();
    for path in name.split(|c: char| !is_plain(c) && c != ':') {
        let last = path.rsplit("::").next().unwrap_or_default().trim_matches(':');
        if !last.is_empty() {
            words.push(last.replace(':', "_"));
        }
    }
    match words.is_empty() {
        true => "_".to_owned(),
        false => words.join("_"),
    }
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        for (name, expected) in [
            ("app::prices::Tick", "Tick"),
            ("alloc::vec::Vec<app::Tick>", "Vec_Tick"),
            ("(u32, &str)", "u32_str"),
            ("stock STOCK.{symbol}.#", "stock_STOCK._symbol_."),
            ("dc0.qa.q.ledger", "dc0.qa.q.ledger"),
            ("a:b", "a_b"),
            ("()", "_"),
        ] {
            assert_eq!(plain(name), expected);
        }
    }
}
