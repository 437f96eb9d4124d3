//! Deletes what has expired, from time to time.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use sqlx::Database;
use tokio::task::AbortHandle;

use super::Shared;
use crate::dialect::Dialect;

/// How often.
const PAUSE: Duration = Duration::from_secs(60);

/// The task that does it, which ends with the inbox.
#[derive(Default)]
pub(super) struct Cleaner(OnceLock<AbortHandle>);

impl Cleaner {
    /// Starts it, unless it runs.
    pub(super) fn start<DB: Database, L: Dialect<DB>>(inbox: &Arc<Shared<DB, L>>) {
        inbox.cleaner.0.get_or_init(|| tokio::spawn(clean(Arc::downgrade(inbox))).abort_handle());
    }
}

async fn clean<DB: Database, L: Dialect<DB>>(inbox: Weak<Shared<DB, L>>) {
    loop {
        tokio::time::sleep(PAUSE).await;
        let Some(inbox) = inbox.upgrade() else { return };
        if let Err(error) = inbox.clean().await {
            tracing::warn!("{error}");
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        if let Some(task) = self.0.get() {
            task.abort();
        }
    }
}
