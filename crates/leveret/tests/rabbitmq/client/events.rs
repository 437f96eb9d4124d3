use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leveret::amqp::DeleteExchange;
use leveret::{
    Client, ConsumerBuilder, Deliveries, Emit, ErrorKind, Events, Exchange, Failure, Gathered,
    Incoming, Json, Message, Queue, RetryPolicy, State, TraceContext,
};
use leveret_testkit::{eventually, rabbitmq};
use tokio::sync::mpsc;

use crate::support::client::{
    CONSUMING, SOON, client, cut, next, soon, until_depth, until_healthy,
};

/// The keys of the events in a queue, which are acked.
async fn keys(deliveries: &mut Deliveries, count: usize) -> Vec<String> {
    let mut keys = Vec::new();
    for _ in 0..count {
        let delivery = next(deliveries).await;
        keys.push(delivery.routing_key().to_string());
        delivery.ack().unwrap();
    }
    keys
}

async fn declared(subscription: &ConsumerBuilder) {
    soon("a subscription", subscription.declare()).await.unwrap();
}

async fn publish(events: &Events, key: &str, event: impl Into<Message>) {
    soon("an outcome", events.publish(key, event.into())).await.unwrap();
}

#[tokio::test]
async fn every_queue_gets_what_fits_its_patterns_once() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let stock = client.events("stock");
    let ibm = stock.subscribe("ibm", ["STOCK.IBM.#", "*.IBM.NYSE"]);
    let all = stock.subscribe("all", ["#"]);
    let nyse = stock.subscribe("nyse", ["STOCK.*.NYSE"]);
    for subscription in [&ibm, &all, &nyse] {
        declared(subscription).await;
    }
    for key in ["STOCK.IBM.NYSE", "STOCK.KO.NYSE", "STOCK.IBM", "BOND.IBM.NYSE", "other"] {
        publish(&stock, key, key.to_owned()).await;
    }
    let mut ibm = soon("a stream", ibm.stream()).await.unwrap();
    assert_eq!(keys(&mut ibm, 3).await, ["STOCK.IBM.NYSE", "STOCK.IBM", "BOND.IBM.NYSE"]);
    let mut nyse = soon("a stream", nyse.stream()).await.unwrap();
    assert_eq!(keys(&mut nyse, 2).await, ["STOCK.IBM.NYSE", "STOCK.KO.NYSE"]);
    let mut all = soon("a stream", all.stream()).await.unwrap();
    assert_eq!(keys(&mut all, 5).await.len(), 5);
    for queue in ["ibm", "all", "nyse"] {
        until_depth(&client, queue, 0).await;
    }
}

#[tokio::test]
async fn an_event_that_nobody_wants_is_no_error_and_the_exchange_is_made_by_publishing() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    publish(&client.events("stock"), "STOCK.IBM", "1").await;
    // It is there: another publisher finds it.
    let publisher = client.publisher("stock").build().await.unwrap();
    let outcome = soon("an outcome", publisher.publish("STOCK.IBM", "2")).await;
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unroutable);
}

#[tokio::test]
async fn an_exchange_that_somebody_deletes_is_made_again() {
    let vhost = rabbitmq::vhost().await;
    let (mine, theirs) = (client(&vhost).await, client(&vhost).await);
    let stock = mine.events("stock");
    publish(&stock, "STOCK.IBM", "1").await;
    soon("deleting", theirs.delete_exchange("stock", DeleteExchange::default())).await.unwrap();
    publish(&stock, "STOCK.IBM", "2").await;
    let subscription = theirs.events("stock").subscribe("q", ["#"]);
    declared(&subscription).await;
    publish(&stock, "STOCK.IBM", "3").await;
    let mut deliveries = soon("a stream", subscription.stream()).await.unwrap();
    assert_eq!(next(&mut deliveries).await.body(), "3");
}

#[tokio::test]
async fn direct_events_go_by_whole_keys() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let stock = client.events("stock").direct();
    let mut deliveries =
        soon("a stream", stock.subscribe("q", ["IBM", "KO"]).stream()).await.unwrap();
    for key in ["IBM", "IBM.NYSE", "KO"] {
        publish(&stock, key, "").await;
    }
    assert_eq!(keys(&mut deliveries, 2).await, ["IBM", "KO"]);
    // The broker has a direct one, and says so.
    let error = soon("an outcome", client.events("stock").publish("IBM", "")).await.unwrap_err();
    assert_eq!((error.kind(), &*error.conflicts()[0].argument), (ErrorKind::Conflict, "type"));
}

