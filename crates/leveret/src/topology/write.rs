//! Topologies as files, which [`Topology::read`] reads again.

use std::time::Duration;

use toml::{Table, Value as Toml};

use super::{Binding, Destination, Exchange, Queue, Topology};
use crate::amqp::Value;
use crate::error::{Error, ErrorKind};

impl Topology {
    /// As TOML, from which [`Topology::from_toml`] makes the same topology.
    ///
    /// ```
    /// use leveret::{Exchange, Queue, Topology};
    ///
    /// let topology = Topology::new()
    ///     .exchange(Exchange::topic("orders"))
    ///     .queue(Queue::quorum("billing").bind("orders", "order.*"));
    /// assert_eq!(Topology::from_toml(&topology.to_toml()?)?, topology);
    /// # Ok::<(), leveret::Error>(())
    /// ```
    ///
    /// It is an error if a binding leads to a queue or exchange that is not part of the topology, or if an argument has a value
    /// for which files have no form (bytes, times, nothing).
    pub fn to_toml(&self) -> Result<String, Error> {
        let mut file = Table::new();
        let mut bindings: Vec<&Binding> = self.bindings.iter().collect();
        let exchanges: Vec<Toml> = self
            .exchanges
            .iter()
            .map(|exchange| {
                let destination = Destination::Exchange(exchange.name.clone());
                Ok(Toml::Table(exchange_table(exchange, &mut bindings, &destination)?))
            })
            .collect::<Result<_, Error>>()?;
        let queues: Vec<Toml> = self
            .queues
            .iter()
            .map(|queue| {
                let destination = Destination::Queue(queue.name.clone());
                Ok(Toml::Table(queue_table(queue, &mut bindings, &destination)?))
            })
            .collect::<Result<_, Error>>()?;
        if let Some(binding) = bindings.first() {
            let text = format!("{binding} leads out of the topology, which a file has no form for");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        for (name, objects) in [("exchange", exchanges), ("queue", queues)] {
            if !objects.is_empty() {
                file.insert(name.to_owned(), Toml::Array(objects));
            }
        }
        toml::to_string(&file)
            .map_err(|error| Error::caused(ErrorKind::Invalid, "the topology as TOML", error))
    }
}

fn exchange_table(
    exchange: &Exchange,
    bindings: &mut Vec<&Binding>,
    destination: &Destination,
) -> Result<Table, Error> {
    let mut table = Table::new();
    table.insert("name".to_owned(), exchange.name.clone().into());
    table.insert("type".to_owned(), exchange.kind.as_str().into());
    set(&mut table, "durable", exchange.durable, true);
    set(&mut table, "auto-delete", exchange.auto_delete, false);
    set(&mut table, "internal", exchange.internal, false);
    let mut others = Table::new();
    for (name, value) in exchange.arguments() {
        match (name, value.as_str()) {
            ("alternate-exchange", Some(alternate)) => {
                table.insert("alternate".to_owned(), alternate.into());
            }
            _ => {
                others.insert(name.to_owned(), told(name, value)?);
            }
        }
    }
    finish(table, others, bindings, destination)
}

fn queue_table(
    queue: &Queue,
    bindings: &mut Vec<&Binding>,
    destination: &Destination,
) -> Result<Table, Error> {
    let mut table = Table::new();
    table.insert("name".to_owned(), queue.name.clone().into());
    let made = match queue.named_by_broker {
        true => Queue::temporary(&queue.name),
        false => Queue::new(&queue.name),
    };
    set(&mut table, "temporary", queue.named_by_broker, false);
    set(&mut table, "durable", queue.durable, made.durable);
    set(&mut table, "exclusive", queue.exclusive, made.exclusive);
    set(&mut table, "auto-delete", queue.auto_delete, made.auto_delete);
    let mut others = Table::new();
    for (name, value) in queue.arguments() {
        match friendly(name, value) {
            Some((name, value)) => table.insert(name.to_owned(), value),
            None => others.insert(name.to_owned(), told(name, value)?),
        };
    }
    finish(table, others, bindings, destination)
}

/// The name that files have for an argument, and its value there. It has to be read again as the same.
fn friendly(name: &str, value: &Value<'_>) -> Option<(&'static str, Toml)> {
    let text = || value.as_str().map(Toml::from);
    let number = || value.as_i64().map(Toml::from);
    let time = || {
        let ms = u64::try_from(value.as_i64()?).ok()?;
        Some(Toml::from(crate::duration::write(Duration::from_millis(ms))))
    };
    let (known, value) = match name {
        "x-queue-type" => ("type", text()?),
        "x-message-ttl" => ("message-ttl", time()?),
        "x-expires" => ("expires", time()?),
        "x-max-length" => ("max-length", number()?),
        "x-max-length-bytes" => ("max-length-bytes", number()?),
        "x-delivery-limit" if u32::try_from(value.as_i64()?).is_ok() => {
            ("delivery-limit", number()?)
        }
        "x-max-priority" if u8::try_from(value.as_i64()?).is_ok() => ("max-priority", number()?),
        "x-dead-letter-exchange" => ("dead-letter-exchange", text()?),
        "x-dead-letter-routing-key" => ("dead-letter-routing-key", text()?),
        _ => return None,
    };
    Some((known, value))
}

/// Whether something is so, if that is not what it is by itself.
fn set(table: &mut Table, name: &str, value: bool, by_itself: bool) {
    if value != by_itself {
        table.insert(name.to_owned(), value.into());
    }
}

fn finish(
    mut table: Table,
    arguments: Table,
    bindings: &mut Vec<&Binding>,
    destination: &Destination,
) -> Result<Table, Error> {
    if !arguments.is_empty() {
        table.insert("arguments".to_owned(), Toml::Table(arguments));
    }
    let mut bound = Vec::new();
    for binding in bindings.extract_if(.., |binding| binding.destination == *destination) {
        let mut entry = Table::new();
        entry.insert("exchange".to_owned(), binding.source.clone().into());
        if !binding.routing_key.is_empty() {
            entry.insert("key".to_owned(), binding.routing_key.clone().into());
        }
        let mut arguments = Table::new();
        for (name, value) in binding.arguments() {
            arguments.insert(name.to_owned(), told(name, value)?);
        }
        if !arguments.is_empty() {
            entry.insert("arguments".to_owned(), Toml::Table(arguments));
        }
        bound.push(Toml::Table(entry));
    }
    if !bound.is_empty() {
        table.insert("bind".to_owned(), Toml::Array(bound));
    }
    Ok(table)
}

/// The value of an argument.
fn told(name: &str, value: &Value<'_>) -> Result<Toml, Error> {
    let told = match value {
        Value::Bool(value) => Some(Toml::from(*value)),
        Value::F32(value) => Some(Toml::from(f64::from(*value))),
        Value::F64(value) => Some(Toml::from(*value)),
        Value::Str(_) => value.as_str().map(Toml::from),
        Value::Array(array) => {
            let values = array.iter().map(|value| told(name, &value));
            Some(Toml::Array(values.collect::<Result<_, _>>()?))
        }
        Value::Table(table) => {
            let pairs = table
                .iter()
                .map(|(key, value)| Ok((key.to_str_lossy().into_owned(), told(name, &value)?)));
            Some(Toml::Table(pairs.collect::<Result<_, Error>>()?))
        }
        Value::Timestamp(_) => None,
        other => other.as_i64().map(Toml::from),
    };
    told.ok_or_else(|| {
        let text = format!("argument {name:?} is {value:?}, which a file has no form for");
        Error::new(ErrorKind::Invalid, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Overflow;

    #[test]
    fn what_is_written_is_read_as_the_same() {
        let topology = Topology::new()
            .exchange(Exchange::topic("orders").alternate("unrouted").argument("x-a", 5i64))
            .exchange(Exchange::fanout("audit").transient().internal().bind("orders", "#"))
            .queue(
                Queue::quorum("billing")
                    .message_ttl(Duration::from_millis(90_500))
                    .expires(Duration::from_secs(7200))
                    .max_length(1000)
                    .max_length_bytes(1 << 40)
                    .overflow(Overflow::RejectPublish)
                    .dead_letter_to("failed")
                    .dead_letter_key("billing")
                    .dead_letter_at_least_once()
                    .delivery_limit(5)
                    .single_active_consumer()
                    .bind("orders", "order.*")
                    .bind("orders", "bill.\"#\""),
            )
            .binding(Binding::to_queue("billing", "orders", "").argument("x-match", "all"))
            .queue(Queue::classic("other").max_priority(9).transient().auto_delete())
            .queue(Queue::temporary("mine"));
        let text = topology.to_toml().unwrap();
        assert!(text.contains("message-ttl = \"90500ms\""), "{text}");
        assert_eq!(Topology::from_toml(&text).unwrap().to_toml().unwrap(), text);
        assert_eq!(Topology::from_toml(&text).unwrap(), topology, "{text}");
        assert_eq!(Topology::new().to_toml().unwrap(), "");
    }

    #[test]
    fn what_has_no_form_is_an_error() {
        let leading_out = Topology::new().binding(Binding::to_queue("q", "x", "k"));
        let of_nothing = Topology::new().queue(Queue::classic("q").argument("x-a", Value::Void));
        for topology in [leading_out, of_nothing] {
            assert_eq!(topology.to_toml().unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}
