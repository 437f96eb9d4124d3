//! Counting the messages of a sender, beyond the end of the program.

use std::collections::VecDeque;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use super::Doing;
use super::remember::{GIVEN_UP, SENDER, SEQUENCE, is_name};
use crate::clock;
use crate::error::{Error, ErrorKind};
use crate::message::{IntoMessage, Message};
use crate::random;

/// How many numbers are reserved with one write.
const BLOCK: u64 = 1000;

/// Of how many messages that tell of given up numbers it is known which those are: so many of the latest. Who gives one up
/// does that soon after it was numbered.
const TOLD: usize = 1000;

const CANNOT_BE_KEPT: &str = "the numbers of a sender cannot be kept";

/// The first line of a file with the numbers of a sender.
const TITLE: &str = "leveret sequence 1";

/// Numbers the messages of a sender from 1 on, so that whoever gets them needs to remember no more than a
/// [mark](super::Remember::high_water).
///
/// All messages of a sequence should go the same way, to one queue or to several that get all of them: whoever gets only some
/// of them sees gaps. It clones cheaply, and all clones count on together.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), leveret::BoxError> {
/// use leveret::inbox::Sequence;
/// use leveret::{Client, Queue, Topology};
///
/// let client = Client::embedded().await?;
/// client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await?;
/// let publisher = client.publisher("").build().await?;
/// # let folder = std::env::temp_dir().join(format!("leveret-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
///
/// let jobs = Sequence::open("shop 1", folder.join("jobs.sequence")).await?;
/// let message = jobs.stamp("first").await?; // the same message may be sent again, and is then a copy
/// publisher.publish("jobs", message).await?;
/// jobs.close().await?;
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Sequence {
    sender: Arc<str>,
    uncertain: Option<RangeInclusive<u64>>,
    state: Arc<Mutex<State>>,
}

/// Which numbers a sender has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// All before this one were used.
    pub next: u64,
    /// Up to this one, they may have been used.
    pub reserved: u64,
}

/// Keeps the numbers of a sender: in a file, see [`Sequence::open`], or elsewhere, see [`Sequence::kept_by`].
pub trait KeepNumbers: Send + Sync + 'static {
    /// Writes them down beyond the end of the program. It fails if somebody else counts for this sender by now.
    fn write(&self, numbers: Numbers) -> Doing<'_, ()>;
}

/// Gives a message a number of a sender's, and where it has none an id and a timestamp. This is for who counts otherwise than with
/// a [`Sequence`]: from 1 on, and no number twice.
pub fn numbered(message: impl IntoMessage, sender: &str, number: u64) -> Result<Message, Error> {
    check_name(sender)?;
    let message = message.into_message()?;
    message.check()?;
    Ok(stamped(message, sender, number))
}

/// Messages of a sender whom no inbox can know would all be parked.
fn check_name(sender: &str) -> Result<(), Error> {
    if is_name(sender) {
        return Ok(());
    }
    let text = format!("no sender can be called {sender:?}: receivers would not know it");
    Err(Error::new(ErrorKind::Invalid, text))
}

fn stamped(message: Message, sender: &str, number: u64) -> Message {
    let properties = message.extra.as_deref().map(|extra| &extra.properties);
    let has_id = properties.is_some_and(|properties| properties.message_id.is_some());
    let has_time = properties.is_some_and(|properties| properties.timestamp.is_some());
    let mut message = message
        .header(SENDER, sender.to_owned())
        .header(SEQUENCE, i64::try_from(number).unwrap_or(i64::MAX));
    if !has_id {
        message = message.message_id(format!("{sender}-{number}"));
    }
    if !has_time {
        message = message.timestamp(clock::now());
    }
    message
}

struct State {
    /// The number that is given out next.
    next: u64,
    /// The last one that may be given out before the next write.
    reserved: u64,
    /// What receivers are to be told.
    given_up: VecDeque<RangeInclusive<u64>>,
    /// Which messages tell them what.
    told: VecDeque<(u64, RangeInclusive<u64>)>,
    /// Nothing is kept without one.
    keeper: Option<Box<dyn KeepNumbers>>,
    is_closed: bool,
}

impl Sequence {
    /// Counts for a sender of this name, who goes on with the numbers in this file. The file is made if it is not there;
    /// nobody else may have it open. Names are unique among all that send to a queue.
    ///
    /// # Never lose the file
    ///
    /// A sender whose file is lost, or replaced by an older one, gives numbers again that were used before. Whoever remembers them
    /// by a mark takes those messages for copies: they are **acked and never handled**, and nothing tells but the count of
    /// duplicates. So the file belongs on a disk that stays, and into no backup that is put back. If it is lost, take another
    /// name for the sender; for programs that have no such disk there is [`fresh`](Self::fresh).
    ///
    /// # After a crash
    ///
    /// Numbers are reserved in the file a thousand at a time. A program that ends without [closing](Self::close) does not know
    /// how many of them it has used: it goes on behind them, and they are [uncertain](Self::uncertain).
    pub async fn open(sender: impl Into<String>, path: impl Into<PathBuf>) -> Result<Self, Error> {
        let (sender, path) = (sender.into(), path.into());
        check_name(&sender)?;
        let name = sender.clone();
        let (kept, numbers) = blocking(move || Kept::open(&name, path)).await?;
        Ok(Sequence::kept_by(sender, numbers, Arc::new(kept)))
    }

