//! The embedded broker and a few clients that do anything in any order: no session may panic or hang, and when all have
//! gone, nothing of theirs stays.

#![no_main]

#[path = "session/client.rs"]
mod client;
#[path = "session/program.rs"]
mod program;

use std::thread;
use std::time::Duration;

use leveret_broker::{Broker, Profile};
use libfuzzer_sys::fuzz_target;
use tokio::runtime::Builder;
use tokio::task::yield_now;
use tokio::time::advance;

use client::{CHANNEL_MAX, Client};
use program::{AnyMethod, Method, Program, Settings, Step};

/// A quarter of what a thread of tokio's has: what recurses over objects does not get far.
const STACK: usize = 512 * 1024;

const CLIENTS: usize = 3;

/// In seconds. Clients never send one: those that say nothing for two of them are given up.
const HEARTBEAT: u16 = 20;

/// How long a session may take to end, whatever it waits for, and how often it is looked at meanwhile.
const ENDS_WITHIN: Duration = Duration::from_secs(300);
const LOOKS: u32 = 60;

fuzz_target!(|program: Program| {
    let run = move || {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(run(program));
    };
    let run = thread::Builder::new().stack_size(STACK).spawn(run).expect("a thread");
    run.join().expect("a run without a panic");
});

fn broker(settings: &Settings) -> Broker {
    let mut builder = Broker::builder()
        .profile(if settings.old { Profile::RabbitMq3_10 } else { Profile::RabbitMq4_3 })
        .channel_max(CHANNEL_MAX)
        .max_message_size(250_000)
        .memory_limit(if settings.small_memory { 100_000 } else { 10_000_000 })
        .consumer_timeout(Duration::from_secs(10));
    if settings.record {
        builder = builder.record(100);
    }
    builder.start().expect("a broker")
}

async fn run(program: Program) {
    let broker = broker(&program.settings);
    let heartbeat = if program.settings.heartbeats { HEARTBEAT } else { 0 };
    let mut clients: Vec<Client> =
        (0..CLIENTS).map(|_| Client::connect(&broker, heartbeat)).collect();
    for client in &mut clients {
        client.ask(1, &Method::Open);
    }
    for step in &program.steps {
        carry_out(&broker, &mut clients, step, heartbeat).await;
    }
    turns(&mut clients).await;
    drop(clients);
    broker.faults().unblock();
    assert_cleans_up(&broker).await;
}

async fn carry_out(broker: &Broker, clients: &mut [Client], step: &Step, heartbeat: u16) {
    let of = |client: u8| usize::from(client) % CLIENTS;
    match step {
        Step::Method(place, method) => {
            clients[of(place.client)].ask(Client::channel(place.channel), method);
        }
        Step::OnNewChannel(place, method) => {
            let (client, channel) = (&mut clients[of(place.client)], Client::channel(place.channel));
            client.ask(channel, &Method::CloseOk);
            client.ask(channel, &Method::Open);
            client.ask(channel, method);
        }
        Step::Publish(place, publish) => {
            clients[of(place.client)].publish(Client::channel(place.channel), publish, true);
        }
        Step::Begin(place, publish) => {
            clients[of(place.client)].publish(Client::channel(place.channel), publish, false);
        }
        Step::Body(place, size) => {
            clients[of(place.client)].body(Client::channel(place.channel), size.bytes());
        }
        Step::Any(place, AnyMethod(method)) => {
            clients[of(place.client)].method(u16::from(place.channel % 5), method);
        }
        Step::Frame(place, kind, payload) => {
            clients[of(place.client)].frame(*kind, u16::from(place.channel % 5), payload);
        }
        Step::Bytes(client, bytes) => clients[of(*client)].bytes(bytes),
        Step::Chain(place, chain) => {
            clients[of(place.client)].chain(1, chain);
        }
        Step::Run => turns(clients).await,
        Step::Read(client) => {
            clients[of(*client)].read();
            turns(clients).await;
        }
        Step::Leave(client) => {
            // What the broker has room for, it gets.
            clients[of(*client)].flush();
            clients[of(*client)] = Client::connect(broker, heartbeat);
            clients[of(*client)].ask(1, &Method::Open);
        }
        Step::Advance(time) => {
            turns(clients).await;
            advance(Duration::from_millis(time.millis())).await;
            turns(clients).await;
        }
        Step::Restart => broker.restart().await,
        Step::Block => broker.faults().block("a step says so"),
        Step::Unblock => broker.faults().unblock(),
        Step::CutAll => broker.faults().cut_all_connections(),
    }
}

/// All tasks of the broker have a few turns, and more for as long as they take what clients have to say.
async fn turns(clients: &mut [Client]) {
    for _ in 0..200 {
        clients.iter_mut().for_each(Client::flush);
        for _ in 0..5 {
            yield_now().await;
        }
        if !clients.iter().any(Client::has_unsent) {
            break;
        }
    }
}

async fn ends(broker: &Broker, what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..LOOKS {
        turns(&mut []).await;
        if is_so() {
            return;
        }
        advance(ENDS_WITHIN / LOOKS).await;
    }
    panic!("{what}: {:?}", broker.snapshot());
}

/// The clients have gone: their connections end, whatever they have sent; others are served; and without queues there are no
/// messages.
async fn assert_cleans_up(broker: &Broker) {
    ends(broker, "a connection stays", || broker.statistics().connections == 0).await;
    // What the broker does bit by bit, such as burying dead letters, it goes on with while time passes.
    advance(Duration::from_secs(1)).await;
    turns(&mut []).await;
    let mut client = [Client::connect(broker, 0)];
    client[0].ask(1, &Method::Open);
    let snapshot = broker.snapshot();
    for queue in snapshot.virtual_hosts.iter().flat_map(|host| &host.queues) {
        client[0].delete(1, &queue.name);
    }
    turns(&mut client).await;
    ends(broker, "a queue stays", || broker.statistics().queues == 0).await;
    client[0].ask(1, &Method::ConnectionClose);
    turns(&mut client).await;
    ends(broker, "messages stay", || broker.statistics().memory == 0).await;
    ends(broker, "the last connection stays", || broker.statistics().connections == 0).await;
    assert_eq!(broker.statistics().unsettled, 0);
    broker.shutdown().await;
}
