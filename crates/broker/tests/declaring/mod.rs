//! Declarations and the like, and how brokers answer them.

pub(crate) mod asking;
pub(crate) mod cases;
pub(crate) mod requests;
pub(crate) mod table;