    /// The same for numbers that are kept elsewhere, and are these now. `leveret-sql` has one in a database.
    pub fn kept_by(sender: impl Into<String>, numbers: Numbers, keeper: impl KeepNumbers) -> Self {
        let Numbers { next, reserved } = numbers;
        let uncertain = (next <= reserved).then_some(next..=reserved);
        let next = next.max(reserved.saturating_add(1)).max(1);
        Sequence::counting(sender.into(), uncertain, next, reserved, Some(Box::new(keeper)))
    }

    fn counting(
        sender: String,
        uncertain: Option<RangeInclusive<u64>>,
        next: u64,
        reserved: u64,
        keeper: Option<Box<dyn KeepNumbers>>,
    ) -> Self {
        let (given_up, told) = (VecDeque::new(), VecDeque::new());
        let state = State { next, reserved, given_up, told, keeper, is_closed: false };
        Sequence { sender: sender.into(), uncertain, state: Arc::new(Mutex::new(state)) }
    }

    /// Counts from 1 on for a sender whose name nobody had before: for programs that have nowhere to keep numbers. Receivers
    /// remember one sender more with each of them.
    pub fn fresh(prefix: &str) -> Self {
        let sender = format!("{prefix}-{:032x}", random::id());
        Sequence::counting(sender, None, 1, u64::MAX, None)
    }

    /// The sender's name.
    pub fn sender(&self) -> &str {
        &self.sender
    }

    /// Numbers that a program which died may have used or not. Receivers keep a gap for those that never come, which costs
    /// them a few octets. Who knows what was sent may [give up](Self::give_up) the rest.
    pub fn uncertain(&self) -> Option<RangeInclusive<u64>> {
        self.uncertain.clone()
    }

    /// Gives a message the next number, with this sender, and where it has none an id and a timestamp.
    ///
    /// Once it is numbered it should be published until that succeeds, or its number be [given up](Self::give_up).
    pub async fn stamp(&self, message: impl IntoMessage) -> Result<Message, Error> {
        check_name(&self.sender)?;
        let message = message.into_message()?;
        message.check()?;
        let mut state = self.state.lock().await;
        if state.is_closed {
            return Err(Error::new(
                ErrorKind::Closed,
                format!("sequence {:?} is closed", self.sender),
            ));
        }
        if state.next > state.reserved {
            let reserved = state.next + BLOCK - 1;
            state.write(Numbers { next: state.next, reserved }).await?;
            state.reserved = reserved;
        }
        let number = state.next;
        state.next += 1;
        let message = stamped(message, &self.sender, number);
        Ok(match state.given_up.pop_front() {
            Some(numbers) => {
                let notice = format!("{}-{}", numbers.start(), numbers.end());
                state.told.truncate(TOLD - 1);
                state.told.push_front((number, numbers));
                message.header(GIVEN_UP, notice)
            }
            None => message,
        })
    }

    /// These numbers do not come: the next message that is numbered tells whoever gets it. Whoever has got one of them before
    /// keeps it as it is, and one that comes all the same is parked.
    ///
    /// If that message is given up as well, the one after it tells of both. This is not written down: what the program has told
    /// nobody when it ends, and what was in a message that a receiver has parked, leaves a gap with receivers, which their inbox
    /// can give up.
    pub async fn give_up(&self, numbers: RangeInclusive<u64>) {
        if numbers.is_empty() {
            return;
        }
        let mut state = self.state.lock().await;
        let told = std::mem::take(&mut state.told).into_iter();
        let (lost, told) = told.partition(|(number, _)| numbers.contains(number));
        state.told = told;
        let lost: VecDeque<_> = lost;
        state.given_up.extend(lost.into_iter().map(|(_, numbers)| numbers));
        state.given_up.push_back(numbers);
    }

    /// Writes down which numbers were used, so that the next one who opens the file goes on without a gap.
    pub async fn close(self) -> Result<(), Error> {
        let mut state = self.state.lock().await;
        if !state.is_closed {
            let next = state.next;
            state.write(Numbers { next, reserved: next - 1 }).await?;
            state.is_closed = true;
            state.keeper = None;
        }
        Ok(())
    }
}

