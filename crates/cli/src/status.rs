//! `leveret status`: whether brokers answer, and what is in queues.

mod waiting;

use std::time::Duration;

use clap::Args;
use leveret::Client;
use leveret::amqp::{Connection, Options};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use crate::failure::{Failure, Status};
use crate::management::ManagementOptions;
use crate::output::{Form, Table, counted, fault, print, print_json, unless_unread};
use crate::reach::{Reach, check_files, deadline_in};
use crate::signals::{self, Signals};
use crate::text::escape;

/// Shows which brokers answer, how many messages and consumers queues have, and how many messages wait elsewhere to come into them.
///
/// Those that wait, for a retry mostly, are counted with RabbitMQ's management API, if --management says where it is. The exit status is 0 only if the first broker answers and all queues are there.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Queues to be looked at.
    #[arg(value_name = "QUEUE")]
    queues: Vec<String>,

    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
    #[command(flatten)]
    management: ManagementOptions,
}

/// How long the management API may take: a firewall may be silent, where the broker answers.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Default, Serialize)]
struct Report {
    brokers: Vec<BrokerStatus>,
    queues: Vec<QueueStatus>,
}

#[derive(Debug, Default, Serialize)]
struct BrokerStatus {
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    product: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    /// How long connecting took.
    #[serde(skip_serializing_if = "Option::is_none")]
    connected_in_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Default, Serialize)]
struct QueueStatus {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    consumers: Option<u32>,
    /// How many messages wait in other queues to come into this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip)]
    is_forbidden: bool,
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    signals::enforce()?;
    let deadline = deadline_in(arguments.reach.timeout());
    let mut signals = Signals::new()?;
    let asking = ask(&arguments, deadline);
    let (report, failure) = tokio::select! {
        asked = asking => asked?,
        signal = signals.next() => return Err(Failure::stopped(signal, "nothing was shown")),
    };
    unless_unread(match arguments.form.json {
        true => print_json(&report),
        false => report.print(),
    })?;
    match failure {
        Some(failure) => Err(failure),
        None => report.verdict(),
    }
}

/// Asks the brokers, all at the same time, and then one of them for the queues; and says why none answers.
async fn ask(
    arguments: &Arguments,
    deadline: Instant,
) -> Result<(Report, Option<Failure>), Failure> {
    let mut asked = Vec::new();
    for options in arguments.reach.endpoints()? {
        asked.push(tokio::spawn(async move { broker(&options, deadline).await }));
    }
    let (mut report, mut failures, mut closing) = (Report::default(), Vec::new(), JoinSet::new());
    for broker in asked {
        let (status, answer) = broker.await.map_err(Failure::new)?;
        report.brokers.push(status);
        match answer {
            Ok(connection) => {
                closing.spawn(async move { connection.close().await });
            }
            Err(failure) => failures.push(failure),
        }
    }
    if failures.len() == report.brokers.len() {
        return Ok((report, failures.into_iter().next()));
    }
    if !arguments.queues.is_empty() {
        let command = async |client: &Client| queues(client, &arguments.queues).await;
        match arguments.reach.until(deadline).with_client_briefly(command).await {
            Ok(queues) => report.queues = queues,
            // The brokers are shown all the same.
            Err(failure) => return Ok((report, Some(failure))),
        }
        if arguments.management.is_given() {
            let counting = report.count_waiting(arguments, deadline);
            if let Err(failure) = counting.await {
                fault(&format!("messages that wait for a retry are not counted: {failure}"));
            }
        }
    }
    let _ = timeout_at(deadline, closing.join_all()).await;
    Ok((report, None))
}

async fn broker(
    options: &Options,
    deadline: Instant,
) -> (BrokerStatus, Result<Connection, Failure>) {
    let mut status = BrokerStatus { address: format!("{options:#}"), ..BrokerStatus::default() };
    let began = Instant::now();
    let mut options = options.clone();
    options.connection_name.get_or_insert_with(|| "leveret status".to_owned());
    let opening = async {
        check_files(&options).await?;
        Ok(Connection::open(&options).await?)
    };
    let late = |_| Err(Failure::no_broker("no answer in time"));
    let answer = timeout_at(deadline, opening).await.unwrap_or_else(late);
    match &answer {
        Err(failure) => status.error = Some(failure.to_string()),
        Ok(connection) => {
            status.connected_in_ms = Some(began.elapsed().as_secs_f64() * 1000.0);
            let text = |name: &str| {
                let value = connection.server_properties().get(name)?;
                Some(String::from_utf8_lossy(value.as_bytes()?).into_owned())
            };
            let version = text("version").unwrap_or_default();
            status.product = text("product").map(|product| format!("{product} {version}"));
            status.node = text("cluster_name");
        }
    }
    (status, answer)
}

