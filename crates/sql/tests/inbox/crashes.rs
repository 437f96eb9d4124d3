//! A process that is killed at named points, and another one that goes on.

use std::fs::File;
use std::time::Duration;

use leveret::inbox::{Remember, Sequence};
use leveret::{Client, Deliveries, Failure, Json, Message, Queue, Topology};
use leveret_sql::{Inbox, Tx};
use leveret_testkit::process::{Ending, GuardedProcess};
use leveret_testkit::proxy::{Cut, Direction, FaultProxy};
use leveret_testkit::{ScratchFolder, eventually};
use tokio::time::timeout;

use super::{DAY, Effect, SOON, Scene, apply, effect};
use crate::database::{Db, pool_of, schema};
use crate::dying::{Dying, GATE, POINT, POINTS, dies_at};

/// What tells a process where to go.
const DATABASE: &str = "LEVERET_TEST_WORKER_DATABASE";
const BROKER: &str = "LEVERET_TEST_WORKER_BROKER";
const NUMBERED: &str = "LEVERET_TEST_WORKER_NUMBERED";

async fn work(Json(effect): Json<Effect>, mut tx: Tx<Db>) -> Result<String, Failure> {
    dies_at("before the work");
    apply(&effect, &mut tx).await?;
    dies_at("after the work");
    Ok(format!("{effect:?} by process {}", std::process::id()))
}

fn remember(numbered: bool) -> Remember {
    match numbered {
        true => Remember::high_water(),
        false => Remember::ids_for(DAY),
    }
}

#[tokio::test]
#[ignore = "a worker, for the other test to kill"]
async fn worker() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let client = Client::connect(&*variable(BROKER)).await.unwrap();
    let remember = remember(std::env::var(NUMBERED).is_ok());
    let inbox = Dying(Inbox::in_schema(pool_of(&variable(DATABASE)).await, remember, &schema()));
    client.service("s").method("m", work).exactly_once(inbox).run().await.unwrap();
}

/// Starts a worker that is killed when this is dropped.
fn start_worker(
    scene: &Scene,
    broker: &str,
    point: &str,
    numbered: bool,
    folder: &ScratchFolder,
) -> GuardedProcess {
    let mut command = vec!["env".to_owned()];
    command.push(format!("{DATABASE}={}", scene.database.url()));
    command.push(format!("{BROKER}=amqp://{broker}"));
    command.push(format!("{POINT}={point}"));
    command.push(format!("{GATE}={}", folder.path().display()));
    command.extend(numbered.then(|| format!("{NUMBERED}=yes")));
    command.push(std::env::current_exe().unwrap().display().to_string());
    command.extend(["--exact", "--ignored", "inbox::crashes::worker"].map(str::to_owned));
    let log = File::create(folder.path().join("log")).unwrap();
    GuardedProcess::start(command, Ending::Kill, log)
}

/// A request that is to be answered to the queue `answers`.
async fn request(numbers: &Sequence, name: &str) -> Message {
    let body = serde_json::to_vec(&effect(name)).unwrap();
    let request = Message::new(body).reply_to("answers").kind("m").correlation_id(name);
    numbers.stamp(request).await.unwrap()
}

/// The octets of the next reply.
async fn next_reply(answers: &mut Deliveries) -> (Vec<u8>, Vec<u8>) {
    let reply = timeout(SOON, answers.next()).await.expect("a reply").unwrap().unwrap();
    let octets = (reply.raw_properties().as_bytes().to_vec(), reply.body().to_vec());
    reply.ack().unwrap();
    octets
}

/// Wherever a process dies, the work is done once, and all copies get one and the same reply.
#[tokio::test]
async fn the_work_is_done_once_wherever_its_process_is_killed() {
    let scene = Scene::new().await;
    let folder = ScratchFolder::new();
    let broker = scene.broker.listen("127.0.0.1:0").await.unwrap().to_string();
    let queues = Topology::new().queue(Queue::classic("answers")).queue(Queue::classic("s"));
    scene.client.apply(&queues).await.unwrap();
    let mut answers = scene.client.consumer("answers").stream().await.unwrap();
    for numbered in [false, true] {
        let numbers = Sequence::fresh("asker");
        for point in POINTS {
            let name = format!("{point} {numbered}");
            let request = request(&numbers, &name).await;
            scene.publisher.publish("s", request.clone()).await.unwrap();
            let mut dies = start_worker(&scene, &broker, point, numbered, &folder);
            eventually(SOON, format!("the death {point}"), || {
                std::future::ready(dies.exit_status().is_some())
            })
            .await;

            let _goes_on = start_worker(&scene, &broker, "nowhere", numbered, &folder);
            scene.publisher.publish("s", request).await.unwrap();
            let reply = next_reply(&mut answers).await;
            assert_eq!(reply, next_reply(&mut answers).await, "{name}");
            scene.until_empty("s").await;
            assert_eq!(scene.effects(&name).await, 1, "{name}");
        }
    }
    // No reply that nobody has asked for.
    let more = timeout(Duration::from_millis(300), answers.next()).await;
    assert!(more.is_err(), "a reply too many");
}

/// Also where the reply is out, and the request is not acked yet, or just is.
#[tokio::test]
async fn the_work_is_done_once_if_its_process_is_killed_after_the_reply() {
    let scene = Scene::new().await;
    let broker = scene.broker.listen("127.0.0.1:0").await.unwrap();
    let queues = Topology::new().queue(Queue::classic("answers")).queue(Queue::classic("s"));
    scene.client.apply(&queues).await.unwrap();
    let mut answers = scene.client.consumer("answers").stream().await.unwrap();
    for numbered in [false, true] {
        let numbers = Sequence::fresh("asker");
        for point in ["before the ack", "after the ack"] {
            let name = format!("{point} {numbered}");
            let request = request(&numbers, &name).await;
            let (folder, proxy) = (ScratchFolder::new(), FaultProxy::to(broker).await);
            let by_proxy = proxy.addr().to_string();
            scene.publisher.publish("s", request.clone()).await.unwrap();
            let dies = start_worker(&scene, &by_proxy, "before the reply", numbered, &folder);
            eventually(SOON, "the commit", async || folder.path().join("waits").exists()).await;
            if point == "before the ack" {
                // It acks the request once the reply is confirmed, and does not hear of that.
                proxy.stall(Direction::ToClient);
            }
            File::create(folder.path().join("goes on")).unwrap();
            let reply = next_reply(&mut answers).await;
            match point {
                "before the ack" => assert_eq!(unsettled(&scene, "s"), 1, "{name}"),
                _ => scene.until_empty("s").await,
            }
            drop(dies);
            proxy.cut(Cut::Reset);

            let _goes_on = start_worker(&scene, &broker.to_string(), "nowhere", numbered, &folder);
            if point == "before the ack" {
                assert_eq!(reply, next_reply(&mut answers).await, "{name}");
                scene.until_empty("s").await;
            }
            scene.publisher.publish("s", request).await.unwrap();
            assert_eq!(reply, next_reply(&mut answers).await, "{name}");
            scene.until_empty("s").await;
            assert_eq!(scene.effects(&name).await, 1, "{name}");
        }
    }
}

fn unsettled(scene: &Scene, queue: &str) -> usize {
    let snapshot = scene.broker.snapshot();
    snapshot.virtual_host("/").and_then(|host| host.queue(queue)).unwrap().unsettled
}
