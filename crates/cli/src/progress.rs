//! Bars for what takes long, on terminals only: in a file or a pipe they are noise.

use std::io::{self, IsTerminal};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Whether anybody would see them.
pub(crate) fn is_shown() -> bool {
    io::stderr().is_terminal()
}

/// A bar of so many, with a word for what is done with them.
pub(crate) fn bar(total: u64, done: &str) -> ProgressBar {
    if !is_shown() {
        return ProgressBar::hidden();
    }
    styled(ProgressBar::new(total), &format!("{{bar:40}} {{pos}}/{{len}} {done}, {{msg}}"))
}

fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Several bars with a title each, and a line below them. They vanish with this.
#[derive(Debug)]
pub(crate) struct Bars {
    all: MultiProgress,
    bars: Vec<ProgressBar>,
    line: ProgressBar,
}

impl Bars {
    pub(crate) fn new(titled: impl IntoIterator<Item = (&'static str, u64)>) -> Self {
        let all = MultiProgress::new();
        if !is_shown() {
            all.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        }
        let add = |(title, total)| {
            let template = "  {prefix:<9} {bar:20} {pos:>6}/{len} {msg}";
            all.add(styled(ProgressBar::new(total).with_prefix(title), template))
        };
        let bars = titled.into_iter().map(add).collect();
        let line = all.add(styled(ProgressBar::new(0), "  {elapsed:<9} {msg}"));
        Bars { all, bars, line }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ProgressBar> {
        self.bars.iter()
    }

    /// Says something below the bars.
    pub(crate) fn say(&self, text: String) {
        self.line.set_message(text);
        self.line.tick();
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        let _ = self.all.clear();
    }
}
