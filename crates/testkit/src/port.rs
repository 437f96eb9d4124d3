//! Free TCP ports on loopback.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::random::random;

/// Below the range from which the kernel takes the ports of outgoing connections (32768 and up on
/// Linux).
///
/// A server that is down for a while must find its port free again, and a client that keeps
/// dialling a port nobody listens on must never be connected to itself: both happen, now and then,
/// inside that range.
const LOWEST: u16 = 10_000;
const HIGHEST: u16 = 32_000;

/// How many ports a test process has for itself.
const BLOCK: u16 = 100;

/// The ports of this process: no other test process takes one of them, not even while the server on
/// it is down.
struct Block {
    first: u16,
    /// Counts up, so that a port is not handed out twice before all others were.
    next: AtomicU16,
    /// Locked as long as the process lives.
    _lock: File,
}

fn block() -> &'static Block {
    static OURS: OnceLock<Block> = OnceLock::new();
    OURS.get_or_init(|| {
        let folder = std::env::temp_dir().join("leveret-ports");
        fs::create_dir_all(&folder)
            .unwrap_or_else(|error| panic!("could not make {}: {error}", folder.display()));
        let blocks = (HIGHEST - LOWEST) / BLOCK;
        let start = (random() % u64::from(blocks)) as u16;
        (0..blocks)
            .find_map(|n| {
                let number = (start + n) % blocks;
                let lock = File::create(folder.join(number.to_string())).ok()?;
                lock.try_lock().ok()?;
                let first = LOWEST + number * BLOCK;
                Some(Block { first, next: AtomicU16::new(0), _lock: lock })
            })
            .unwrap_or_else(|| {
                panic!(
                    "all blocks of ports are taken; see which processes hold {}",
                    folder.display()
                )
            })
    })
}

/// Ports that nobody listens on at this moment.
pub(crate) fn free_ports<const N: usize>() -> [u16; N] {
    // All are held until the last is found, or the same port could be handed out twice.
    let held: [TcpListener; N] = std::array::from_fn(|_| listener());
    held.map(|listener| listener.local_addr().expect("a listener has an address").port())
}

/// A listener on such a port.
pub(crate) fn listener() -> TcpListener {
    let block = block();
    (0..BLOCK)
        .find_map(|_| {
            let port = block.first + block.next.fetch_add(1, Ordering::Relaxed) % BLOCK;
            TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()
        })
        .unwrap_or_else(|| {
            panic!("all {BLOCK} ports from {} on are taken on 127.0.0.1", block.first)
        })
}
