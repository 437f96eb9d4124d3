//! Durations as people write them: `1500ms`, `2s`, `5m`, `4h`, `7d`, and sums of these.

use std::time::Duration;

const UNITS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// Writes one, as a number of the largest unit that it is a whole number of. Less than a millisecond is left out.
pub(crate) fn write(time: Duration) -> String {
    let ms = time.as_millis();
    let whole = UNITS.iter().rev().find(|(_, unit)| ms > 0 && ms.is_multiple_of(u128::from(*unit)));
    let (name, unit) = whole.unwrap_or(&UNITS[0]);
    format!("{}{name}", ms / u128::from(*unit))
}

/// Reads one. The error says what is allowed.
#[cfg(feature = "files")]
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

#[cfg(all(test, feature = "files"))]
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
    fn what_is_written_is_read_as_the_same() {
        let cases = [(0, "0ms"), (90_500, "90500ms"), (5_400_000, "90m"), (604_800_000, "7d")];
        for (milliseconds, text) in cases {
            let time = Duration::from_millis(milliseconds);
            assert_eq!((write(time).as_str(), parse(text)), (text, Ok(time)));
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
