//! Names that a broker makes, and the names they are given here instead.

const MADE_QUEUE: &str = "amq.gen-";
const MADE_TAG: &str = "amq.ctag-";
const REPLY_TO: &str = "amq.rabbitmq.reply-to.";

/// The names that one run has seen, so that two runs can be compared and a program can refer to them.
#[derive(Default)]
pub(super) struct Names {
    vhost: String,
    queues: Vec<String>,
    tags: Vec<String>,
}

/// What a program calls the first, second… queue that the broker named.
pub(super) fn made_queue(number: usize) -> String {
    format!("made-queue-{number}")
}

/// What a program calls the first, second… consumer that the broker named.
pub(super) fn made_tag(number: usize) -> String {
    format!("made-tag-{number}")
}

impl Names {
    pub(super) fn new(vhost: &str) -> Names {
        Names { vhost: vhost.to_owned(), ..Names::default() }
    }

    /// Remembers a name, if the broker made it.
    pub(super) fn learn(&mut self, name: &str) {
        let list = match name {
            _ if name.starts_with(MADE_QUEUE) => &mut self.queues,
            _ if name.starts_with(MADE_TAG) => &mut self.tags,
            _ => return,
        };
        if !list.iter().any(|known| known == name) {
            list.push(name.to_owned());
        }
    }

    /// The broker's name for what a program names.
    pub(super) fn actual(&self, name: &str) -> String {
        let numbered = |list: &[String], alias: fn(usize) -> String| {
            (1..=list.len()).find(|n| alias(*n) == name).map(|n| list[n - 1].clone())
        };
        numbered(&self.queues, made_queue)
            .or_else(|| numbered(&self.tags, made_tag))
            .unwrap_or_else(|| name.to_owned())
    }

    /// The text with a program's names in place of the broker's.
    pub(super) fn clean(&self, text: &str) -> String {
        // Debug escapes them, and then nobody can read a message of the broker's.
        let mut text = text.replace("\\'", "'");
        text = text.replace(&format!("vhost '{}'", self.vhost), "vhost 'V'");
        for (number, name) in self.queues.iter().enumerate() {
            text = text.replace(name, &made_queue(number + 1));
        }
        for (number, name) in self.tags.iter().enumerate() {
            text = text.replace(name, &made_tag(number + 1));
        }
        // What is left is that of a queue that was not made after all.
        without_tokens(&without_tokens(&text, REPLY_TO), MADE_QUEUE)
    }
}

/// Replaces what follows such a beginning of a name.
fn without_tokens(text: &str, beginning: &str) -> String {
    let mut pieces = text.split(beginning);
    let mut clean = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let end = piece.find(['"', '\'', ' ']).unwrap_or(piece.len());
        clean.push_str(beginning);
        clean.push_str("TOKEN");
        clean.push_str(&piece[end..]);
    }
    clean
}