/// Which of two consumers got which number.
type Seen = Arc<Mutex<Vec<(bool, u32)>>>;

async fn note(Json(number): Json<u32>, State(who): State<bool>, State(seen): State<Seen>) {
    seen.lock().unwrap().push((who, number));
}

#[tokio::test]
async fn consumers_of_one_queue_share_its_events() {
    let vhost = rabbitmq::vhost().await;
    let (one, other) = (client(&vhost).await, client(&vhost).await);
    let seen: Seen = Arc::default();
    let run = |client: &Client, who: bool| {
        let subscription = client.events("work").subscribe("workers", ["job.*"]).prefetch(1);
        subscription.state(Arc::clone(&seen)).state(who).handle(note)
    };
    let publishing = async {
        declared(&one.events("work").subscribe("workers", ["job.*"])).await;
        eventually(SOON, "two consumers", async || {
            one.inspect_queue("workers").await.is_ok_and(|queue| queue.consumers == 2)
        })
        .await;
        let events = one.events("work");
        for number in 0..40u32 {
            soon("an outcome", events.publish("job.new", Json(number))).await.unwrap();
        }
        eventually(SOON, "all of them", async || seen.lock().unwrap().len() >= 40).await;
    };
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let until = |mut stopped: tokio::sync::watch::Receiver<bool>| async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    let (_, first, second) = tokio::join!(
        async {
            publishing.await;
            stop.send_replace(true);
        },
        run(&one, false).run_until(until(stopped.clone())),
        run(&other, true).run_until(until(stopped)),
    );
    assert_eq!(first.unwrap().handled + second.unwrap().handled, 40);
    let seen = seen.lock().unwrap();
    let numbers: BTreeSet<u32> = seen.iter().map(|(_, number)| *number).collect();
    assert_eq!((seen.len(), numbers.len()), (40, 40));
    assert!(seen.iter().any(|(who, _)| *who) && seen.iter().any(|(who, _)| !*who));
}

#[tokio::test]
async fn a_durable_subscription_misses_nothing_while_nobody_is_there() {
    let vhost = rabbitmq::vhost().await;
    let first = client(&vhost).await;
    let mut deliveries =
        soon("a stream", first.events("stock").subscribe("app", ["#"]).stream()).await.unwrap();
    let publisher = client(&vhost).await.events("stock");
    publish(&publisher, "a", "1").await;
    assert_eq!(keys(&mut deliveries, 1).await, ["a"]);
    drop(deliveries);
    soon("closing", first.close()).await;
    publish(&publisher, "b", "2").await;
    let again = client(&vhost).await;
    let subscription = again.events("stock").subscribe("app", ["#"]);
    let mut deliveries = soon("a stream", subscription.stream()).await.unwrap();
    assert_eq!(keys(&mut deliveries, 1).await, ["b"]);
}

#[tokio::test]
async fn one_who_listens_leaves_nothing_behind() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let stock = client.events("stock");
    let mut all = soon("a stream", stock.listen(["#"]).stream()).await.unwrap();
    let mut ibm = soon("a stream", stock.listen(["STOCK.IBM"]).stream()).await.unwrap();
    publish(&stock, "STOCK.IBM", "1").await;
    publish(&stock, "STOCK.KO", "2").await;
    assert_eq!(keys(&mut all, 2).await, ["STOCK.IBM", "STOCK.KO"]);
    assert_eq!(keys(&mut ibm, 1).await, ["STOCK.IBM"]);
    let name = client.queue_name(ibm.queue());
    assert_eq!(client.topology().queues().len(), 2);
    drop(ibm);
    eventually(SOON, "the end of the queue", async || {
        client.inspect_queue(&name).await.is_err_and(|error| error.kind() == ErrorKind::Missing)
    })
    .await;
    assert_eq!(client.topology().queues().len(), 1);
    drop(all);
    assert!(client.topology().queues().is_empty() && client.topology().bindings().is_empty());
}

