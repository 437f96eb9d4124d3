//! Lines of JSON as messages in a parking lot.

use std::io::{self, BufRead, Read};

use tokio::time::sleep_until;

use super::ParkingLot;
use super::json::Line;
use super::message::ParkedMessage;
use super::rate::RateLimiter;
use super::run::MAX_LOSSES;
use super::target::address_to_lot;
use super::window::{PublishWindow, is_about_message, is_channel_closed_over_message, is_loss};
use crate::error::{Error, ErrorKind};
use crate::forwarder::ForwardedMessage;

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
    /// Publishes the messages of lines that [`export`](ParkingLot::export) has written into this lot, each confirmed. Lines
    /// that are none, or longer than 256 MiB, are counted and named, and the others imported all the same; empty ones are
    /// skipped.
    pub fn import<'a, R: BufRead + Send>(&self, from: &'a mut R) -> Import<'a, R> {
        let longest = MAX_LINE;
        Import { lot: self.clone(), from, longest, rate: None, is_dry: false, report: None }
    }

    fn parcel(&self, line: &Line) -> ForwardedMessage {
        let Line { exchange, routing_key, properties, body } = line;
        let message = ParkedMessage::new(0, exchange, routing_key, properties, body);
        let mut parcel = message.parcel();
        address_to_lot(&mut parcel, &message, &self.client.queue_name(&self.queue));
        parcel
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
        let mut rate = RateLimiter::new(self.rate)?;
        let mut importing = Importing::new(&self.lot);
        let mut line = Vec::new();
        for number in 1u64.. {
            let read = read_line(self.from, self.longest, &mut line).map_err(|error| {
                Error::caused(ErrorKind::Io, format!("cannot read line {number}"), error)
            })?;
            match read {
                ReadLine::End => break,
                ReadLine::TooLong => {
                    let fault = format!("it is longer than {} bytes", self.longest);
                    importing.imported.failed(number, fault);
                    continue;
                }
                ReadLine::Line if line.trim_ascii().is_empty() => continue,
                ReadLine::Line => {}
            }
            match Line::read(&line) {
                Err(fault) => importing.imported.failed(number, fault),
                Ok(line) if self.is_dry => importing.check(number, self.lot.parcel(&line)).await?,
                Ok(line) => {
                    if let Some(time) = rate.reserve() {
                        sleep_until(time).await;
                    }
                    importing.send(number, self.lot.parcel(&line)).await?;
                }
            }
            importing.settle_answered();
            self.report(&importing);
        }
        importing.settle_all().await?;
        self.report(&importing);
        Ok(importing.imported)
    }

    fn report(&mut self, importing: &Importing) {
        if let Some(report) = &mut self.report {
            report(&importing.imported);
        }
    }
}

/// Lines that are being published, by their numbers.
struct Importing {
    window: PublishWindow<(u64, ForwardedMessage)>,
    imported: Imported,
}

impl Importing {
    fn new(lot: &ParkingLot) -> Self {
        let window = PublishWindow::new(&lot.client, "importing a message");
        Importing { window, imported: Imported::default() }
    }

    /// Counts a line as it would be without a dry run.
    async fn check(&mut self, number: u64, parcel: ForwardedMessage) -> Result<(), Error> {
        let checked = self.window.mover().check(parcel).await;
        self.count(number, checked)
    }

    async fn send(&mut self, number: u64, parcel: ForwardedMessage) -> Result<(), Error> {
        while !self.window.has_room_for(&parcel) {
            self.settle_next().await?;
        }
        let mut sent = self.window.send((number, parcel.clone()), parcel.clone()).await;
        if sent.as_ref().is_err_and(is_loss) && !self.window.is_empty() {
            self.send_again().await?;
            sent = self.window.send((number, parcel.clone()), parcel).await;
        }
        match sent {
            Ok(()) => Ok(()),
            Err(error) => self.count(number, Err(error)),
        }
    }

    async fn settle_all(&mut self) -> Result<(), Error> {
        while !self.window.is_empty() {
            self.settle_next().await?;
        }
        Ok(())
    }

    fn settle_answered(&mut self) {
        while let Some(((number, _), outcome)) = self.window.answered() {
            self.imported.count(number, outcome);
        }
    }

    async fn settle_next(&mut self) -> Result<(), Error> {
        match self.window.next_outcome().await {
            Ok(Some(((number, _), outcome))) => self.imported.count(number, outcome),
            Ok(None) => {}
            Err(error) if is_loss(&error) || is_channel_closed_over_message(&error) => {
                self.send_again().await?;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Publishes everything in flight once more, one by one: so a broker that closes the channel says over which message.
    async fn send_again(&mut self) -> Result<(), Error> {
        while let Some((number, parcel)) = self.window.pop() {
            let mut losses = 0;
            let sent = loop {
                match self.window.mover().deliver(parcel.clone()).await {
                    Err(error) if is_loss(&error) && losses < MAX_LOSSES => losses += 1,
                    sent => break sent,
                }
            };
            self.count(number, sent)?;
        }
        Ok(())
    }

    /// An error is not about this line alone.
    fn count(&mut self, number: u64, outcome: Result<(), Error>) -> Result<(), Error> {
        match outcome {
            Err(error) if !is_about_message(&error) && error.kind() != ErrorKind::Broker => {
                Err(error)
            }
            outcome => {
                self.imported.count(number, outcome);
                Ok(())
            }
        }
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

    fn count(&mut self, line: u64, outcome: Result<(), Error>) {
        match outcome {
            Ok(()) => self.imported += 1,
            Err(error) => self.failed(line, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "embedded")]
    use crate::Filter;

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
