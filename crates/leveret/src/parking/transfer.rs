//! Messages of a parking lot to a file, and back.

use std::io::{BufRead, Read, Write};
use std::ops::ControlFlow;

use super::convoy::Convoy;
use super::json::Line;
use super::message::ParkedMessage;
use super::target::straight_to;
use super::task::note_address;
use super::{Filter, ParkingLot};
use crate::error::{Error, ErrorKind};
use crate::mover::Parcel;

/// A longer line is not read: a message of 128 MiB, the most that RabbitMQ takes by default, fits.
const MAX_LINE: u64 = 256 * 1024 * 1024;

/// How many bad lines are named.
const MAX_NAMED: usize = 100;

/// Whether lines are imported, or only read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Import {
    /// Each message is published into the lot.
    #[default]
    Publish,
    /// A dry run: nothing is published, and the lines that are no messages are named.
    Check,
}

/// What an import has done.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Imported {
    /// How many messages are in the lot now, confirmed.
    pub imported: u64,
    /// How many lines are not.
    pub failed: u64,
    /// The first hundred of those, by their number from 1, and what is wrong with them.
    pub bad_lines: Vec<(u64, String)>,
}

impl ParkingLot {
    /// Writes messages as lines of JSON, and says how many. They stay in the lot.
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
    pub async fn export(
        &self,
        filter: &Filter,
        limit: u64,
        to: &mut (impl Write + Send),
    ) -> Result<u64, Error> {
        let mut written = 0;
        let mut failed = None;
        // A lost connection lets it begin anew with the first.
        let mut last = 0;
        let write = |message: &ParkedMessage| {
            if message.position() <= last {
                return ControlFlow::Continue(());
            }
            last = message.position();
            match writeln!(to, "{}", message.to_json()) {
                Ok(()) => written += 1,
                Err(error) => failed = Some(error),
            }
            if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        self.look(write).filter(filter.clone()).limit(limit).run().await?;
        if failed.is_none() {
            failed = to.flush().err();
        }
        match failed {
            None => Ok(written),
            Some(error) => Err(Error::caused(ErrorKind::Invalid, "cannot write messages", error)),
        }
    }

    /// Publishes the messages of lines that [`export`](ParkingLot::export) has written into this lot, each confirmed. Lines
    /// that are none are counted and named, and the others imported all the same; empty ones are skipped.
    ///
    /// With `Import::Check` nothing is published.
    pub async fn import(
        &self,
        from: &mut (impl BufRead + Send),
        how: Import,
    ) -> Result<Imported, Error> {
        let mut imported = Imported::default();
        let mut convoy = Convoy::new(&self.client, "importing a message");
        let mut line = Vec::new();
        for number in 1u64.. {
            line.clear();
            let read = from.by_ref().take(MAX_LINE).read_until(b'\n', &mut line);
            let read = read.map_err(|error| {
                Error::caused(ErrorKind::Invalid, format!("cannot read line {number}"), error)
            })?;
            if read == 0 {
                break;
            }
            if read as u64 == MAX_LINE {
                let text = format!("line {number} is longer than {MAX_LINE} bytes");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            match Line::read(&line) {
                Err(fault) => imported.failed(number, fault),
                Ok(_) if how == Import::Check => imported.imported += 1,
                Ok(line) => convoy.send(number, self.parcel(&line)).await?,
            }
            imported.settle(&mut convoy);
        }
        convoy.settle_all().await?;
        imported.settle(&mut convoy);
        Ok(imported)
    }

    fn parcel(&self, line: &Line) -> Parcel {
        let Line { exchange, routing_key, properties, body } = line;
        let message = ParkedMessage::new(0, exchange, routing_key, properties, body);
        let mut parcel = message.parcel();
        let queue = self.client.queue_name(&self.queue);
        if (exchange.as_str(), routing_key.as_str()) != ("", queue.as_str()) {
            note_address(&mut parcel, &message);
        }
        straight_to(&mut parcel, &queue);
        parcel
    }
}

impl Imported {
    fn failed(&mut self, line: u64, fault: String) {
        self.failed += 1;
        if self.bad_lines.len() < MAX_NAMED {
            self.bad_lines.push((line, fault));
        }
    }

    fn settle(&mut self, convoy: &mut Convoy<u64>) {
        while let Some((line, outcome)) = convoy.settled() {
            match outcome {
                Ok(()) => self.imported += 1,
                Err(error) => self.failed(line, error.to_string()),
            }
        }
    }
}

impl ParkedMessage {
    /// The message as a line of JSON, without its end; see [`ParkingLot::export`].
    pub fn to_json(&self) -> String {
        // Names, texts and numbers: there is nothing in it that JSON could not hold.
        Line::of(self).write().unwrap_or_default()
    }
}
