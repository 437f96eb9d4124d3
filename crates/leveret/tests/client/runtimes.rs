//! Callers and publishers that are used in one runtime and were set up in another, which ends before.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use leveret::{Client, Error, ErrorKind, Json, OnLoss, Publisher, Queue, Replies, Rpc};
use leveret_testkit::eventually;
use tokio::runtime::Runtime;

use crate::services::{Running, double};
use crate::{PATIENCE, broker, builder_of, client_of, client_with, soon};

/// Longer than anybody waits for a test.
const HOURS: Duration = Duration::from_secs(100 * 3600);

/// One whose channel is open.
async fn caller(client: &Client) -> Rpc {
    let rpc = client.rpc("silent").on_loss(OnLoss::Replay).build().await.unwrap();
    rpc.call::<()>("m", "").timeout(Duration::from_millis(200)).await.unwrap_err();
    rpc
}

async fn publisher(client: &Client) -> Publisher {
    client.publisher("").timeout(HOURS).build().await.unwrap()
}

fn says_why(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(
        error.to_string().contains("the runtime in which the client connected has ended"),
        "{error}"
    );
}

#[tokio::test]
async fn what_is_under_way_when_the_runtime_of_its_client_ends_fails() {
    let broker = broker();
    let _queue = client_with(&broker, Queue::classic("silent")).await;
    let runtime = Runtime::new().unwrap();
    let builder = builder_of(&broker);
    let made = runtime.spawn(async move {
        let client = builder.connect().await.unwrap();
        (caller(&client).await, publisher(&client).await)
    });
    let (rpc, publisher) = made.await.unwrap();
    let call = tokio::spawn({
        let rpc = rpc.clone();
        async move { rpc.call::<()>("m", "").timeout(HOURS).await }
    });
    eventually(PATIENCE, "the call is under way", async || rpc.in_flight() == 1).await;
    // The publish is on its way, and nobody answers.
    broker.faults().freeze();
    let ticket = publisher.send("silent", "").await.unwrap();

    runtime.shutdown_background();
    says_why(&soon("an answer", call).await.unwrap().unwrap_err());
    says_why(&soon("an answer", ticket).await.unwrap_err());
    says_why(&soon("an answer", rpc.call::<()>("m", "")).await.unwrap_err());
    says_why(&soon("an answer", publisher.publish("silent", "")).await.unwrap_err());
    assert_eq!(rpc.in_flight(), 0);
    broker.faults().thaw();
}

#[tokio::test]
async fn a_request_whose_service_ends_with_its_runtime_is_handled_by_another() {
    let broker = broker();
    let client = client_of(&broker).await;
    for workers in [1, 8] {
        let runtime = Runtime::new().unwrap();
        let (begin, mut begun) = tokio::sync::mpsc::channel(10);
        let builder = builder_of(&broker);
        runtime.spawn(async move {
            let forever = move |_: Json<u64>| {
                let begin = begin.clone();
                async move {
                    begin.send(()).await.unwrap();
                    std::future::pending::<Json<u64>>().await
                }
            };
            let client = builder.connect().await.unwrap();
            let service = client.service("numbers").workers(workers).method("double", forever);
            service.run().await
        });
        let service = client.service("numbers").method("double", double);
        client.apply(&service.topology()).await.unwrap();
        let rpc = client.rpc("numbers").build().await.unwrap();
        let call = tokio::spawn(async move {
            let Json(doubled): Json<u64> = rpc.call("double", Json(21)).timeout(HOURS).await?;
            Ok::<u64, Error>(doubled)
        });
        soon("a request", begun.recv()).await.unwrap();
        runtime.shutdown_background();
        let _other = Running::start(service).await;
        // The first one has not said that it failed.
        assert_eq!(soon("a reply", call).await.unwrap().unwrap(), 42);
    }
}

