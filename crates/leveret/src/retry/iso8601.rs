//! Times as text, in whole seconds of UTC: `2024-02-29T12:30:05Z`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::stamp::seconds;

const DAY: u64 = 86_400;
/// From the first of March of the year 0, with which the years of this calendar begin, to 1970.
const TO_1970: u64 = 719_468;
const FOUR_CENTURIES: u64 = 146_097;

pub(crate) fn format(time: SystemTime) -> String {
    let seconds = seconds(time);
    let (day, second) = (seconds / DAY, seconds % DAY);
    let (year, month, day) = date(day);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Reads what [`format`] wrote, and no other spelling of it.
pub(crate) fn parse(text: &str) -> Option<SystemTime> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let [year, month, day] = numbers(date, '-')?;
    let [hour, minute, second] = numbers(time, ':')?;
    let seconds = days(year, month, day)? * DAY + hour * 3600 + minute * 60 + second;
    let time = UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?;
    (format(time) == text).then_some(time)
}

/// Three small numbers.
fn numbers(text: &str, separator: char) -> Option<[u64; 3]> {
    let mut parts = text.split(separator).map(|part| part.parse::<u32>().ok().map(u64::from));
    Some([parts.next()??, parts.next()??, parts.next()??])
}

/// Year, month and day of a day since 1970.
fn date(days: u64) -> (u64, u64, u64) {
    // Years begin in March here, so that the day that some have more is their last one.
    let days = days + TO_1970;
    let (era, day) = (days / FOUR_CENTURIES, days % FOUR_CENTURIES);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let of_month = day - (153 * month + 2) / 5 + 1;
    let (month, later) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + later, month, of_month)
}

/// The day since 1970 of a year, month and day.
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    let year = if month <= 2 { year.checked_sub(1)? } else { year };
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day.checked_sub(1)?;
    let days = era * FOUR_CENTURIES + of_era * 365 + of_era / 4 - of_era / 100 + of_year;
    days.checked_sub(TO_1970)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_others_write_them_and_read_again() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_709_209_805, "2024-02-29T12:30:05Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(format(time), text);
            assert_eq!(parse(text), Some(time), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_not_read() {
        for text in [
            "",
            "yesterday",
            "TZ",
            "2024-02-30T00:00:00Z",
            "2024-13-01T00:00:00Z",
            "2024-00-01T00:00:00Z",
            "2024-01-00T00:00:00Z",
            "2024-01-01T24:00:00Z",
            "2024-01-01T00:00:00",
            "2024-01-01T00:00:00+02:00",
            "2024-1-1T0:0:0Z",
            "2024-01-01T00:00:00:00Z",
            "0000-01-01T00:00:00Z",
            "1969-12-31T23:59:59Z",
            "4294967295-12-31T23:59:59Z",
            "99999999999999999999-01-01T00:00:00Z",
            "2024-01-01T4294967295:4294967295:4294967295Z",
        ] {
            let read = parse(text);
            assert!(read.is_none_or(|time| format(time) == text), "{text}: {read:?}");
            assert!(read.is_none() || text.starts_with("4294967295-"), "{text}: {read:?}");
        }
    }
}
