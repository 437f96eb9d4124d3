//! Correlation ids: a UUID for each call, by which its replies are known.

use crate::amqp::ShortStr;
use crate::random;

/// The length of the text.
const LEN: usize = 36;

/// Where it has the two digits of each byte.
const PLACES: [usize; 16] = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];

/// A UUID of version 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CorrelationId(pub(super) u128);

impl CorrelationId {
    /// One that nobody had before, and nobody can guess.
    pub(crate) fn fresh() -> Self {
        const VERSION: u128 = 0xf << 76;
        const VARIANT: u128 = 0b11 << 62;
        let number = u128::from(random::number()) << 64 | u128::from(random::number());
        CorrelationId(number & !VERSION & !VARIANT | 4 << 76 | 0b10 << 62)
    }

    /// As text: 32 digits in five groups.
    pub(crate) fn to_text(self) -> Text {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [b'-'; LEN];
        for (place, byte) in PLACES.into_iter().zip(self.0.to_be_bytes()) {
            text[place] = DIGITS[usize::from(byte >> 4)];
            text[place + 1] = DIGITS[usize::from(byte & 15)];
        }
        Text(text)
    }

    /// Reads what [`to_text`](Self::to_text) wrote, and no other spelling of it: whoever replies copies it as it is.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let text: &[u8; LEN] = text.try_into().ok()?;
        // What it would be, without a branch for each digit, since nobody foresees which digits come; and then whether it is.
        let digit = |at: usize| (text[at] & 15) + 9 * (text[at] >> 6);
        let bytes = PLACES.map(|place| digit(place) << 4 | digit(place + 1));
        let id = CorrelationId(u128::from_be_bytes(bytes));
        (id.to_text().0 == *text).then_some(id)
    }
}

/// The text of a fresh one, for messages that belong together.
pub(crate) fn new_correlation_id() -> ShortStr<'static> {
    CorrelationId::fresh().to_text().as_short_str().into_owned()
}

/// The text of an id, without memory of its own.
pub(crate) struct Text([u8; LEN]);

impl Text {
    pub(crate) fn as_short_str(&self) -> ShortStr<'_> {
        // It is short.
        ShortStr::from_bytes(&self.0[..]).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_uuid_of_version_4_and_comes_back_as_it_went() {
        for _ in 0..1000 {
            let id = CorrelationId::fresh();
            let text = id.to_text().as_short_str().to_string();
            assert_eq!(CorrelationId::parse(text.as_bytes()), Some(id));
            assert_eq!((text.len(), &text[14..15]), (36, "4"));
            assert!(matches!(&text[19..20], "8" | "9" | "a" | "b"), "{text}");
            assert_ne!(id, CorrelationId::fresh());
        }
        let known = CorrelationId(0x0123_4567_89ab_4def_8123_4567_89ab_cdef);
        let text = known.to_text().as_short_str().to_string();
        assert_eq!(text, "01234567-89ab-4def-8123-456789abcdef");
    }

    #[test]
    fn other_spellings_are_not_ours() {
        for text in [
            "",
            "1",
            "0123456789ab4def8123456789abcdef",
            "01234567-89AB-4def-8123-456789abcdef",
            "01234567-89ab-4def-8123-456789abcdeg",
            "01234567089ab-4def-8123-456789abcdef",
            "0123456-789ab-4def-8123-456789abcdef",
            "{01234567-89ab-4def-8123-456789abcde",
            "01234567-89ab-4def-8123-456789abcdef ",
        ] {
            assert_eq!(CorrelationId::parse(text.as_bytes()), None, "{text}");
        }
    }
}
