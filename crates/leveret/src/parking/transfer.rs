//! Messages of a parking lot to a file, and back.

use std::io::{self, BufRead, Read, Write};
use std::ops::ControlFlow;

use tokio::time::sleep_until;

use super::convoy::{Convoy, is_about_message};
use super::json::Line;
use super::message::ParkedMessage;
use super::pace::Pace;
use super::target::{note_address, straight_to};
use super::task::{Progress, Report};
use super::written::Written;
use super::{Filter, ParkingLot};
use crate::error::{Error, ErrorKind};
use crate::forwarder::Parcel;

/// A longer line is not read: a message of 128 MiB, the most that RabbitMQ takes by default, fits.
const MAX_LINE: u64 = 256 * 1024 * 1024;

/// How many bad lines are named.
const MAX_NAMED: usize = 100;

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

    /// Publishes the messages of lines that [`export`](ParkingLot::export) has written into this lot, each confirmed. Lines
    /// that are none, or longer than 256 MiB, are counted and named, and the others imported all the same; empty ones are
    /// skipped.
    pub fn import<'a, R: BufRead + Send>(&self, from: &'a mut R) -> Import<'a, R> {
        let longest = MAX_LINE;
        Import { lot: self.clone(), from, longest, rate: None, is_dry: false, report: None }
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
    pub async fn run(self) -> Result<u64, Error> {
        let Export { lot, to, filter, limit, rate, report } = self;
        let mut written = Written::default();
        let mut failed = None;
        let write = |walk, message: &ParkedMessage| {
            if !written.is_new(walk, message) {
                return ControlFlow::Continue(());
            }
            failed = writeln!(to, "{}", message.to_json()).err();
            match failed.is_some() || written.count() >= limit {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let mut task = lot.look_by_walk(write).filter(filter).limit(limit);
        if let Some(rate) = rate {
            task = task.rate(rate);
        }
        if let Some(report) = report {
            task = task.progress(report);
        }
        task.run().await?;
        if failed.is_none() {
            failed = to.flush().err();
        }
        match failed {
            None => Ok(written.count()),
            Some(error) => Err(Error::caused(ErrorKind::Io, "cannot write messages", error)),
        }
    }
}

type ReportImport<'a> = Box<dyn FnMut(&Imported) + Send + 'a>;

/// Lines of JSON to be published into a [`ParkingLot`]: [`run`](Import::run) does it.
#[must_use = "nothing is imported before it is run"]
pub struct Import<'a, R> {
    lot: ParkingLot,
    from: &'a mut R,
    longest: u64,
    rate: Option<f64>,
    is_dry: bool,
    report: Option<ReportImport<'a>>,
}

impl<'a, R: BufRead + Send> Import<'a, R> {
    /// So many messages a second at most.
    pub fn rate(mut self, messages_per_second: f64) -> Self {
        self.rate = Some(messages_per_second);
        self
    }

    /// Nothing is published; the lines that are no messages, or such as cannot be sent, are named.
    pub fn dry_run(mut self) -> Self {
        self.is_dry = true;
        self
    }

    /// Is told how far it has come, after each line.
    pub fn progress(mut self, report: impl FnMut(&Imported) + Send + 'a) -> Self {
        self.report = Some(Box::new(report));
        self
    }

