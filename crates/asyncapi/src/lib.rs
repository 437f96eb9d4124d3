#![doc = include_str!("../README.md")]

mod asyncapi;
mod bindings;
mod body;
mod document;
mod identifiers;
mod methods;
mod schema;

pub use asyncapi::AsyncApi;
pub use body::Body;
pub use methods::Methods;
