//! A client of Python, pika, calls services of this one, and is called by it: on the embedded broker, and on the RabbitMQ at
//! hand.

use leveret::{Client, End, Error, ErrorKind, Json, Queue, Replier, Replies, Topology};
use tokio::process::Command;

use crate::clients::{everywhere, succeed};
use crate::services::{Running, double};
use crate::soon;

/// Where `scripts/install-python-clients` puts it.
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/foreign/python/bin/python");

const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/foreign/rpc_with_pika.py");

async fn count(Json(to): Json<u64>, mut replier: Replier) -> Result<End, Error> {
    for number in 1..=to {
        replier.send(Json(number)).await?;
    }
    Ok(End)
}

#[tokio::test]
async fn pika_calls_a_service() {
    everywhere(async |url| {
        let client = soon("a client", Client::connect(url)).await.unwrap();
        let service = client.service("numbers").method("double", double).method("count", count);
        let service = Running::start(service).await;
        let said = succeed(Command::new(PYTHON).args([PROGRAM, url, "call"])).await;
        assert_eq!(said.lines().count(), 2, "{said}");
        let summary = soon("the end", service.stop()).await;
        assert_eq!((summary.handled, summary.failed), (2 * 103, 0));
    })
    .await;
}

/// The program in the guide, whose service has one function for all requests.
#[tokio::test]
async fn the_python_program_of_the_guide_calls_a_service_without_naming_a_method() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/rpc.md"));
    let page = page.unwrap();
    let (_, program) = page.split_once("```python\n").expect("a program");
    let (program, _) = program.split_once("```").unwrap();
    everywhere(async |url| {
        let client = soon("a client", Client::connect(url)).await.unwrap();
        let service = client.service("shouting").fallback(async |text: String| text.to_uppercase());
        let service = Running::start(service).await;
        let program = program.replace("amqp://localhost", url);
        assert_eq!(succeed(Command::new(PYTHON).args(["-c", &program])).await, "HELLO\n");
        assert_eq!(soon("the end", service.stop()).await.handled, 1);
    })
    .await;
}

/// As .NET's SimpleRpcClient asks: no method, and a reply to an exchange, with the correlation id of the request or none.
#[tokio::test]
async fn a_plain_caller_is_served_by_the_method_without_a_name_at_the_address_that_it_gives() {
    everywhere(async |url| {
        let client = soon("a client", Client::connect(url)).await.unwrap();
        let service = client.service("plain").method("", async |text: String| text.to_uppercase());
        let service = Running::start(service.method("double", double)).await;
        let said = succeed(Command::new(PYTHON).args([PROGRAM, url, "ask"])).await;
        assert_eq!(said.lines().count(), 4, "{said}");
        let summary = soon("the end", service.stop()).await;
        assert_eq!((summary.handled, summary.failed), (6, 0));
    })
    .await;
}

#[tokio::test]
async fn pika_is_called() {
    everywhere(async |url| {
        let client = soon("a client", Client::connect(url)).await.unwrap();
        let words = Topology::new().queue(Queue::new("words"));
        soon("a queue", client.apply(&words)).await.unwrap();
        let mut program = Command::new(PYTHON);
        let serving = succeed(program.args([PROGRAM, url, "serve"]));
        let calling = async {
            for replies in [Replies::Direct, Replies::Queue, Replies::QueuePerCall] {
                let rpc = client.rpc("words").replies(replies).build().await.unwrap();
                let calls = (0..100).map(|number| {
                    let rpc = rpc.clone();
                    tokio::spawn(async move {
                        rpc.call::<String>("upper", format!("word {number}")).await
                    })
                });
                for (number, call) in calls.collect::<Vec<_>>().into_iter().enumerate() {
                    let reply = soon("a reply", call).await.unwrap().unwrap();
                    assert_eq!(reply, format!("WORD {number}"));
                }
                let error = soon("a reply", rpc.call::<String>("fail", "no")).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Remote);
                let remote = error.remote().unwrap();
                assert_eq!((&*remote.kind, &*remote.text), ("refused", "NO"));
                let stream = rpc.stream::<String>("spell", "abc");
                let mut stream = soon("a stream", stream).await.unwrap();
                let mut letters = String::new();
                while let Some(letter) = soon("a letter", stream.next()).await {
                    letters += &letter.unwrap();
                }
                assert_eq!((letters.as_str(), rpc.stray_replies()), ("abc", 0));
            }
            let rpc = client.rpc("words").build().await.unwrap();
            soon("a cast", rpc.cast("stop", "")).await.unwrap();
        };
        let (said, ()) = tokio::join!(serving, calling);
        assert_eq!(said.lines().count(), 2, "{said}");
    })
    .await;
}