async fn queues(client: &Client, names: &[String]) -> Result<Vec<QueueStatus>, Failure> {
    let mut found = Vec::new();
    for name in names {
        let mut queue = QueueStatus { name: name.clone(), ..QueueStatus::default() };
        match client.inspect_queue(name).await {
            Ok(info) => {
                queue.messages = Some(info.messages);
                queue.consumers = Some(info.consumers);
            }
            Err(error) => {
                queue.error = Some(error.to_string());
                let failure = Failure::from(error);
                if failure.status() == Status::NoBroker {
                    return Err(failure);
                }
                queue.is_forbidden = failure.status() == Status::NotAllowed;
            }
        }
        found.push(queue);
    }
    Ok(found)
}

impl Report {
    /// Asks the management API of the first broker that answers.
    async fn count_waiting(
        &mut self,
        arguments: &Arguments,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let there = self.brokers.iter().zip(arguments.reach.endpoints()?);
        let Some((broker, options)) = there.into_iter().find(|(broker, _)| broker.error.is_none())
        else {
            return Ok(());
        };
        let patience = deadline.saturating_duration_since(Instant::now()).min(PATIENCE);
        let management = arguments.management.of(&options, patience).await?;
        let names = self.queues.iter().map(|queue| queue.name.as_str());
        let counting = waiting::count(&management, broker.node.as_deref(), names);
        let late = |_| Err(Failure::no_broker("the management API does not answer in time"));
        let counts = timeout(patience, counting).await.unwrap_or_else(late)?;
        for (queue, count) in self.queues.iter_mut().zip(counts) {
            queue.waiting = Some(count);
        }
        Ok(())
    }

    /// Whether all is well, and if not, what is not.
    fn verdict(&self) -> Result<(), Failure> {
        let silent = self.brokers.iter().filter(|broker| broker.error.is_some()).count();
        let missing = self.queues.iter().filter(|queue| queue.error.is_some()).count();
        let mut faults = Vec::new();
        if silent > 0 {
            faults.push(format!("{silent} of {} brokers cannot be used", self.brokers.len()));
        }
        if missing > 0 {
            faults.push(format!(
                "{missing} of {} cannot be inspected",
                counted(self.queues.len() as u64, "queue")
            ));
        }
        let text = faults.join(", ");
        match self.brokers[0].error.is_some() || missing > 0 {
            true if self.queues.iter().any(|queue| queue.is_forbidden) => {
                Err(Failure::not_allowed(text))
            }
            true => Err(Failure::new(text)),
            false => Ok(()),
        }
    }

    fn print(&self) -> Result<(), Failure> {
        let dash = || "–".to_owned();
        let mut table = Table::new(&["broker", "product", "cluster", "connected in"]);
        for broker in &self.brokers {
            let took = broker.connected_in_ms.map(|ms| format!("{ms:.1} ms"));
            table.row(vec![
                broker.address.clone(),
                broker.product.clone().unwrap_or_else(dash),
                broker.node.clone().unwrap_or_else(dash),
                took.unwrap_or_else(dash),
            ]);
        }
        table.print()?;
        print_errors(self.brokers.iter().map(|broker| (&broker.address, &broker.error)))?;
        if self.queues.is_empty() {
            return Ok(());
        }
        print("")?;
        let mut table = Table::new(&["queue", "messages", "waiting", "consumers"]);
        for queue in &self.queues {
            let number =
                |number: Option<u32>| number.map_or_else(dash, |number| number.to_string());
            let waiting = queue.waiting.map_or_else(dash, |number| number.to_string());
            let (messages, consumers) = (number(queue.messages), number(queue.consumers));
            table.row(vec![queue.name.clone(), messages, waiting, consumers]);
        }
        table.print()?;
        print_errors(self.queues.iter().map(|queue| (&queue.name, &queue.error)))
    }
}

/// Below a table, in full: a column would be cut where the reason is.
fn print_errors<'a>(
    errors: impl Iterator<Item = (&'a String, &'a Option<String>)>,
) -> Result<(), Failure> {
    for (name, error) in errors {
        if let Some(error) = error {
            print(&format!("  {}: {}", escape(name), escape(error)))?;
        }
    }
    Ok(())
}
