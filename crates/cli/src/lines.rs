//! Lines of the standard input, read beside the work on them.

use std::io::{self, BufRead, BufReader, Read};

use tokio::sync::mpsc;

use crate::failure::Failure;

/// How many lines come at once at most, and in how many bytes of input.
const BATCH: usize = 1000;
const BUFFER: usize = 256 * 1024;
/// How many batches wait for the reader's user.
const WAITING: usize = 2;

/// The lines, without their ends, in batches. A line that somebody types comes as soon as it is there.
#[derive(Debug)]
pub(crate) struct Lines(mpsc::Receiver<Result<Vec<Vec<u8>>, Failure>>);

impl Lines {
    /// Begins to read. A line of more bytes than `longest` is an error, after all lines before it.
    pub(crate) fn of_stdin(longest: u64) -> Result<Lines, Failure> {
        let (sender, receiver) = mpsc::channel(WAITING);
        // A thread of its own: nothing waits for it when the program ends while it waits for input.
        let thread = std::thread::Builder::new().name("stdin".to_owned());
        let read = move || {
            let input = BufReader::with_capacity(BUFFER, io::stdin().lock());
            read(input, longest, |batch| sender.blocking_send(batch).is_ok());
        };
        thread.spawn(read).map_err(Failure::new)?;
        Ok(Lines(receiver))
    }

    /// The next lines, or none at the end of the input.
    pub(crate) async fn next(&mut self) -> Option<Result<Vec<Vec<u8>>, Failure>> {
        self.0.recv().await
    }
}

/// Reads to the end, as long as the batches are wanted.
fn read(
    mut input: BufReader<impl Read>,
    longest: u64,
    mut wanted: impl FnMut(Result<Vec<Vec<u8>>, Failure>) -> bool,
) {
    let mut batch = Vec::new();
    for number in 1u64.. {
        let line = next_line(&mut input, number, longest);
        let failed = match line {
            Ok(Some(line)) => {
                batch.push(line);
                None
            }
            Ok(None) => break,
            Err(failure) => Some(failure),
        };
        // What comes next may have to be waited for.
        if failed.is_some() || batch.len() >= BATCH || input.buffer().is_empty() {
            if !batch.is_empty() && !wanted(Ok(std::mem::take(&mut batch))) {
                return;
            }
            if let Some(failure) = failed {
                wanted(Err(failure));
                return;
            }
        }
    }
    if !batch.is_empty() {
        wanted(Ok(batch));
    }
}

fn next_line(
    input: &mut impl BufRead,
    number: u64,
    longest: u64,
) -> Result<Option<Vec<u8>>, Failure> {
    let mut line = Vec::new();
    // With room for its end.
    let read = input.take(longest.saturating_add(2)).read_until(b'\n', &mut line);
    let read = read
        .map_err(|error| Failure::new(format_args!("cannot read the standard input: {error}")))?;
    while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
        line.pop();
    }
    match line.len() as u64 > longest {
        true => Err(Failure::new(format_args!(
            "line {number} has more than {longest} bytes: only the lines before it were published. --max-line allows more"
        ))),
        false => Ok((read > 0).then_some(line)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batches(input: &[u8], buffer: usize, longest: u64) -> Vec<Result<Vec<Vec<u8>>, String>> {
        let mut batches = Vec::new();
        read(BufReader::with_capacity(buffer, input), longest, |batch| {
            batches.push(batch.map_err(|failure| failure.to_string()));
            true
        });
        batches
    }

    #[test]
    fn lines_come_without_their_ends() {
        let lines = vec![b"a".to_vec(), Vec::new(), b"c d".to_vec()];
        assert_eq!(batches(b"a\r\n\nc d", 64, 10), [Ok(lines)]);
        assert_eq!(batches(b"", 64, 10), []);
    }

    #[test]
    fn a_line_that_is_there_does_not_wait_for_the_next() {
        assert_eq!(batches(b"a\nb\n", 2, 10), [Ok(vec![b"a".to_vec()]), Ok(vec![b"b".to_vec()])]);
    }

    #[test]
    fn lines_before_one_that_is_too_long_come_all_the_same() {
        let batches = batches(b"1234567890\n12345678901\nc\n", 64, 10);
        assert_eq!(batches[0], Ok(vec![b"1234567890".to_vec()]));
        assert!(batches[1].as_ref().unwrap_err().contains("line 2"), "{batches:?}");
        assert_eq!(batches.len(), 2);
    }
}