#[tokio::test]
async fn one_who_listens_hears_again_after_a_reconnect() {
    let vhost = rabbitmq::vhost().await;
    let mine = client(&vhost).await;
    let mut deliveries =
        soon("a stream", mine.events("stock").listen(["STOCK.#"]).stream()).await.unwrap();
    cut(&vhost, &mine, CONSUMING).await;
    // It is read, so that it goes on.
    let stock = client(&vhost).await.events("stock");
    let publishing = async {
        loop {
            publish(&stock, "STOCK.IBM", "1").await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        heard = keys(&mut deliveries, 1) => assert_eq!(heard, ["STOCK.IBM"]),
        () = publishing => {}
    }
    until_healthy(&mine).await;
}

#[tokio::test]
async fn patterns_can_be_taken_away() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let stock = client.events("stock");
    let subscription = stock.subscribe("q", ["IBM.#", "KO.#"]);
    declared(&subscription).await;
    soon("unbinding", stock.unbind("q", ["KO.#", "never.there"])).await.unwrap();
    assert_eq!(client.topology().bindings().len(), 1);
    publish(&stock, "KO.NYSE", "").await;
    publish(&stock, "IBM.NYSE", "").await;
    until_depth(&client, "q", 1).await;
}

#[tokio::test]
async fn what_is_emitted_carries_on_group_and_trace() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let (orders, mails) = (client.events("orders"), client.events("mails"));
    let mut shipped = soon("a stream", orders.listen(["order.shipped"]).stream()).await.unwrap();
    let mut written = soon("a stream", mails.listen(["#"]).stream()).await.unwrap();
    let handler = async |body: String, emit: Emit, State(mails): State<Mails>| {
        emit.publish("order.shipped", body.clone()).await?;
        let own = Message::new(body).correlation_id("my own");
        emit.through(&mails.0).publish("mail", "a mail").await?;
        emit.publish("order.shipped", own).await
    };
    let subscription = orders.subscribe("shipping", ["order.paid"]).state(Mails(mails));
    declared(&subscription).await;
    let context = TraceContext::root();
    let group = orders.group("order 17").unwrap();
    let publishing = context.clone().scope(group.publish("order.paid", "books"));
    soon("an outcome", publishing).await.unwrap();
    let stop = async {
        let trace = |delivery: &leveret::Delivery| {
            let header = delivery.header("traceparent").expect("a trace");
            header.as_str().unwrap()[3..35].to_owned()
        };
        for expected in ["order 17", "my own"] {
            let delivery = next(&mut shipped).await;
            assert_eq!(delivery.body(), "books");
            assert_eq!(delivery.properties().correlation_id.unwrap(), expected);
            assert_eq!(trace(&delivery), context.trace_id());
            delivery.ack().unwrap();
        }
        let mail = next(&mut written).await;
        assert_eq!(mail.properties().correlation_id.unwrap(), "order 17");
        assert_eq!(
            (mail.exchange().to_string(), trace(&mail)),
            ("mails".into(), context.trace_id())
        );
        mail.ack().unwrap();
    };
    let runner = subscription.handle(handler);
    assert_eq!(soon("the end", runner.run_until(stop)).await.unwrap().handled, 1);
}

#[derive(Clone)]
struct Mails(Events);

#[tokio::test]
async fn an_event_without_a_group_is_the_group_of_what_it_leads_to() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let events = client.events("events");
    let mut second = soon("a stream", events.listen(["second"]).stream()).await.unwrap();
    let handler = async |emit: Emit| {
        assert_eq!(emit.correlation_id().unwrap(), "the first");
        emit.publish("second", "").await
    };
    let subscription = events.subscribe("q", ["first"]);
    declared(&subscription).await;
    publish(&events, "first", Message::new("").message_id("the first")).await;
    let stop = async {
        let delivery = next(&mut second).await;
        assert_eq!(delivery.properties().correlation_id.unwrap(), "the first");
        delivery.ack().unwrap();
    };
    let runner = subscription.handle(handler);
    assert_eq!(soon("the end", runner.run_until(stop)).await.unwrap().handled, 1);
}

