//! The databases there are.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use sqlx::Pool;

use crate::error::Error;
use crate::outbox::Outbox;
use crate::outbox::store::Store;
use crate::schema::Schema;

/// A database that this crate works on: [`sqlx::Postgres`] and [`sqlx::Sqlite`].
pub trait Backend: sqlx::Database + Sealed {
    #[doc(hidden)]
    fn migrate<'a>(pool: &'a Pool<Self>, schema: &'a Schema) -> BoxFuture<'a, Result<(), Error>>;

    #[doc(hidden)]
    fn check<'a>(pool: &'a Pool<Self>, schema: &'a Schema) -> BoxFuture<'a, Result<(), Error>>;

    #[doc(hidden)]
    fn store(pool: &Pool<Self>, outbox: &Outbox) -> Arc<dyn Store>;
}

/// Nobody else's database or connection can be one of these.
pub trait Sealed {}

macro_rules! backends {
    ($($feature:literal: $database:ty, $connection:ty, $module:ident);*) => {$(
        #[cfg(feature = $feature)]
        impl Sealed for $database {}

        #[cfg(feature = $feature)]
        impl Sealed for $connection {}

        #[cfg(feature = $feature)]
        impl Backend for $database {
            fn migrate<'a>(
                pool: &'a Pool<Self>,
                schema: &'a Schema,
            ) -> BoxFuture<'a, Result<(), Error>> {
                Box::pin(crate::migrate::$module::migrate(pool, schema))
            }

            fn check<'a>(
                pool: &'a Pool<Self>,
                schema: &'a Schema,
            ) -> BoxFuture<'a, Result<(), Error>> {
                Box::pin(crate::migrate::$module::check(pool, schema))
            }

            fn store(pool: &Pool<Self>, outbox: &Outbox) -> Arc<dyn Store> {
                crate::outbox::$module::store(pool, outbox)
            }
        }
    )*};
}

backends! {
    "postgres": sqlx::Postgres, sqlx::PgConnection, postgres;
    "sqlite": sqlx::Sqlite, sqlx::SqliteConnection, sqlite
}

/// A name that nobody else has: as messages get one.
pub(crate) fn unique() -> String {
    let parts = leveret::Message::default().identified().into_parts();
    let id = parts.ok().and_then(|(_, properties)| properties.message_id);
    id.map(|id| id.to_string()).unwrap_or_default()
}
