//! What a running service answers over HTTP.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;

/// A service that answers over HTTP.
pub(super) struct Service {
    child: Killed,
    _out: BufReader<ChildStdout>,
    /// `127.0.0.1:9000`
    pub(super) base: String,
}

impl Service {
    pub(super) fn start(place: &Place, file: &Path) -> Service {
        let mut command =
            place.program(&["run", file.to_str().unwrap(), "--listen", "127.0.0.1:0"]);
        let mut child = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut out = BufReader::new(child.0.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let base = line.split_once("http://").unwrap().1.split_once("/health").unwrap().0;
        Service { child, base: base.to_owned(), _out: out }
    }

    pub(super) async fn ask(&self, path: &str) -> (u16, String) {
        ask(&self.base, path).await
    }
}

pub(super) async fn ask(base: &str, path: &str) -> (u16, String) {
    let client = web::client().build().unwrap();
    let response = client.get(format!("http://{base}{path}")).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_service_tells_how_it_is() {
    let place = Place::new().await;
    let (_folder, path) = simple_service();
    let service = Service::start(&place, &path);
    let ask = async |path: &str| service.ask(path).await;
    let base = service.base.as_str();
    eventually(PATIENCE, "a live consumer", || async {
        let (status, text) = ask("/health").await;
        let health: serde_json::Value = serde_json::from_str(&text).unwrap();
        status == 200 && health["consumers"][0]["live"] == true
    })
    .await;
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    eventually(PATIENCE, "the message in the metrics", || async {
        ask("/metrics").await.1.contains("leveret_acked_total{queue=\"billing\"} 1")
    })
    .await;
    let (status, topology) = ask("/topology").await;
    assert!(status == 200 && leveret::Topology::from_toml(&topology).is_ok(), "{topology}");
    assert!(topology.contains("billing"), "{topology}");
    assert_eq!(leveret(&["topology", "export", base]).ok(), topology);
    let nobody = leveret(&["topology", "export", "127.0.0.1:1"]);
    assert!(nobody.status == 1 && nobody.err.contains("127.0.0.1:1"), "{nobody:?}");
}

/// A client that never sends the rest of its request.
async fn slow_client(service: &Service) -> TcpStream {
    let mut stream = TcpStream::connect(&service.base).await.unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n").await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_use_up_no_descriptors_and_keep_nobody_out() {
    let place = Place::new().await;
    let (_folder, path) = simple_service();
    let service = Service::start(&place, &path);
    let mut slow = Vec::new();
    for _ in 0..300 {
        slow.push(slow_client(&service).await);
    }
    eventually(PATIENCE, "a live consumer", || async { service.ask("/health").await.0 == 200 })
        .await;
    let open = format!("/proc/{}/fd", service.child.0.id());
    eventually(PATIENCE, "few open descriptors", || async {
        fs::read_dir(&open).unwrap().count() < 150
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_does_not_end_is_not_waited_for() {
    let place = Place::new().await;
    let (_folder, path) = simple_service();
    let service = Service::start(&place, &path);
    let mut slow = slow_client(&service).await;
    let ended = tokio::time::timeout(PATIENCE, slow.read_to_end(&mut Vec::new())).await;
    assert!(ended.is_ok(), "the connection is still open after {PATIENCE:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_answers_one_request() {
    let place = Place::new().await;
    let (_folder, path) = simple_service();
    let service = Service::start(&place, &path);
    let mut stream = TcpStream::connect(&service.base).await.unwrap();
    stream.write_all(b"GET /topology HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    assert!(response.to_lowercase().contains("connection: close"), "{response}");
}

/// Another program has replaced the queue while the connection was away.
#[tokio::test(flavor = "multi_thread")]
async fn health_names_what_could_not_be_declared_again() {
    let place = Place::new().await;
    let (proxy, url) = proxy(&place).await;
    let client = place.client().await;
    let file = format!(
        "{TOPOLOGY}\n[[topology.queue]]\nname = \"audit\"\ntype = \"classic\"\n[[consumer]]\nqueue = \"billing\"\ncommand = [\"cat\"]\n"
    );
    let options = ["--listen", "127.0.0.1:0", "--url", &url];
    let mut running = Running::spawn(&place, &file, &options, &[]);
    let base = running.base();
    running.until("running: ");
    let health = async || {
        let (status, text) = ask(&base, "/health").await;
        (status, serde_json::from_str::<serde_json::Value>(&text).unwrap())
    };
    eventually(PATIENCE, "the service to be well", async || health().await.0 == 200).await;
    let (_, well) = health().await;
    for list in ["connections", "consumers", "publishers", "callers", "pools"] {
        assert!(well[list].is_array(), "{list} is not in {well}");
    }
    assert!(well["healthy"] == true && well["stopping"] == false, "{well}");

    client.delete_queue("audit", leveret::amqp::DeleteQueue::default()).await.unwrap();
    let other = leveret::Queue::classic("audit").max_length(5);
    client.apply(&leveret::Topology::new().queue(other)).await.unwrap();
    proxy.cut(Cut::Reset);
    let ill = eventually(PATIENCE, "the queue with other arguments", async || {
        let (status, told) = health().await;
        let lacks = told["connections"][0]["not_restored"].as_object()?;
        (status == 503 && !lacks.is_empty()).then_some(told)
    })
    .await;
    let lacks = ill["connections"][0]["not_restored"].to_string();
    assert!(ill["healthy"] == false, "{ill}");
    assert!(lacks.contains("audit") && lacks.contains("x-max-length"), "{lacks}");
    running.stop();
    client.close().await;
}