#[tokio::test]
async fn a_failed_event_is_tried_again_for_its_subscriber_alone() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let stock = client.events("stock");
    let other = stock.subscribe("other", ["#"]);
    let policy = RetryPolicy::fixed(Duration::from_millis(50)).max_retries(2);
    let failing = stock.subscribe("failing", ["#"]).retry(policy);
    declared(&other).await;
    declared(&failing).await;
    publish(&stock, "STOCK.IBM", "1").await;
    type Try = (u32, (String, String));
    let (sender, mut tries) = mpsc::channel::<Try>(10);
    let handler = async |incoming: Incoming, State(sender): State<mpsc::Sender<Try>>| {
        let key = (incoming.exchange().to_string(), incoming.routing_key().to_string());
        let _ = sender.send((incoming.attempt(), key)).await;
        Err::<(), _>(Failure::retry("not now"))
    };
    let stop = async {
        for attempt in 1..=3 {
            let expected = (attempt, ("stock".to_owned(), "STOCK.IBM".to_owned()));
            assert_eq!(tries.recv().await.unwrap(), expected);
        }
        until_depth(&client, "failing.parked", 1).await;
    };
    let runner = failing.state(sender).handle(handler);
    let summary = soon("the end", runner.run_until(stop)).await.unwrap();
    assert_eq!((summary.failed, summary.parked), (3, 1));
    until_depth(&client, "other", 1).await;
}

#[tokio::test]
async fn what_cannot_work_is_refused() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let stock = client.events("stock");
    let nothing: [&str; 0] = [];
    for (subscription, what) in [
        (stock.subscribe("q", nothing), "no pattern"),
        (stock.subscribe("q", ["fine", "half*"]), "half a word"),
        (client.events("direct").direct().subscribe("q", ["a.*"]), "a pattern for a direct one"),
        (stock.listen([format!("{}.#", "x".repeat(255))]), "too long"),
    ] {
        let invalid =
            |error: leveret::Error| assert_eq!(error.kind(), ErrorKind::Invalid, "{what}");
        invalid(soon("a refusal", subscription.declare()).await.unwrap_err());
        invalid(soon("a refusal", subscription.clone().stream()).await.unwrap_err());
        let runner = subscription.handle(async || ());
        invalid(soon("a refusal", runner.run()).await.unwrap_err());
    }
    let error = soon("a refusal", stock.publish("STOCK.*", "")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(client.topology().is_empty(), "nothing was declared");
}

#[tokio::test]
async fn exchanges_and_queues_of_ones_own_making_do_as_well() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let lost = client.events("lost").exchange(Exchange::fanout("lost"));
    declared(&lost.subscribe_queue(Queue::classic("lost"), [""])).await;
    let stock = client.events("stock").exchange(Exchange::topic("stock").alternate("lost"));
    let queue = Queue::classic("q").max_length(1);
    let mut deliveries =
        soon("a stream", stock.subscribe_queue(queue, ["IBM"]).stream()).await.unwrap();
    publish(&stock, "KO", "nobody").await;
    publish(&stock, "IBM", "somebody").await;
    assert_eq!(next(&mut deliveries).await.body(), "somebody");
    until_depth(&client, "lost", 1).await;
}

#[tokio::test]
async fn many_at_once_go_by_the_publisher() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let stock = client.events("stock");
    declared(&stock.subscribe("q", ["tick.#"])).await;
    let publisher = soon("a publisher", stock.publisher()).await.unwrap();
    let events = (0..500).map(|number| (format!("tick.{number}"), Message::new("")));
    soon("an outcome", publisher.publish_batch(events)).await.unwrap();
    until_depth(&client, "q", 500).await;
}

/// Runs services that answer, each with its number, until the future is done.
async fn with_responders<T>(
    client: &Client,
    events: &Events,
    count: usize,
    then: impl Future<Output = T>,
) -> T {
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut running = tokio::task::JoinSet::new();
    for number in 0..count {
        let queue = format!("responder-{number}");
        let method = async |body: String, State(number): State<usize>| match body.as_str() {
            "fail" if number == 0 => Err(Failure::permanent("not me").kind("refused")),
            "silence" if number == 0 => std::future::pending().await,
            _ => Ok(format!("{body} {number}")),
        };
        let service = soon("a queue", events.respond(&queue, ["ask.#"], method)).await.unwrap();
        let mut stopped = stopped.clone();
        let service = service.state(number).drain(Duration::ZERO);
        running
            .spawn(service.run_until(async move { stopped.wait_for(|stop| *stop).await.is_ok() }));
        eventually(SOON, "a responder", async || {
            client.inspect_queue(&queue).await.is_ok_and(|queue| queue.consumers == 1)
        })
        .await;
    }
    let done = then.await;
    stop.send_replace(true);
    while let Some(ended) = soon("the end", running.join_next()).await {
        ended.unwrap().unwrap();
    }
    done
}