#[tokio::test]
async fn what_is_set_up_in_a_runtime_that_ends_goes_on_with_its_client() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("silent")).await;
    let _service = Running::start(client.service("numbers").method("double", double)).await;
    for replies in [Replies::Direct, Replies::Queue, Replies::QueuePerCall] {
        let runtime = Runtime::new().unwrap();
        let of_runtime = client.clone();
        let made = runtime.spawn(async move {
            let rpc = of_runtime.rpc("numbers").replies(replies).build().await.unwrap();
            rpc.call::<Json<u64>>("double", Json(1)).await.unwrap();
            (rpc, publisher(&of_runtime).await)
        });
        let (rpc, publisher) = made.await.unwrap();
        runtime.shutdown_background();
        for _ in 0..2 {
            let call = rpc.call::<Json<u64>>("double", Json(21)).timeout(PATIENCE);
            // A connection that was cut right before may take the first one along.
            let call = call.resend_after(Duration::from_secs(1));
            assert_eq!(soon("a reply", call).await.unwrap().0, 42);
            soon("an answer", publisher.publish("silent", "")).await.unwrap();
            broker.faults().cut_all_connections();
        }
        let late = client.rpc("silent").replies(replies).build().await.unwrap();
        let late = late.call::<()>("m", "").timeout(Duration::from_millis(10)).await;
        assert_eq!(late.unwrap_err().kind(), ErrorKind::TimedOut);
    }
}

type BoxedCall = Pin<Box<dyn Future<Output = Result<Json<u64>, Error>> + Send>>;

/// Holds a call, and drops it when it is woken.
#[derive(Default)]
struct DropsItsCall {
    call: Mutex<Option<BoxedCall>>,
    is_dropped: AtomicBool,
}

impl Wake for DropsItsCall {
    fn wake(self: Arc<Self>) {
        let call = self.call.lock().unwrap().take();
        drop(call);
        self.is_dropped.store(true, Ordering::Relaxed);
    }
}

impl DropsItsCall {
    /// Makes a call, polled once.
    fn start(rpc: &Rpc, method: &'static str) -> Arc<Self> {
        let rpc = rpc.clone();
        let holder = Arc::new(DropsItsCall::default());
        let waker = Waker::from(Arc::clone(&holder));
        let mut call: BoxedCall = Box::pin(async move { rpc.call(method, Json(21)).await });
        // Locked, so that a wake-up that comes at once finds the call.
        let mut held = holder.call.lock().unwrap();
        assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        *held = Some(call);
        drop(held);
        holder
    }

    async fn until_dropped(&self) {
        let is_dropped = async || self.is_dropped.load(Ordering::Relaxed);
        eventually(PATIENCE, "the call is dropped", is_dropped).await;
    }
}

#[tokio::test]
async fn a_caller_may_drop_its_call_while_it_is_woken() {
    let broker = broker();
    let client = client_with(&broker, Queue::classic("silent")).await;
    let _service = Running::start(client.service("numbers").method("double", double)).await;
    let (send, receive) = tokio::sync::oneshot::channel();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let builder = builder_of(&broker);
    let broker_to_cut = broker.clone();
    let runtime = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = builder.connect().await.unwrap();
            let rpc = client.rpc("numbers").build().await.unwrap();
            rpc.call::<Json<u64>>("double", Json(1)).await.unwrap();
            // The task of the next connection is younger than that of the calls, and ends after it.
            broker_to_cut.faults().cut_all_connections();
            let call = async || rpc.call::<Json<u64>>("double", Json(1)).await.is_ok();
            eventually(PATIENCE, "a reply", call).await;
            send.send(rpc.clone()).unwrap();
            stopped.await.unwrap();
        });
    });
    let rpc = receive.await.unwrap();
    // By a reply.
    DropsItsCall::start(&rpc, "double").until_dropped().await;
    // By the end of the runtime, with an unconfirmed request.
    broker.faults().freeze();
    let holder = DropsItsCall::start(&rpc, "double");
    assert_eq!(rpc.in_flight(), 1);
    stop.send(()).unwrap();
    holder.until_dropped().await;
    assert_eq!(rpc.in_flight(), 0);
    broker.faults().thaw();
    runtime.join().unwrap();
}
