//! Whether two brokers agree on many programs, and the smallest ones on which they do not.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::generate::generate;
use super::program::Program;
use super::record::Record;
use super::run::{Target, run, scrub};
use super::shrink::{shorter, simpler};

/// A difference must show every time before it is believed, each time with more patience: where others use the cores and the
/// disk as well, it may be no more than that one broker is late.
const PATIENCE: [u32; 3] = [1, 4, 16];

/// Runs that shrinking one program may take.
const SHRINKING: usize = 400;

/// Of a hundred programs, so many may differ now and then without differing every time. On quiet cores it is one at most.
const UNSTEADY_PERCENT: usize = 10;

/// Which programs are run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Campaign {
    /// The seed of the first; each further one has the next number.
    pub(crate) seed: u64,
    pub(crate) programs: usize,
    /// After so many different differences it is enough.
    pub(crate) differences: usize,
    /// Makes lines alike whose difference is of no interest.
    pub(crate) forgive: fn(String) -> String,
}

/// Two brokers that should do the same.
struct Pair {
    one: Target,
    other: Target,
    forgive: fn(String) -> String,
}

/// Where two brokers part.
struct Difference {
    step: String,
    one: Vec<String>,
    other: Vec<String>,
    /// What is different, without the names and numbers of the one program.
    signature: String,
}

/// What all workers have found together.
#[derive(Default)]
struct Tally {
    /// How many programs were begun.
    begun: usize,
    /// Seeds and signatures of those that differ now and then.
    unsteady: Vec<(u64, String)>,
    /// The signatures of all differences: each is reported once, and nothing is shrunk until it has become one of them.
    known: BTreeSet<String>,
    reported: usize,
}

type Shared = Arc<Mutex<Tally>>;

fn lock(tally: &Shared) -> MutexGuard<'_, Tally> {
    tally.lock().expect("no worker panics")
}

/// Runs the programs on all pairs of brokers at once. Differences are printed as they are found.
///
/// # Panics
/// If any pair differs.
pub(crate) async fn explore(campaign: Campaign, pairs: Vec<(Target, Target)>) {
    let began = Instant::now();
    let tally = Shared::default();
    let workers: Vec<_> = pairs
        .into_iter()
        .map(|(one, other)| Pair { one, other, forgive: campaign.forgive })
        .map(|pair| tokio::spawn(work(campaign, pair, Arc::clone(&tally))))
        .collect();
    for worker in workers {
        worker.await.expect("a worker catches what its programs do");
    }

    let tally = lock(&tally);
    let (run, unsteady) = (tally.begun, tally.unsteady.len());
    let rate = run as f64 / began.elapsed().as_secs_f64();
    println!("{run} programs, {rate:.1} a second; {unsteady} unsteady");
    for (seed, what) in &tally.unsteady {
        println!("unsteady: seed {seed}: {what}");
    }
    assert_eq!(tally.reported, 0, "differences, which are printed above");
    let most = (run * UNSTEADY_PERCENT).div_ceil(100);
    assert!(unsteady <= most, "{unsteady} of {run} programs give now this and now that");
}

async fn work(campaign: Campaign, pair: Pair, tally: Shared) {
    loop {
        let index = {
            let mut tally = lock(&tally);
            if tally.begun >= campaign.programs || tally.reported >= campaign.differences {
                return;
            }
            tally.begun += 1;
            tally.begun - 1
        };
        let seed = campaign.seed.wrapping_add(index as u64);
        examine(&pair, generate(seed), &tally).await;
    }
}

async fn examine(pair: &Pair, program: Program, tally: &Shared) {
    let [usual, more @ ..] = PATIENCE;
    let Some(first) = compare(pair, &program, usual).await else { return };
    for patience in more {
        if compare(pair, &program, patience).await.is_none() {
            lock(tally).unsteady.push((program.seed, first.signature));
            return;
        }
    }
    if !lock(tally).known.insert(first.signature.clone()) {
        return;
    }
    let program = shrink(pair, program, &first.signature, tally).await;
    let smallest = compare(pair, &program, usual).await.unwrap_or(first);
    let report = smallest.report(pair, &program);
    let mut tally = lock(tally);
    tally.known.insert(smallest.signature);
    tally.reported += 1;
    println!("{report}");
}

