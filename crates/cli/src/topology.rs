//! `leveret topology`: what a file wants on the broker, and a picture of it.

mod delete;
mod migrate;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use leveret::amqp::Tls;
use leveret::{Change, Client, Conflict, ErrorKind, Plan, Step, Topology};
use reqwest::Url;
use serde_json::{Value, json};

use crate::failure::{Failure, last_cause};
use crate::files;
use crate::http::{client_for, excerpt, is_web, shown};
use crate::output::{Form, counted, print, print_json, unless_unread};
use crate::reach::{Reach, duration};
use crate::text::escape_toml;

/// Plans, applies, changes and draws topologies: exchanges, queues and bindings from a TOML or YAML file.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Plan(PlanArguments),
    Apply(ApplyArguments),
    Migrate(migrate::Arguments),
    Delete(delete::Arguments),
    Graph(GraphArguments),
    Export(ExportArguments),
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    match arguments.command {
        Command::Plan(arguments) => plan(arguments).await,
        Command::Apply(arguments) => apply(arguments).await,
        Command::Migrate(arguments) => migrate::run(arguments).await,
        Command::Delete(arguments) => delete::run(arguments).await,
        Command::Graph(arguments) => graph(&arguments),
        Command::Export(arguments) => export(arguments).await,
    }
}

/// Tells what applying the file would do. Changes nothing.
///
/// The exit status is 1 if the broker has something with other parameters.
#[derive(Debug, Args)]
struct PlanArguments {
    /// The topology: TOML, or YAML if its name ends so.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
}

async fn plan(arguments: PlanArguments) -> Result<(), Failure> {
    let topology = Topology::read(&arguments.file)?;
    let command = async |client: &Client| Ok(client.plan(&topology).await?);
    let plan = arguments.reach.with_client_briefly(command).await?;
    show(&plan, arguments.form)?;
    match plan.is_possible() {
        true => Ok(()),
        false => Err(advice(&plan)),
    }
}

/// Declares what the file wants. If the broker has something with other parameters, nothing is declared.
#[derive(Debug, Args)]
struct ApplyArguments {
    /// The topology: TOML, or YAML if its name ends so.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Only tell what would be done.
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
}

async fn apply(arguments: ApplyArguments) -> Result<(), Failure> {
    let topology = Topology::read(&arguments.file)?;
    let command = async |client: &Client| {
        let plan = client.plan(&topology).await?;
        if plan.is_possible() && !arguments.dry_run {
            client.apply(&topology).await?;
        }
        Ok(plan)
    };
    let plan = arguments.reach.with_client_briefly(command).await?;
    show(&plan, arguments.form)?;
    match plan.is_possible() {
        true => Ok(()),
        false => Err(advice(&plan)),
    }
}

fn show(plan: &Plan, form: Form) -> Result<(), Failure> {
    unless_unread(plan.steps().iter().try_for_each(|step| match form.json {
        true => print_json(&told(step)),
        false => print(&step.to_string()),
    }))
}

/// A step, for a program.
fn told(step: &Step) -> Value {
    let (change, conflict, error) = match &step.change {
        Change::Create => ("create", None, None),
        Change::Same => ("same", None, None),
        Change::Bind => ("bind", None, None),
        Change::Conflict(conflict) => {
            let Conflict { argument, wanted, found, .. } = conflict;
            (
                "conflict",
                Some(json!({ "argument": argument, "wanted": wanted, "found": found })),
                None,
            )
        }
        Change::Refused(error) => ("refused", None, Some(error.to_string())),
        _ => ("unknown", None, None),
    };
    let mut told = json!({ "object": step.object, "change": change });
    if let Some(conflict) = conflict {
        told["conflict"] = conflict;
    }
    if let Some(error) = error {
        told["error"] = error.into();
    }
    told
}

