//! `leveret status`: whether brokers answer, and what is in queues.

use std::time::{Duration, Instant};

use clap::Args;
use leveret::amqp::{Connection, Options};
use leveret::{Client, ErrorKind};
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Form, Table, print, print_json};
use crate::reach::Reach;
use crate::text::escape;

/// Tells which brokers answer, and how many messages and consumers queues have.
///
/// The exit status is 0 only if the first broker answers and all queues are there.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Queues to be looked at.
    #[arg(value_name = "QUEUE")]
    queues: Vec<String>,

    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Debug, Serialize)]
struct Report {
    brokers: Vec<BrokerStatus>,
    queues: Vec<QueueStatus>,
}

#[derive(Debug, Serialize)]
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

#[derive(Debug, Serialize)]
struct QueueStatus {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    consumers: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub(crate) async fn run(arguments: Arguments) -> Result<(), Failure> {
    let mut report = Report { brokers: Vec::new(), queues: Vec::new() };
    for options in arguments.reach.endpoints()? {
        report.brokers.push(broker(&options, arguments.reach.timeout()).await);
    }
    let answers = report.brokers.iter().any(|broker| broker.error.is_none());
    if answers && !arguments.queues.is_empty() {
        let command = async |client: &Client| queues(client, &arguments.queues).await;
        report.queues = arguments.reach.with_client(command).await?;
    }
    match arguments.form.json {
        true => print_json(&report)?,
        false => report.print()?,
    }
    if !answers {
        return Err(Failure::no_broker("no broker answers"));
    }
    let is_well = report.brokers[0].error.is_none()
        && report.queues.iter().all(|queue| queue.error.is_none());
    match is_well {
        true => Ok(()),
        false => Err(Failure::new("not all is well")),
    }
}

async fn broker(options: &Options, patience: Duration) -> BrokerStatus {
    let mut status = BrokerStatus {
        address: options.to_string(),
        product: None,
        node: None,
        connected_in_ms: None,
        error: None,
    };
    let began = Instant::now();
    match tokio::time::timeout(patience, Connection::open(options)).await {
        Err(_) => status.error = Some(format!("no answer within {patience:?}")),
        Ok(Err(error)) => status.error = Some(error.to_string()),
        Ok(Ok(connection)) => {
            status.connected_in_ms = Some(began.elapsed().as_secs_f64() * 1000.0);
            let text = |name: &str| {
                let value = connection.server_properties().get(name)?;
                Some(String::from_utf8_lossy(value.as_bytes()?).into_owned())
            };
            let version = text("version").unwrap_or_default();
            status.product = text("product").map(|product| format!("{product} {version}"));
            status.node = text("cluster_name");
            let _ = connection.close().await;
        }
    }
    status
}

async fn queues(client: &Client, names: &[String]) -> Result<Vec<QueueStatus>, Failure> {
    let mut found = Vec::new();
    for name in names {
        let (messages, consumers, error) = match client.inspect_queue(name).await {
            Ok(info) => (Some(info.messages), Some(info.consumers), None),
            Err(error) if matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Closed) => {
                return Err(error.into());
            }
            Err(error) if error.kind() == ErrorKind::Missing => {
                (None, None, Some("there is no such queue".to_owned()))
            }
            Err(error) => (None, None, Some(error.to_string())),
        };
        found.push(QueueStatus { name: name.clone(), messages, consumers, error });
    }
    Ok(found)
}

impl Report {
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
        let mut table = Table::new(&["queue", "messages", "consumers"]);
        for queue in &self.queues {
            let number =
                |number: Option<u32>| number.map_or_else(dash, |number| number.to_string());
            table.row(vec![queue.name.clone(), number(queue.messages), number(queue.consumers)]);
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
