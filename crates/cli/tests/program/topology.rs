//! `topology`.

use std::fs;

use leveret::{Exchange, Queue, Topology};
use leveret_profiles::Chandra;

use crate::support::{Place, leveret};

const FILE: &str = r#"
[[exchange]]
name = "orders"
type = "topic"

[[queue]]
name = "billing"
type = "quorum"
dead-letter-exchange = "failed"
bind = [{ exchange = "orders", key = "order.*" }]

[[queue]]
name = "audit"
type = "classic"
message-ttl = "30s"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_tells_what_is_new_the_same_and_in_conflict_and_touches_nothing() {
    let place = Place::new().await;
    let client = place.client().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("topology.toml");
    fs::write(&path, FILE).unwrap();
    let file = path.to_str().unwrap();

    let expected = "create    exchange \"orders\"\ncreate    queue \"billing\"\ncreate    queue \"audit\"\ncreate    ";
    let planned = place.run(&["topology", "plan", file]).ok();
    assert!(planned.starts_with(expected), "{planned}");
    assert!(client.inspect_queue("billing").await.is_err());
    let dry = place.run(&["topology", "apply", file, "--dry-run"]).ok();
    assert_eq!(dry, planned);
    assert!(client.inspect_queue("billing").await.is_err());

    place.run(&["topology", "apply", file]).ok();
    let again = place.run(&["topology", "plan", file, "--json"]).json();
    let changes: Vec<_> = again.iter().map(|step| step["change"].as_str().unwrap()).collect();
    assert_eq!(changes, ["same", "same", "same", "bind"]);

    fs::write(&path, FILE.replace("30s", "60s") + "[[queue]]\nname = \"new\"\n").unwrap();
    let conflict = place.run(&["topology", "apply", file]);
    assert_eq!(conflict.status, 1);
    let line = "conflict  queue \"audit\": the broker has it with x-message-ttl = 30000, this topology wants x-message-ttl = 60000";
    assert!(conflict.out.contains(line), "{conflict:?}");
    assert!(conflict.err.contains("nothing was"), "{conflict:?}");
    assert!(
        client.inspect_queue("new").await.is_err(),
        "nothing is declared if something is in conflict"
    );
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_belongs_to_another_connection_is_refused() {
    let place = Place::new().await;
    let client = place.client().await;
    client
        .apply(&Topology::new().queue(Queue::classic("audit").exclusive().transient()))
        .await
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("topology.toml");
    fs::write(&path, FILE).unwrap();
    let said = place.run(&["topology", "plan", path.to_str().unwrap(), "--json"]);
    assert_eq!(said.status, 1, "{said:?}");
    let refused = said.out.lines().find(|line| line.contains("audit")).unwrap();
    assert!(refused.contains("refused") && refused.contains("RESOURCE_LOCKED"), "{refused}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_binding_to_an_exchange_that_is_nowhere_is_planned_as_refused() {
    let place = Place::new().await;
    let client = place.client().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("topology.toml");
    let text = "[[queue]]\nname = \"new\"\nbindings = [{ exchange = \"nowhere\", key = \"k\" }]\n";
    fs::write(&path, text).unwrap();
    let said = place.run(&["topology", "apply", path.to_str().unwrap()]);
    assert_eq!(said.status, 1, "{said:?}");
    assert!(said.out.contains("there is no exchange \"nowhere\""), "{said:?}");
    assert!(!said.err.contains("never changes an existing object"), "{said:?}");
    assert!(
        client.inspect_queue("new").await.is_err(),
        "nothing is declared if something is refused"
    );
    client.close().await;
}

#[test]
fn two_queues_of_one_name_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("topology.toml");
    fs::write(&path, "[[queue]]\nname = \"q\"\n[[queue]]\nname = \"q\"\ntype = \"quorum\"\n")
        .unwrap();
    let said = leveret(&["topology", "graph", path.to_str().unwrap()]);
    assert_eq!(said.status, 2, "{said:?}");
    assert!(said.err.contains("queue \"q\" is described twice"), "{said:?}");
}

#[test]
fn a_picture_needs_no_broker() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("topology.toml");
    fs::write(&path, FILE).unwrap();
    let mermaid = leveret(&["topology", "graph", path.to_str().unwrap()]).ok();
    assert!(mermaid.starts_with("flowchart LR\n") && mermaid.contains("order.*"), "{mermaid}");
    let svg = folder.path().join("topology.svg");
    leveret(&[
        "topology",
        "graph",
        path.to_str().unwrap(),
        "--format",
        "svg",
        "-o",
        svg.to_str().unwrap(),
    ])
    .ok();
    assert!(fs::read_to_string(svg).unwrap().contains("dead letters"));
    fs::write(&path, "[[queue]]\nname = \"q\"\ntype = \"quorom\"").unwrap();
    let wrong = leveret(&["topology", "graph", path.to_str().unwrap()]);
    assert_eq!(wrong.status, 2);
    for part in ["line 3", "quorom", "quorum"] {
        assert!(wrong.err.contains(part), "{part} is not in {wrong:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_deleted_with_all_that_belongs_to_it_unless_messages_are_in_it() {
    let (place, client) = Place::with(Topology::new().queue(Queue::quorum("jobs"))).await;
    client.publisher("").build().await.unwrap().publish("jobs", "job").await.unwrap();
    let runner =
        client.consumer("jobs").handle(async || Err::<(), _>(leveret::Failure::permanent("never")));
    runner.run_until(place.until_has(&client, "jobs.parked", 1)).await.unwrap();
    client.close().await;
    let delete = |options: &[&str]| place.run(&[&["topology", "delete", "jobs"], options].concat());

    let refused = delete(&[]);
    assert_ne!(refused.status, 0, "{refused:?}");
    assert!(refused.err.contains("\"jobs.parked\" has 1 message"), "{refused:?}");
    assert!(refused.err.contains("Nothing was deleted"), "{refused:?}");
    let dry = delete(&["--dry-run"]).ok();
    assert!(dry.contains("would delete queue \"jobs.parked\": 1 message, 0 consumers"), "{dry}");

    let client = place.client().await;
    client.purge_queue("jobs.parked").await.unwrap();
    let objects = delete(&["--dry-run", "--json"]).json();
    assert_eq!(objects.len(), 15, "{objects:?}");
    let deleted = delete(&[]).ok();
    for object in ["queue \"jobs\"", "queue \"jobs.wait.5m\"", "exchange \"jobs.return\""] {
        assert!(deleted.contains(&format!("deleted {object}\n")), "{deleted}");
    }
    assert!(deleted.ends_with("15 objects deleted\n"), "{deleted}");
    assert!(client.inspect_queue("jobs").await.is_err());
    assert_eq!(delete(&[]).ok(), "nothing belongs to queue \"jobs\" on this broker\n");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_with_names_of_its_own_is_deleted_by_the_file_of_its_consumer() {
    let retry = Chandra::new(Exchange::topic("orders"))
        .dead_letter_exchange("dead")
        .retry_queue("billing-wait")
        .parking_queue("graveyard");
    let (place, client) = Place::with(retry.topology(Queue::quorum("billing")).unwrap()).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.toml");
    let names = r#"{ dead-letter-exchange = "dead", retry-queue = "billing-wait", parking-queue = "graveyard" }"#;
    let retry = format!(r#"{{ profile = "chandra", exchange = "orders", names = {names} }}"#);
    let text =
        format!("[[consumer]]\nqueue = \"billing\"\ncommand = [\"true\"]\nretry = {retry}\n");
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let deleted = place.run(&["topology", "delete", "billing", "--file", file]).ok();
    for queue in ["billing", "billing-wait", "graveyard"] {
        assert!(deleted.contains(&format!("deleted queue {queue:?}\n")), "{deleted}");
        assert!(client.inspect_queue(queue).await.is_err());
    }
    assert!(deleted.contains("deleted exchange \"dead\"\n"), "{deleted}");
    let missing = place.run(&["topology", "delete", "other", "--file", file]);
    assert!(missing.status == 2 && missing.err.contains("no [[consumer]]"), "{missing:?}");
    client.close().await;
}
