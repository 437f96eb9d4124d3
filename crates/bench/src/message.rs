//! Bodies, some of which begin with the number of their message: so each message can be accounted for.

use bytes::Bytes;

/// A body that says nothing.
pub(crate) fn filler(size: usize) -> Bytes {
    Bytes::from(vec![b'x'; size])
}

/// The body of a message, which begins with its number and has at least 8 bytes.
pub(crate) fn numbered(number: u64, size: u32) -> Bytes {
    let mut body = vec![b'x'; size as usize];
    body[..8].copy_from_slice(&number.to_be_bytes());
    body.into()
}

pub(crate) fn number(body: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(*body.first_chunk()?))
}
