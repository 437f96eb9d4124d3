//! The designs of four systems, so that their programs and those of [`leveret`] can share queues: where failed messages wait,
//! how they are counted and where they end.
//!
//! Each design is a [`RetryProfile`](leveret::retry::RetryProfile) on the public API of `leveret` alone, as yours can be.
//!
//! | design | of | counts in | parks in |
//! |---|---|---|---|
//! | [`Acapi`] | ACAPI; `Maxretry` of Sneakers and Kicks | `x-death` | `Q-error` |
//! | [`Chandra`] | the Chandra client library | `x-death` | `Q.parking_lot` |
//! | [`CoverArt`] | the Cover Art Archive's indexer | `mb-retries`, downwards | `….failed` |
//! | [`Orb`] | Orb, with its [redelivery service](Orb::redelivery) | `orb-redelivery-count` | `orb.parked` |
//!
//! [`AcapiSite`] has the exchanges and queues of ACAPI, for events and requests.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), leveret::Error> {
//! use std::time::Duration;
//! use leveret::{Client, Queue};
//! use leveret_profiles::Acapi;
//!
//! let client = Client::embedded().await?; // or Client::connect("amqp://localhost")
//! let retry = Acapi::new().interval(Duration::from_secs(30)).max_retries(5);
//! client.apply(&retry.topology(Queue::quorum("orders"))?).await?;
//! let runner = client.consumer("orders").retry(retry).handle(async |body: String| {
//!     println!("{body}"); // an error waits in `orders-retry`, and ends in `orders-error`
//! });
//! # let _ = runner;
//! # Ok(())
//! # }
//! ```

#[macro_use]
mod names;

mod acapi;
mod chandra;
mod cover_art;
mod one_wait;
mod orb;
mod queues;
mod routes;

pub use acapi::{Acapi, AcapiSite, AcapiTraffic};
pub use chandra::Chandra;
pub use cover_art::CoverArt;
pub use orb::Orb;