    /// Imports them, and says how many. Lines that could not be imported are no error: they are counted and named.
    pub async fn run(mut self) -> Result<Imported, Error> {
        let mut imported = Imported::default();
        let mut pace = Pace::new(self.rate)?;
        let mut convoy = Convoy::new(&self.lot.client, "importing a message");
        let mut line = Vec::new();
        for number in 1u64.. {
            let read = read_line(self.from, self.longest, &mut line).map_err(|error| {
                Error::caused(ErrorKind::Io, format!("cannot read line {number}"), error)
            })?;
            match read {
                ReadLine::End => break,
                ReadLine::TooLong => {
                    imported.failed(number, format!("it is longer than {} bytes", self.longest));
                    continue;
                }
                ReadLine::Line => {}
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            match Line::read(&line) {
                Err(fault) => imported.failed(number, fault),
                Ok(line) if self.is_dry => match convoy.check(self.lot.parcel(&line)).await {
                    Ok(()) => imported.imported += 1,
                    Err(error) if is_about_message(&error) => {
                        imported.failed(number, error.to_string());
                    }
                    Err(error) => return Err(error),
                },
                Ok(line) => {
                    if let Some(time) = pace.next() {
                        sleep_until(time).await;
                    }
                    let sent = convoy.send(number, self.lot.parcel(&line)).await;
                    convoy.insist(sent).await?;
                }
            }
            imported.settle(&mut convoy);
            if let Some(report) = &mut self.report {
                report(&imported);
            }
        }
        let settled = convoy.settle_all().await;
        convoy.insist(settled).await?;
        imported.settle(&mut convoy);
        if let Some(report) = &mut self.report {
            report(&imported);
        }
        Ok(imported)
    }
}

/// What was read.
#[derive(Debug, PartialEq, Eq)]
enum ReadLine {
    Line,
    /// It was passed over.
    TooLong,
    End,
}

/// Reads the next line, with its end, if there is one.
fn read_line(from: &mut impl BufRead, longest: u64, line: &mut Vec<u8>) -> io::Result<ReadLine> {
    line.clear();
    let read = from.by_ref().take(longest).read_until(b'\n', line)?;
    match read as u64 == longest && !line.ends_with(b"\n") {
        true => {
            line.clear();
            from.skip_until(b'\n')?;
            Ok(ReadLine::TooLong)
        }
        false if read == 0 => Ok(ReadLine::End),
        false => Ok(ReadLine::Line),
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
        self.content().to_json()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_too_long_is_passed_over_and_the_next_one_read() {
        let mut from = b"12345678\n12345678901234567890\n\nabc".as_slice();
        let (mut line, mut read) = (Vec::new(), Vec::new());
        loop {
            let next = read_line(&mut from, 10, &mut line).unwrap();
            if next == ReadLine::End {
                break;
            }
            read.push((next, line.clone()));
        }
        let expected = [
            (ReadLine::Line, b"12345678\n".to_vec()),
            (ReadLine::TooLong, Vec::new()),
            (ReadLine::Line, b"\n".to_vec()),
            (ReadLine::Line, b"abc".to_vec()),
        ];
        assert_eq!(read, expected);
    }

    #[cfg(feature = "embedded")]
    #[tokio::test(start_paused = true)]
    async fn an_import_counts_and_names_lines_that_are_too_long_and_goes_on() {
        let client = crate::Client::embedded().await.unwrap();
        let topology = crate::Topology::new().queue(crate::Queue::quorum("lot"));
        client.apply(&topology).await.unwrap();
        let line = |body: &str| {
            let rest = r#""exchange":"","routing_key":"lot","properties":{}"#;
            format!("{{{rest},\"body\":\"{body}\"}}\n")
        };
        let lines = [line("1"), line(&"2".repeat(1000)), line("3"), line(&"4".repeat(100))];
        let text = lines.concat() + &"5".repeat(500);
        let lot = client.parking_lot("lot");
        for is_dry in [true, false] {
            let mut from = text.as_bytes();
            let mut import = lot.import(&mut from);
            import.longest = 200;
            import.is_dry = is_dry;
            let done = import.run().await.unwrap();
            assert_eq!((done.imported, done.failed), (3, 2), "{done:?}");
            let why = "it is longer than 200 bytes".to_owned();
            assert_eq!(done.bad_lines, [(2, why.clone()), (5, why)]);
        }
        let messages = lot.list(&Filter::new(), 10).await.unwrap();
        let bodies: Vec<_> = messages.iter().map(|one| one.body().len()).collect();
        assert_eq!(bodies, [1, 1, 100]);
    }
}
