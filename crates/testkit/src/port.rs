//! Free TCP ports on loopback.

use std::net::{Ipv4Addr, TcpListener};

use crate::random::random;

/// Below the range from which the kernel takes the ports of outgoing connections (32768 and up on
/// Linux).
///
/// A server that is down for a while must find its port free again, and a client that keeps
/// dialling a port nobody listens on must never be connected to itself: both happen, now and then,
/// inside that range.
const LOWEST: u16 = 10_000;
const HIGHEST: u16 = 32_000;

/// Ports that nobody listens on at this moment. Somebody else may take one before its user does, so
/// who starts a server on one is prepared to try again.
pub(crate) fn free_ports<const N: usize>() -> [u16; N] {
    // All are held until the last is found, or the same port could be handed out twice.
    let held: [TcpListener; N] = std::array::from_fn(|_| listener());
    held.map(|listener| listener.local_addr().expect("a listener has an address").port())
}

/// A listener on such a port.
pub(crate) fn listener() -> TcpListener {
    const TRIES: usize = 1000;
    (0..TRIES)
        .find_map(|_| {
            let port = LOWEST + (random() % u64::from(HIGHEST - LOWEST)) as u16;
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()
        })
        .unwrap_or_else(|| {
            panic!("no free port between {LOWEST} and {HIGHEST} on 127.0.0.1 in {TRIES} tries")
        })
}
