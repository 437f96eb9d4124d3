//! HTTP endpoints as handlers: what their answers mean, in time or not.

use axum::http::header::RETRY_AFTER;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;

/// What an endpoint was asked: the body, and which attempt it was.
type Asked = Arc<Mutex<Vec<(String, String)>>>;

/// An endpoint that gives its first answer to each first attempt, and 200 to all others.
async fn endpoint<R: IntoResponse>(
    first: impl Fn(&str) -> R + Clone + Send + Sync + 'static,
) -> (String, Asked, JoinHandle<()>) {
    let asked = Asked::default();
    let noted = Arc::clone(&asked);
    let answer = move |headers: HeaderMap, body: String| {
        let attempt = headers["leveret-attempt"].to_str().unwrap().to_owned();
        let response = match attempt.as_str() {
            "1" => first(&body).into_response(),
            _ => StatusCode::OK.into_response(),
        };
        noted.lock().unwrap().push((body, attempt));
        async { response }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let router = Router::new().route("/", post(answer));
    (address, asked, tokio::spawn(async { axum::serve(listener, router).await.unwrap() }))
}

async fn until_asked(asked: &Asked, times: usize) {
    eventually(PATIENCE, format!("{times} requests"), async || {
        asked.lock().unwrap().len() == times
    })
    .await;
}

fn consumer(address: &str, options: &str) -> String {
    format!(
        "{TOPOLOGY}\n[[consumer]]\nqueue = \"billing\"\nhttp = \"http://{address}/\"\n{options}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_is_busy_or_at_fault_is_asked_again() {
    let place = Place::new().await;
    let status = |body: &str| StatusCode::from_bytes(body.as_bytes()).unwrap();
    let (address, asked, serving) = endpoint(status).await;
    let file = consumer(&address, "retry = { waits = [\"50ms\"] }");
    let running = Running::start(&place, &file, &[]);
    for status in ["408", "425", "429", "500", "502", "503", "504"] {
        place.run(&["publish", "order.new", status, "-e", "orders"]).ok();
    }
    until_asked(&asked, 14).await;
    assert_eq!(running.stop(), "stopped: 7 messages handled, 7 sent to be tried again\n");
    serving.abort();
}

/// By the policy it would come again in an hour.
#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_says_when_to_ask_again() {
    let place = Place::new().await;
    let busy = |_: &str| (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")]);
    let (address, asked, serving) = endpoint(busy).await;
    let file = consumer(&address, "retry = { wait = \"1h\", times = 1 }");
    let running = Running::start(&place, &file, &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    until_asked(&asked, 2).await;
    assert_eq!(running.stop(), "stopped: 1 message handled, 1 sent to be tried again\n");
    serving.abort();
}

/// Answers each request with the beginning of a response, and then falls silent.
async fn silent_after(beginning: &'static str) -> (String, Arc<Mutex<usize>>, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let asked = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&asked);
    let serving = tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut piece = [0; 4096];
            if stream.read(&mut piece).await.unwrap_or_default() > 0 {
                *counted.lock().unwrap() += 1;
                stream.write_all(beginning.as_bytes()).await.unwrap();
                open.push(stream);
            }
        }
    });
    (address, asked, serving)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_does_not_answer_in_time_is_asked_again() {
    let place = Place::new().await;
    let client = place.client().await;
    let (address, asked, serving) = silent_after("").await;
    let options = "timeout = \"300ms\"\nretry = { waits = [\"50ms\"] }";
    let running = Running::start(&place, &consumer(&address, options), &[]);
    place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
    place.until_has(&client, "billing.parked", 1).await;
    assert_eq!(*asked.lock().unwrap(), 2);
    let parked = place.run(&["parking", "list", "billing.parked", "--json"]).json();
    assert_eq!(parked[0]["story"]["kind"], "timeout");
    running.stop();
    serving.abort();
    client.close().await;
}

/// The second message only comes when the first one is done.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_does_not_end_changes_nothing_about_the_status() {
    let place = Place::new().await;
    let client = place.client().await;
    for (beginning, parked) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", 0),
        ("HTTP/1.1 422 Unprocessable Entity\r\nContent-Length: 9\r\n\r\nx", 2),
    ] {
        let (address, asked, serving) = silent_after(beginning).await;
        let running = Running::start(&place, &consumer(&address, "timeout = \"1h\""), &[]);
        for _ in 0..2 {
            place.run(&["publish", "order.new", "x", "-e", "orders"]).ok();
        }
        eventually(PATIENCE, "two requests", async || *asked.lock().unwrap() == 2).await;
        let done = running.stop();
        match parked {
            0 => assert_eq!(done, "stopped: 2 messages handled\n"),
            _ => assert_eq!(done, "stopped: 0 messages handled, 2 parked\n"),
        }
        serving.abort();
    }
    place.until_has(&client, "billing.parked", 2).await;
    client.close().await;
}
