//! Messages of a parking lot as lines of JSON.

use std::io::{self, Write};
use std::ops::ControlFlow;

use super::json::Line;
use super::message::ParkedMessage;
use super::task::{Progress, Report};
use super::{Filter, ParkingLot};
use crate::error::{Error, ErrorKind};

impl ParkingLot {
    /// Writes messages as lines of JSON. They stay in the lot.
    ///
    /// # The format
    ///
    /// One message a line, UTF-8:
    ///
    /// ```json
    /// {"exchange":"orders","routing_key":"order.paid","properties":{"message_id":"17","headers":{"tenant":"acme","n":{"i64":5}}},"body":"{}"}
    /// ```
    ///
    /// - `exchange`, `routing_key`: how the message came into the lot.
    /// - `properties`: those that it has, by the names `content_type`, `content_encoding`, `headers`, `delivery_mode`,
    ///   `priority`, `correlation_id`, `reply_to`, `expiration`, `message_id`, `timestamp`, `type`, `user_id`, `app_id`,
    ///   `cluster_id`; a time is in seconds since 1970.
    /// - `headers`: names and values. Texts, `true`, `false` and `null` are themselves; all other values are told with their
    ///   type: `{"i32": 5}`, with `i8`, `u8`, `i16`, `u16`, `i32`, `u32`, `i64`, `timestamp`; numbers with a point as text:
    ///   `{"f64": "0.1"}`, `f32`; `{"decimal": {"scale": 2, "value": 314}}`; `{"bytes_base64": "…"}`; `{"text_base64": "…"}`
    ///   for a text that is not UTF-8; `{"array": […]}`; `{"table": {…}}`.
    /// - `body`: the body, if it is UTF-8; else `body_base64`.
    /// - `properties_base64` instead of `properties`: all of them as they are on the wire, if JSON cannot tell them exactly.
    ///
    /// Writing may block for a moment. To do it otherwise, [look](ParkingLot::look) and use [`ParkedMessage::to_json`].
    pub fn export<'a, W: Write + Send>(&self, to: &'a mut W) -> Export<'a, W> {
        let (filter, limit) = (Filter::new(), u64::MAX);
        Export { lot: self.clone(), to, filter, limit, rate: None, report: None }
    }
}

/// Messages of a [`ParkingLot`] to be written as lines of JSON: [`run`](Export::run) does it. They stay in the lot.
#[must_use = "nothing is written before it is run"]
pub struct Export<'a, W> {
    lot: ParkingLot,
    to: &'a mut W,
    filter: Filter,
    limit: u64,
    rate: Option<f64>,
    report: Option<Report<'a>>,
}

impl<'a, W: Write + Send> Export<'a, W> {
    /// These messages. By default all.
    pub fn filter(mut self, filter: Filter) -> Self {
        self.filter = filter;
        self
    }

    /// So many messages at most.
    pub fn limit(mut self, messages: u64) -> Self {
        self.limit = messages;
        self
    }

    /// So many messages a second at most.
    pub fn rate(mut self, messages_per_second: f64) -> Self {
        self.rate = Some(messages_per_second);
        self
    }

    /// Is told how far it has come, after each message that is meant.
    pub fn progress(mut self, report: impl FnMut(&Progress) + Send + 'a) -> Self {
        self.report = Some(Box::new(report));
        self
    }

    /// Writes them, and says how many.
    ///
    /// An export does not begin again after a lost connection, since it could not tell what it has written: it fails, and says how
    /// many lines there are.
    pub async fn run(self) -> Result<u64, Error> {
        let Export { lot, to, filter, limit, rate, report } = self;
        let mut written = 0;
        let mut failed = None;
        let write = |scan, message: &ParkedMessage| {
            if scan > 1 && written > 0 {
                let text = format!("the connection was lost after {written} messages were written");
                failed = Some(Error::new(ErrorKind::Lost, text));
                return ControlFlow::Break(());
            }
            if let Err(error) = writeln!(to, "{}", message.to_json()) {
                failed = Some(unwritten(error));
                return ControlFlow::Break(());
            }
            written += 1;
            ControlFlow::Continue(())
        };
        let mut task = lot.look_by_scan(write).filter(filter).limit(limit);
        if let Some(rate) = rate {
            task = task.rate(rate);
        }
        if let Some(report) = report {
            task = task.progress(report);
        }
        let progress = task.run().await?;
        if failed.is_none() && progress.done < written {
            // Nothing was left to be seen when it began again.
            let text = format!("the connection was lost after {written} messages were written");
            failed = Some(Error::new(ErrorKind::Lost, text));
        }
        match failed {
            Some(error) => Err(error),
            None => to.flush().map(|()| written).map_err(unwritten),
        }
    }
}

fn unwritten(error: io::Error) -> Error {
    Error::caused(ErrorKind::Io, "cannot write messages", error)
}

impl ParkedMessage {
    /// The message as a line of JSON, without its end; see [`ParkingLot::export`].
    pub fn to_json(&self) -> String {
        // Names, texts and numbers: there is nothing in it that JSON could not hold.
        Line::of(self).write().unwrap_or_default()
    }
}

impl crate::Incoming {
    /// The message as a line of JSON, without its end: the form in which parking lots are exported, from which exactly the same
    /// message can be made again; see [`ParkingLot::export`].
    pub fn to_json(&self) -> String {
        let exchange = self.exchange().to_str_lossy().into_owned();
        let routing_key = self.routing_key().to_str_lossy().into_owned();
        let properties = self.raw_properties().clone();
        let line = Line { exchange, routing_key, properties, body: self.body().clone() };
        line.write().unwrap_or_default()
    }
}

impl crate::Delivery {
    /// The message as a line of JSON, as [`Incoming::to_json`](crate::Incoming::to_json) has it.
    pub fn to_json(&self) -> String {
        self.incoming().to_json()
    }
}
