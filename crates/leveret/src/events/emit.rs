//! What handlers of events may do instead of replying.

use crate::amqp::ShortStr;
use crate::consumer::{FromIncoming, Given, Incoming};
use crate::error::{Error, ErrorKind};
use crate::message::IntoMessage;

use super::Events;

/// Publishes events because of the message that is handled. As an argument of a handler.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::BoxError> {
/// use leveret::prelude::*;
///
/// async fn ship(order: String, emit: Emit) -> Result<(), Error> {
///     emit.publish("order.shipped", order).await
/// }
///
/// let client = Client::embedded().await?;
/// let orders = client.events("orders");
/// let mut shipped = orders.listen(["order.shipped"]).stream().await?;
/// let shipping = orders.subscribe("shipping", ["order.paid"]);
/// shipping.declare().await?;
///
/// orders.group("order 17")?.publish("order.paid", "two books").await?;
/// let mut delivery = None;
/// shipping.handle(ship).run_until(async { delivery = shipped.next().await }).await?;
///
/// let delivery = delivery.expect("an event")?;
/// assert_eq!(delivery.body(), "two books");
/// assert_eq!(delivery.properties().correlation_id.unwrap(), "order 17");
/// # Ok(())
/// # }
/// ```
///
/// What is emitted has the correlation id of the message that is handled, or its message id if it has none, and belongs to
/// its trace. It is confirmed before `publish` returns, and so before the message is acked: if the handler fails later, it is
/// called again and emits again.
///
/// A subscription emits to the events that it belongs to; [`through`](Self::through) emits to others. Other consumers
/// and services emit to the [`Events`] that they were given as their [state](crate::ConsumerBuilder::state).
#[derive(Clone, Debug)]
pub struct Emit(Events);

impl Emit {
    /// Publishes an event, see [`Events::publish`].
    pub async fn publish(&self, key: &str, event: impl IntoMessage) -> Result<(), Error> {
        self.0.publish(key, event).await
    }

    /// To other events, because of the same message.
    #[must_use]
    pub fn through(&self, events: &Events) -> Emit {
        Emit(events.in_group(self.0.group.clone()))
    }

    /// The correlation id that emitted events have; none if the message that is handled has no id at all.
    pub fn correlation_id(&self) -> Option<&ShortStr<'static>> {
        self.0.group.as_ref()
    }
}

impl FromIncoming for Emit {
    fn from_incoming(incoming: &Incoming) -> Result<Self, Error> {
        let events: Events = incoming.state().ok_or_else(has_no_events)?;
        let properties = incoming.properties();
        let id = properties.correlation_id.or(properties.message_id).map(ShortStr::into_owned);
        Ok(Emit(events.in_group(id)))
    }

    fn check(given: &Given<'_>) -> Result<(), Error> {
        if given.has_state::<Events>() { Ok(()) } else { Err(has_no_events()) }
    }
}

fn has_no_events() -> Error {
    let text = "a handler takes Emit, and its consumer or service has no Events to publish to: call .state(events), or make the \
                consumer by Events::subscribe";
    Error::new(ErrorKind::Invalid, text)
}