/// Runs a program on both brokers and says where they part, if they do.
async fn compare(pair: &Pair, program: &Program, patience: u32) -> Option<Difference> {
    let (one, other) = tokio::join!(
        observe(&pair.one, program, patience),
        observe(&pair.other, program, patience)
    );
    let nothing = Record { step: "nothing".to_owned(), lines: Vec::new() };
    for index in 0..one.len().max(other.len()) {
        let a = one.get(index).unwrap_or(&nothing);
        let b = other.get(index).unwrap_or(&nothing);
        let forgiven = |record: &Record| -> Vec<String> {
            record.lines.iter().cloned().map(pair.forgive).collect()
        };
        if a.step != b.step || forgiven(a) != forgiven(b) {
            let step = if a.step == "nothing" { &b.step } else { &a.step };
            let lines = (forgiven(a), forgiven(b));
            let (one, other) = (a.lines.clone(), b.lines.clone());
            return Some(Difference {
                step: step.clone(),
                one,
                other,
                signature: signature(step, lines),
            });
        }
    }
    None
}

/// Runs a program in a task of its own: what panics there, because a broker talked nonsense, is an observation too.
async fn observe(target: &Target, program: &Program, patience: u32) -> Vec<Record> {
    let (on, what) = (target.clone(), program.clone());
    match tokio::spawn(async move { run(&on, &what, patience).await }).await {
        Ok(records) => records,
        Err(error) => {
            scrub(target, program).await;
            let panic = error.into_panic();
            let text = panic.downcast_ref::<String>().map_or("a panic", String::as_str);
            vec![Record { step: "the run".to_owned(), lines: vec![text.to_owned()] }]
        }
    }
}

/// Whether the brokers differ every time, and not merely in what is known from other programs.
async fn differs(pair: &Pair, program: &Program, signature: &str, tally: &Shared) -> bool {
    for patience in [PATIENCE[0], PATIENCE[1]] {
        let Some(difference) = compare(pair, program, patience).await else { return false };
        if difference.signature != signature && lock(tally).known.contains(&difference.signature) {
            return false;
        }
    }
    true
}

async fn shrink(pair: &Pair, mut program: Program, signature: &str, tally: &Shared) -> Program {
    let mut left = SHRINKING;
    let mut size = program.steps.len() / 2;
    while size > 0 && left > 0 {
        let candidates: Vec<_> = shorter(&program, size).collect();
        match first_that_differs(pair, candidates, signature, tally, &mut left).await {
            Some(candidate) => program = candidate,
            None => size /= 2,
        }
    }
    while let candidates = simpler(&program)
        && let Some(candidate) =
            first_that_differs(pair, candidates, signature, tally, &mut left).await
    {
        program = candidate;
    }
    program
}

async fn first_that_differs(
    pair: &Pair,
    candidates: Vec<Program>,
    signature: &str,
    tally: &Shared,
    left: &mut usize,
) -> Option<Program> {
    for candidate in candidates {
        *left = left.checked_sub(1)?;
        if differs(pair, &candidate, signature, tally).await {
            return Some(candidate);
        }
    }
    None
}

impl Difference {
    fn report(&self, pair: &Pair, program: &Program) -> String {
        let mut text = format!(
            "seed {} (LEVERET_DIFFERENTIAL_SEED={} LEVERET_DIFFERENTIAL_PROGRAMS=1), shrunk to\n{program}",
            program.seed, program.seed
        );
        let _ = writeln!(text, "  differs at {}", self.step.trim());
        for (target, lines) in [(&pair.one, &self.one), (&pair.other, &self.other)] {
            let _ = writeln!(text, "  {}:", target.name);
            for line in lines {
                let _ = writeln!(text, "    {line}");
            }
        }
        text
    }
}

/// The kind of step, and the first lines that are not the same, as far as other programs may have them too.
fn signature(step: &str, (one, other): (Vec<String>, Vec<String>)) -> String {
    let kind: String = step.split_whitespace().skip(2).take(1).collect();
    let same = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
    let shape = |lines: &[String]| -> String {
        let words = lines.get(same).map_or("", String::as_str).split_whitespace().skip(1);
        words
            .filter(|word| !word.contains(|c: char| c.is_ascii_digit()))
            .collect::<Vec<_>>()
            .join(" ")
    };
    format!("{kind}: {} / {}", shape(&one), shape(&other))
}
