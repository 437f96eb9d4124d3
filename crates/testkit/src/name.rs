//! Names for what a test makes on a server that it shares with others.

use crate::random::random;

/// PostgreSQL cuts names off after 63 bytes, and the random part must not be what is lost.
const LONGEST_TEST_NAME: usize = 50;

/// A name that says which test it belongs to and that no other test uses.
pub(crate) fn unique_name() -> String {
    // A test's thread bears the test's name.
    let thread = std::thread::current();
    let test: String = thread
        .name()
        .unwrap_or("test")
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' })
        .take(LONGEST_TEST_NAME)
        .collect();
    format!("{test}_{:08x}", random() as u32)
}
