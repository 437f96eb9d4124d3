//! Durations as people write them: `1500ms`, `2s`, `5m`, `4h`, `7d`, and sums of these.

use std::time::Duration;

const UNITS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// Reads one. The error says what is allowed.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let wrong = || {
        format!(
            "{text:?} is not a duration: write a number and a unit, as in 1500ms, 2s, 5m, 4h, 7d or 1h30m"
        )
    };
    let mut rest = text.trim();
    let mut milliseconds = 0u64;
    if rest.is_empty() {
        return Err(wrong());
    }
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        rest = &rest[digits..];
        let letters = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
        let unit = UNITS.iter().find(|(name, _)| *name == &rest[..letters]);
        let (_, factor) = unit.ok_or_else(wrong)?;
        rest = &rest[letters..];
        let sum = number.checked_mul(*factor).and_then(|part| milliseconds.checked_add(part));
        milliseconds = sum.ok_or_else(|| format!("{text:?} is too long a duration"))?;
    }
    Ok(Duration::from_millis(milliseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_numbers_with_units() {
        let cases =
            [("0s", 0), ("1500ms", 1500), ("2s", 2000), ("1h30m", 5_400_000), ("7d", 604_800_000)];
        for (text, milliseconds) in cases {
            assert_eq!(parse(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_what_is_allowed() {
        for text in ["", "5", "s", "4 hours", "-1s", "1.5s", "5x", "é", "99999999999999999999d"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse("5x").unwrap_err().contains("4h"));
        assert!(parse("9999999999999999d").unwrap_err().contains("too long"));
    }
}
