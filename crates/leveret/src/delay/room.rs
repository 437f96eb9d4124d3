//! Room for what the broker adds to a message while it waits: headers have to fit into a frame, and it does not look. One whose
//! headers do not would cost everybody who takes it the connection.

use tokio::time::timeout;

use crate::amqp::{Properties, RawProperties, Value};
use crate::connection::Client;
use crate::error::{Error, ErrorKind};

use super::steps::Steps;

/// An entry of `x-death` without routing keys: the names of its fields, of queue and exchange, and some numbers.
const DEATH: usize = 192;

/// What is said once more about the first death and the last one.
const FIRST_AND_LAST: usize = 512;

/// Messages are taken from two more queues, those of the way out, at most.
const WAY_OUT: usize = 2;

/// No connection has smaller frames than this, so nothing up to here has to be looked at closely.
const SMALLEST_FRAME: usize = 4096;

/// An error if a message would no longer fit.
pub(super) async fn check(
    client: &Client,
    properties: &Properties<'_>,
    routing_key: &str,
    steps: Steps,
) -> Result<(), Error> {
    let deaths = steps.waits() + WAY_OUT;
    let added = FIRST_AND_LAST + deaths * (DEATH + length_of_keys(properties, routing_key));
    let size = RawProperties::from(properties).as_bytes().len();
    if size + added <= SMALLEST_FRAME {
        return Ok(());
    }
    let patience = client.core().options.timeout;
    let late = |_| Error::timed_out("delaying a message", patience);
    let up = timeout(patience, client.core().home().up()).await.map_err(late)??;
    let most = up.connection.frame_max().get() as usize;
    if size + added <= most {
        return Ok(());
    }
    let text = format!(
        "the properties of the message have {size} bytes, and the broker adds up to {added} while it waits: that is \
         more than the {most} that fit into a frame. Take something out of its headers, or into its body"
    );
    Err(Error::new(ErrorKind::Invalid, text))
}

/// Each death names them all, `CC` and `BCC` included.
fn length_of_keys(properties: &Properties<'_>, routing_key: &str) -> usize {
    const TYPE_AND_LENGTH: usize = 5;
    let lists =
        properties.headers.iter().flat_map(|headers| [headers.get("CC"), headers.get("BCC")]);
    let copies = lists.flatten().map(|list| match list {
        Value::Array(keys) => keys.as_bytes().len(),
        _ => 0,
    });
    TYPE_AND_LENGTH + routing_key.len() + copies.sum::<usize>()
}
