//! Strings on the wire: bytes that are nearly always text.
//!
//! AMQP says UTF-8 and its clients send what they like, so a string from a peer is kept as bytes and
//! looked at as text where that works. Refusing it would make one odd message unreadable for ever.

use std::borrow::{Borrow, Cow};
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::Utf8Error;

use crate::error::InvalidValue;

/// What `ShortStr` and `LongStr` have in common: everything but the length they may have.
macro_rules! byte_string {
    ($name:ident) => {
        impl<'a> $name<'a> {
            /// The empty string.
            pub const EMPTY: $name<'static> = $name(Cow::Borrowed(&[]));

            /// The bytes.
            #[inline]
            pub fn as_bytes(&self) -> &[u8] {
                &self.0
            }

            /// The text, unless the bytes are not UTF-8.
            pub fn to_str(&self) -> Result<&str, Utf8Error> {
                std::str::from_utf8(&self.0)
            }

            /// The text, with `U+FFFD` at the places that are not UTF-8.
            pub fn to_str_lossy(&self) -> Cow<'_, str> {
                String::from_utf8_lossy(&self.0)
            }

            /// How many bytes.
            #[inline]
            pub fn len(&self) -> usize {
                self.0.len()
            }

            /// Whether there are no bytes.
            #[inline]
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }

            /// The same string, borrowed from this one.
            #[inline]
            pub fn borrowed(&self) -> $name<'_> {
                $name(Cow::Borrowed(&self.0))
            }

            /// The same string with its own memory.
            pub fn into_owned(self) -> $name<'static> {
                $name(Cow::Owned(self.0.into_owned()))
            }
        }

        impl PartialEq for $name<'_> {
            fn eq(&self, other: &$name<'_>) -> bool {
                self.0 == other.0
            }
        }

        impl Eq for $name<'_> {}

        impl Ord for $name<'_> {
            fn cmp(&self, other: &Self) -> Ordering {
                self.0.cmp(&other.0)
            }
        }

        impl PartialOrd for $name<'_> {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }

        /// So that a map with such keys can be asked with bytes.
        impl Borrow<[u8]> for $name<'_> {
            fn borrow(&self) -> &[u8] {
                &self.0
            }
        }

        impl AsRef<[u8]> for $name<'_> {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }

        impl Hash for $name<'_> {
            fn hash<H: Hasher>(&self, state: &mut H) {
                self.0.hash(state)
            }
        }

        impl PartialEq<str> for $name<'_> {
            fn eq(&self, other: &str) -> bool {
                *self.0 == *other.as_bytes()
            }
        }

        impl PartialEq<&str> for $name<'_> {
            fn eq(&self, other: &&str) -> bool {
                *self.0 == *other.as_bytes()
            }
        }

        impl fmt::Display for $name<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.to_str_lossy())
            }
        }

        impl fmt::Debug for $name<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                debug_text(&self.0, f)
            }
        }
    };
}

/// Readable for text in any language, and exact for bytes that are none.
fn debug_text(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match std::str::from_utf8(bytes) {
        Ok(text) => write!(f, "\"{}\"", text.escape_debug()),
        Err(_) => write!(f, "\"{}\"", bytes.escape_ascii()),
    }
}

/// A short string: the names, keys and most properties of AMQP, at most 255 bytes.
///
/// The length is checked when it is made, so encoding cannot fail for it.
///
/// ```
/// use leveret_wire::{InvalidValue, ShortStr};
///
/// let key = ShortStr::try_from("order.created").unwrap();
/// assert_eq!(key, "order.created");
/// assert_eq!(ShortStr::try_from("x".repeat(256)), Err(InvalidValue::TooLong { length: 256 }));
/// ```
#[derive(Clone, Default)]
pub struct ShortStr<'a>(Cow<'a, [u8]>);

byte_string!(ShortStr);

impl<'a> ShortStr<'a> {
    /// The longest short string, in bytes.
    pub const MAX: usize = 255;

    /// A short string of a literal, checked when it is compiled if used in a `const`.
    ///
    /// ```
    /// use leveret_wire::ShortStr;
    /// const ATTEMPT: ShortStr<'static> = ShortStr::from_static("x-attempt");
    /// ```
    ///
    /// # Panics
    /// If the literal has more than 255 bytes. Use `try_from` for a string that is not a literal.
    pub const fn from_static(text: &'static str) -> ShortStr<'static> {
        assert!(text.len() <= ShortStr::MAX, "a short string has at most 255 bytes");
        ShortStr(Cow::Borrowed(text.as_bytes()))
    }

    /// A short string of bytes that may not be text.
    #[inline]
    pub fn from_bytes(bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self, InvalidValue> {
        let bytes = bytes.into();
        match bytes.len() {
            0..=Self::MAX => Ok(ShortStr(bytes)),
            length => Err(InvalidValue::TooLong { length }),
        }
    }

    /// As much of the text as fits: for reasons and explanations.
    pub fn truncated(text: &'a str) -> Self {
        ShortStr(Cow::Borrowed(&text.as_bytes()[..text.floor_char_boundary(Self::MAX)]))
    }

    /// For the reader, which takes the length from one octet.
    #[inline]
    pub(crate) fn from_wire(bytes: &'a [u8]) -> Self {
        debug_assert!(bytes.len() <= Self::MAX);
        ShortStr(Cow::Borrowed(bytes))
    }
}

impl<'a> TryFrom<&'a str> for ShortStr<'a> {
    type Error = InvalidValue;
    #[inline]
    fn try_from(text: &'a str) -> Result<Self, InvalidValue> {
        Self::from_bytes(text.as_bytes())
    }
}

impl<'a> TryFrom<&'a String> for ShortStr<'a> {
    type Error = InvalidValue;
    fn try_from(text: &'a String) -> Result<Self, InvalidValue> {
        Self::from_bytes(text.as_bytes())
    }
}

