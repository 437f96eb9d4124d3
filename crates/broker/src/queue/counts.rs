//! What a quorum queue tells consumers about earlier deliveries of a message.
//!
//! | header | 3.10 | 4.3 |
//! |---|---|---|
//! | `x-delivery-count` | how often it came back; on `basic.get` also if never | how often it failed, in queues before this one as well |
//! | `x-acquired-count` | | how often it was given out before; the first time, how often it failed in queues before |

use leveret_wire::{Properties, RawProperties};

use super::Entry;
use crate::fields::Fields;
use crate::profile::Profile;

/// How a message gets to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Consume,
    Get,
}

/// The properties with the counts that a quorum queue adds to them, if it adds any.
pub(crate) fn counted(profile: Profile, way: Way, entry: &Entry) -> Option<RawProperties> {
    let Entry { failures, returns, .. } = *entry;
    let (delivered, acquired) = match profile {
        Profile::RabbitMq3_10 => {
            let tells = failures > 0 || way == Way::Get;
            (tells.then_some(failures), None)
        }
        Profile::RabbitMq4_3 => {
            let acquired = if returns == 0 { failures } else { returns };
            (Some(failures).filter(|count| *count > 0), Some(acquired).filter(|count| *count > 0))
        }
    };
    if delivered.is_none() && acquired.is_none() {
        return None;
    }
    // What cannot be read is left alone.
    let mut properties = Properties::decode(entry.message.encoded_properties()).ok()?;
    let headers = properties.headers.take().unwrap_or_default();
    let mut fields = Fields::of(&headers);
    for (name, count) in [("x-delivery-count", delivered), ("x-acquired-count", acquired)] {
        if let Some(count) = count {
            fields.set(name, i64::from(count));
        }
    }
    fields.sort();
    properties.headers = Some(fields.to_table());
    Some(RawProperties::from(&properties))
}
