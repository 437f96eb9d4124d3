use std::time::Duration;

use leveret::{Client, ErrorKind, Json, Rpc, ServiceBuilder};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::{broker, client_of, soon};

/// A service that runs until it is dropped or stopped.
struct Running {
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<leveret::Summary, leveret::Error>>,
}

impl Running {
    fn start(service: ServiceBuilder) -> Self {
        let (stop, stopped) = oneshot::channel();
        Running { stop: Some(stop), task: tokio::spawn(service.run_until(stopped)) }
    }

    async fn stop(mut self) -> leveret::Summary {
        self.stop.take();
        soon("the end of the service", &mut self.task).await.unwrap().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn double(Json(number): Json<u64>) -> Json<u64> {
    Json(2 * number)
}

/// Calls until the service is there.
async fn until_served(rpc: &Rpc, method: &str) {
    soon("the service", async {
        loop {
            match rpc.call::<()>(method, Json(0)).await {
                Err(error) if error.kind() == ErrorKind::Unroutable => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                _ => return,
            }
        }
    })
    .await;
}

async fn doubler(client: &Client) -> (Running, Rpc) {
    let service = Running::start(client.service("numbers").method("double", double));
    let rpc = client.rpc("numbers").build().await.unwrap();
    until_served(&rpc, "double").await;
    (service, rpc)
}

#[tokio::test(start_paused = true)]
async fn a_call_gets_its_reply() {
    let broker = broker();
    let client = client_of(&broker).await;
    let (service, rpc) = doubler(&client).await;
    let Json(number): Json<u64> = soon("a reply", rpc.call("double", Json(21))).await.unwrap();
    assert_eq!(number, 42);
    assert_eq!(rpc.in_flight(), 0);
    assert_eq!(service.stop().await.handled, 2);
}