impl State {
    async fn write(&self, numbers: Numbers) -> Result<(), Error> {
        let Some(keeper) = &self.keeper else { return Ok(()) };
        keeper.write(numbers).await.map_err(|error| match error.downcast::<Error>() {
            Ok(error) => *error,
            Err(error) => Error::caused(ErrorKind::Invalid, CANNOT_BE_KEPT, error),
        })
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let State { next, reserved, given_up, is_closed, .. } = self;
        let mut all = f.debug_struct("State");
        all.field("next", next).field("reserved", reserved).field("given_up", given_up);
        all.field("is_closed", is_closed).finish_non_exhaustive()
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(Error::caused(ErrorKind::Invalid, CANNOT_BE_KEPT, error)))
}

/// The file of a sender.
#[derive(Debug)]
struct Kept {
    sender: String,
    path: PathBuf,
    /// It is locked as long as this is there. The file itself is replaced with each write, so it cannot be the one.
    _lock: File,
}

impl Kept {
    fn open(sender: &str, path: PathBuf) -> Result<(Self, Numbers), Error> {
        let failed = |error| problem(&path, error);
        let lock_path = beside(&path, "lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(lock_path);
        let lock = lock.map_err(failed)?;
        lock.try_lock().map_err(|error| {
            problem(&path, std::io::Error::other(format!("another program has it: {error}")))
        })?;
        let numbers = match std::fs::read_to_string(&path) {
            Ok(text) => read(&text, sender).map_err(|text| {
                Error::new(ErrorKind::Invalid, format!("sequence {}: {text}", path.display()))
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Numbers { next: 1, reserved: 0 }
            }
            Err(error) => return Err(failed(error)),
        };
        Ok((Kept { sender: sender.to_owned(), path, _lock: lock }, numbers))
    }

    /// The file says either what it said or this, whatever happens.
    fn write(&self, numbers: Numbers) -> Result<(), Error> {
        let written = || {
            let new = beside(&self.path, "new");
            let mut file = File::create(&new)?;
            let Numbers { next, reserved } = numbers;
            write!(file, "{TITLE}\nnext {next}\nreserved {reserved}\nsender {}\n", self.sender)?;
            file.sync_all()?;
            std::fs::rename(&new, &self.path)?;
            let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
            File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
        };
        written().map_err(|error| problem(&self.path, error))
    }
}

impl KeepNumbers for Arc<Kept> {
    fn write(&self, numbers: Numbers) -> Doing<'_, ()> {
        let kept = Arc::clone(self);
        Box::pin(async move { Ok(blocking(move || Kept::write(&kept, numbers)).await?) })
    }
}

fn beside(path: &Path, what: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(what);
    name.into()
}

fn problem(path: &Path, error: std::io::Error) -> Error {
    let text = format!("sequence {} cannot be kept", path.display());
    Error::caused(ErrorKind::Invalid, text, error)
}

fn read(text: &str, sender: &str) -> Result<Numbers, String> {
    let mut lines = text.splitn(4, '\n');
    let mut line = |before: &str| lines.next().and_then(|line| line.strip_prefix(before));
    let title = line(TITLE);
    let (next, reserved) = (line("next "), line("reserved "));
    let owner = line("sender ").and_then(|owner| owner.strip_suffix('\n'));
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<u64>().ok());
    match (title, number(next), number(reserved), owner) {
        (Some(""), Some(next), Some(reserved), Some(owner)) if next > 0 && reserved < u64::MAX => {
            if owner != sender {
                return Err(format!("it is that of the sender {owner:?}, and not of {sender:?}"));
            }
            Ok(Numbers { next, reserved })
        }
        _ => Err("it is no sequence, or damaged".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(message: Message) -> Option<String> {
        let headers = message.into_parts().unwrap().1.headers?;
        headers.get(GIVEN_UP).and_then(|notice| notice.as_str().map(str::to_owned))
    }

    #[tokio::test]
    async fn nobody_counts_for_a_sender_whom_receivers_would_not_know() {
        let long = "s".repeat(300);
        for sender in ["", "a\0b", &long] {
            let refused = numbered("x", sender, 1).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{sender:?}");
        }
        let refused = Sequence::fresh(&long).stamp("x").await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
    }

    #[tokio::test]
    async fn what_a_given_up_message_should_have_told_is_told_by_another() {
        let sequence = Sequence::fresh("s");
        for _ in 1..=3 {
            assert_eq!(notice(sequence.stamp("x").await.unwrap()), None);
        }
        sequence.give_up(2..=3).await;
        assert_eq!(notice(sequence.stamp("4, never sent").await.unwrap()).unwrap(), "2-3");
        sequence.give_up(4..=4).await;
        assert_eq!(notice(sequence.stamp("5").await.unwrap()).unwrap(), "2-3");
        assert_eq!(notice(sequence.stamp("6").await.unwrap()).unwrap(), "4-4");
        assert_eq!(notice(sequence.stamp("7").await.unwrap()), None);
    }
}
