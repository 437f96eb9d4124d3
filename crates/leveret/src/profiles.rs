//! The designs of four systems, so that their programs and Leveret's can share queues.

mod acapi;
mod acapi_site;
mod chandra;
mod cover_art;
mod orb;

pub use acapi::Acapi;
pub use acapi_site::{AcapiSite, AcapiTraffic};
pub use chandra::Chandra;
pub use cover_art::CoverArt;
pub use orb::{Orb, Redelivered, Redelivery};