impl TryFrom<String> for ShortStr<'_> {
    type Error = InvalidValue;
    fn try_from(text: String) -> Result<Self, InvalidValue> {
        Self::from_bytes(text.into_bytes())
    }
}

/// A long string: text or bytes up to the size of a frame.
#[derive(Clone, Default)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub struct LongStr<'a>(pub(crate) Cow<'a, [u8]>);

byte_string!(LongStr);

impl<'a> From<&'a String> for LongStr<'a> {
    fn from(text: &'a String) -> Self {
        LongStr(Cow::Borrowed(text.as_bytes()))
    }
}

impl<'a> From<&'a str> for LongStr<'a> {
    fn from(text: &'a str) -> Self {
        LongStr(Cow::Borrowed(text.as_bytes()))
    }
}

impl From<String> for LongStr<'_> {
    fn from(text: String) -> Self {
        LongStr(Cow::Owned(text.into_bytes()))
    }
}

impl<'a> From<&'a [u8]> for LongStr<'a> {
    #[inline]
    fn from(bytes: &'a [u8]) -> Self {
        LongStr(Cow::Borrowed(bytes))
    }
}

impl From<Vec<u8>> for LongStr<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        LongStr(Cow::Owned(bytes))
    }
}

/// A long string that holds a password or token: on the wire as any other, in `Debug` never.
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub struct Secret<'a>(Cow<'a, [u8]>);

impl<'a> Secret<'a> {
    /// Wraps the bytes.
    #[inline]
    pub fn new(bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        Secret(bytes.into())
    }

    /// The bytes themselves, for whoever has to check or send them.
    #[inline]
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    /// The same secret with its own memory.
    pub fn into_owned(self) -> Secret<'static> {
        Secret(Cow::Owned(self.0.into_owned()))
    }
}

impl fmt::Debug for Secret<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[hidden]")
    }
}

#[cfg(feature = "arbitrary")]
impl<'a> arbitrary::Arbitrary<'a> for ShortStr<'a> {
    fn arbitrary(u: &mut arbitrary::Unstructured<'a>) -> arbitrary::Result<Self> {
        let length = u.int_in_range(0..=Self::MAX.min(u.len()))?;
        Ok(ShortStr(Cow::Borrowed(u.bytes(length.min(u.len()))?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_that_is_not_utf8_is_kept_and_shown_as_well_as_it_can_be() {
        let odd = ShortStr::from_bytes(&b"caf\xe9"[..]).unwrap();
        assert_eq!(odd.as_bytes(), b"caf\xe9");
        assert!(odd.to_str().is_err());
        assert_eq!(odd.to_string(), "caf\u{fffd}");
        assert_eq!(format!("{odd:?}"), r#""caf\xe9""#);
        assert_eq!(format!("{:?}", LongStr::from("café\n")), r#""café\n""#);
    }

    #[test]
    fn a_short_string_holds_255_bytes_and_no_more() {
        assert_eq!(ShortStr::try_from("x".repeat(255)).unwrap().len(), 255);
        let length = "é".repeat(128).len();
        assert_eq!(ShortStr::try_from("é".repeat(128)), Err(InvalidValue::TooLong { length }));
    }

    #[test]
    fn a_reason_is_cut_between_characters() {
        let text = "é".repeat(200);
        assert_eq!(ShortStr::truncated(&text), "é".repeat(127).as_str());
        assert_eq!(ShortStr::truncated("short"), "short");
    }

    #[test]
    fn a_map_with_such_keys_can_be_asked_with_bytes() {
        let mut map = std::collections::HashMap::new();
        map.insert(ShortStr::from_static("tag"), 1);
        assert_eq!(map.get_mut(b"tag".as_slice()), Some(&mut 1));
    }

    #[test]
    fn a_secret_is_not_shown() {
        let secret = Secret::new(&b"\0guest\0hunter2"[..]);
        assert!(!format!("{secret:?}").contains("hunter2"));
        assert_eq!(secret.expose(), b"\0guest\0hunter2");
    }
}