fn sorted(gathered: Gathered<String>) -> Vec<String> {
    assert!(gathered.errors.is_empty(), "{:?}", gathered.errors);
    let mut replies = gathered.replies;
    replies.sort();
    replies
}

#[tokio::test]
async fn answers_of_all_who_are_there_are_gathered() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let events = client.events("questions");
    let asking = async {
        // As many as there are: it need not wait for the time.
        let three = soon("answers", events.gather("ask.all", "a").within(SOON).at_most(3)).await;
        assert_eq!(sorted(three.unwrap()), ["a 0", "a 1", "a 2"]);
        // Until there are enough.
        let two = soon("answers", events.gather("ask.all", "b").within(SOON).at_most(2)).await;
        let two: Gathered<String> = two.unwrap();
        assert_eq!((two.replies.len(), two.errors.len()), (2, 0));
        // Until the time is over.
        let patience = Duration::from_secs(5);
        let some = soon("answers", events.gather("ask.all", "silence").within(patience)).await;
        assert_eq!(sorted(some.unwrap()), ["silence 1", "silence 2"]);
        // Nobody is bound to it: at once.
        let none = soon("no answers", events.gather::<String>("else", "c").within(2 * SOON)).await;
        assert!(sorted(none.unwrap()).is_empty());
    };
    with_responders(&client, &events, 3, asking).await;
}

#[tokio::test]
async fn an_error_of_one_who_answers_leaves_the_others() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let events = client.events("questions");
    let asking = async {
        let gathered = events.gather::<String>("ask", "fail").within(SOON).at_most(3);
        let Gathered { mut replies, errors } = soon("answers", gathered).await.unwrap();
        replies.sort();
        assert_eq!(replies, ["fail 1", "fail 2"]);
        let remote = errors[0].remote().expect("an error of a service");
        assert_eq!((errors.len(), &*remote.kind, &*remote.text), (1, "refused", "not me"));
        // What cannot be read is one answer, too.
        let gathered = events.gather::<Json<u32>>("ask", "text").within(SOON).at_most(3);
        let gathered = soon("answers", gathered).await.unwrap();
        let is_payload = |error: &leveret::Error| error.kind() == ErrorKind::Payload;
        assert!(gathered.errors.len() == 3 && gathered.errors.iter().all(is_payload));
    };
    with_responders(&client, &events, 3, asking).await;
}

#[tokio::test]
async fn many_questions_at_once_get_their_own_answers() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let events = client.events("questions");
    let asking = async {
        let mut questions = tokio::task::JoinSet::new();
        for number in 0..50 {
            let events = events.clone();
            questions.spawn(async move {
                let question = format!("question {number}");
                let gather = events.gather("ask", question.clone()).within(SOON).at_most(2);
                let expected = [format!("{question} 0"), format!("{question} 1")];
                assert_eq!(sorted(gather.await.unwrap()), expected);
            });
        }
        while let Some(asked) = soon("answers", questions.join_next()).await {
            asked.unwrap();
        }
    };
    with_responders(&client, &events, 2, asking).await;
}

#[tokio::test]
async fn answers_come_as_a_stream_as_well() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let events = client.events("questions");
    let asking = async {
        let gather = events.gather::<String>("ask", "s").within(SOON).at_most(2);
        let mut answers = soon("a stream", gather.stream()).await.unwrap();
        let mut seen = BTreeSet::new();
        while let Some(answer) = soon("an answer", answers.next()).await {
            seen.insert(answer.unwrap());
        }
        assert_eq!(seen, BTreeSet::from(["s 0".to_owned(), "s 1".to_owned()]));
    };
    with_responders(&client, &events, 2, asking).await;
}

#[tokio::test]
async fn handlers_of_events_hear_questions_and_do_not_answer() {
    let vhost = rabbitmq::vhost().await;
    let client = client(&vhost).await;
    let events = client.events("questions");
    let handled = events.subscribe("audit", ["ask.#"]);
    declared(&handled).await;
    let asking = async {
        let gathered = soon("answers", events.gather("ask", "q").within(SOON).at_most(1)).await;
        assert_eq!(sorted(gathered.unwrap()), ["q 0"]);
        until_depth(&client, "audit", 1).await;
    };
    with_responders(&client, &events, 1, asking).await;
}
