//! The jobs, done by lapin on a connection of deadpool-lapin's pool.
//!
//! It pools connections and nothing else: who has got one opens channels on it, keeps them, and does with them what
//! lapin's best form does.

use deadpool_lapin::{Config, PoolConfig, Runtime};

use super::jobs::Run;
use super::lapin;
use crate::by_hand::uri;
use crate::meter::{Failure, Measured};

pub(crate) async fn run(run: Run) -> Result<Measured, Failure> {
    let config = Config { url: Some(uri(run.port)), pool: Some(PoolConfig::new(1)) };
    let pool = config.create_pool(::lapin::ConnectionProperties::default, Runtime::Tokio1)?;
    lapin::run_on(&*pool.get().await?, run).await
}