/// What to do about what cannot be applied.
fn advice(plan: &Plan) -> Failure {
    let count =
        |is: fn(&Change) -> bool| plan.steps().iter().filter(|step| is(&step.change)).count();
    let conflicts = count(|change| matches!(change, Change::Conflict(_)));
    let refused = count(|change| matches!(change, Change::Refused(_)));
    let refused_as = |kind| {
        let is =
            |step: &&Step| matches!(&step.change, Change::Refused(error) if error.kind() == kind);
        plan.steps().iter().any(|step| is(&step))
    };
    let mut text = format!(
        "{} cannot be applied, so nothing was.",
        counted((conflicts + refused) as u64, "object")
    );
    if conflicts > 0 {
        text += " The broker never changes an existing object: keep what it has and change the file, or choose another name; \
                 `leveret topology migrate FILE QUEUE` replaces a queue and keeps its messages.";
    }
    if refused > 0 {
        text += " What is refused says why: mend it in the file, or ask for the permission.";
    }
    match (refused_as(ErrorKind::Refused), refused_as(ErrorKind::Invalid)) {
        (true, _) => Failure::not_allowed(text),
        (false, true) => Failure::wrong(text),
        (false, false) => Failure::new(text),
    }
}

/// Draws the file: exchanges, queues, bindings, and where dead letters go. Needs no broker.
#[derive(Debug, Args)]
struct GraphArguments {
    /// The topology: TOML, or YAML if its name ends so.
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// As what.
    #[arg(long, value_enum, default_value_t)]
    format: Format,

    /// The file to write; without one, the standard output.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Format {
    /// Text, which many sites and editors show as a picture.
    #[default]
    Mermaid,
    /// A picture.
    Svg,
}

fn graph(arguments: &GraphArguments) -> Result<(), Failure> {
    let topology = Topology::read(&arguments.file)?;
    let picture = match arguments.format {
        Format::Mermaid => topology.to_mermaid(),
        Format::Svg => topology.to_svg(),
    };
    match &arguments.output {
        None => print(picture.trim_end()),
        Some(path) => files::write(path, &picture),
    }
}

/// Writes the topology of a running service, all that it has declared, as TOML.
#[derive(Debug, Args)]
struct ExportArguments {
    /// Where the service listens: what it was given by `leveret run --listen`.
    #[arg(value_name = "ADDRESS:PORT")]
    service: String,

    /// How long it may take to answer.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    timeout: Duration,
}

async fn export(arguments: ExportArguments) -> Result<(), Failure> {
    let ExportArguments { service, timeout } = arguments;
    let url = match service.contains("://") {
        true => format!("{}/topology", service.trim_end_matches('/')),
        false => format!("http://{service}/topology"),
    };
    // The text itself may have a password in it.
    let at = Url::parse(&url).map_err(|error| {
        Failure::wrong(format_args!("the service's address is no URL: {error}"))
    })?;
    let url = shown(&at);
    if !is_web(&at) {
        return Err(Failure::wrong(format_args!("{url} is no URL of a service")));
    }
    let failed = |error: reqwest::Error| {
        Failure::new(format_args!("no service answers at {url}: {}", last_cause(&error)))
    };
    let client = client_for(&at, &Tls::default()).await?.build().map_err(failed)?;
    let answer = client.get(at).timeout(timeout).send().await.map_err(failed)?;
    let status = answer.status();
    let text = answer.text().await.map_err(failed)?;
    if !status.is_success() {
        return Err(Failure::new(format_args!("{url} answered {status}: {}", excerpt(&text))));
    }
    let other = |error| Failure::new(format_args!("{url} answered no topology: {error}"));
    let topology = Topology::from_toml(&text).map_err(other)?;
    let text = escape_toml(&topology.to_toml().map_err(other)?);
    // In single quotes, TOML has no escapes.
    match Topology::from_toml(&text) {
        Ok(same) if same == topology => print(text.trim_end()),
        _ => Err(Failure::new(format_args!(
            "{url} has names with invisible characters that cannot be written in TOML: it gives them as they are, to `curl` for example"
        ))),
    }
}
