//! `parking`: looking, repairing, and being killed in the middle.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;

use leveret::{Client, Failure, Message, Queue, Topology};
use leveret_testkit::proxy::Cut;
use leveret_testkit::{FaultProxy, eventually};

use crate::support::{Killed, Place, Said, on_a_terminal};

const LOT: &str = "jobs.parked";

/// A lot with so many jobs; every third one failed for another reason.
async fn with_parked(place: &Place, jobs: u32) -> Client {
    let client = place.client().await;
    client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await.unwrap();
    let publisher = client.publisher("").build().await.unwrap();
    for job in 0..jobs {
        let message = Message::new(format!("job {job}")).message_id(job.to_string());
        publisher.publish("jobs", message).await.unwrap();
    }
    let handler = async |body: String| {
        let number: u32 = body.trim_start_matches("job ").parse()?;
        let (text, kind) = match number % 3 {
            0 => ("the disk is full", "disk"),
            _ => ("no such customer", "data"),
        };
        Err::<(), _>(Failure::permanent(format!("{text}: {number}")).kind(kind))
    };
    let watched = client.clone();
    let parked = async move {
        let lot = watched.parking_lot(LOT);
        eventually(Duration::from_secs(60), "all jobs in the lot", || async {
            lot.depth().await.is_ok_and(|depth| depth == u64::from(jobs))
        })
        .await;
    };
    client.consumer("jobs").prefetch(1).handle(handler).run_until(parked).await.unwrap();
    client
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lot_is_looked_into_and_stays_as_it_is() {
    let place = Place::new().await;
    let client = with_parked(&place, 7).await;
    let listed = place.run(&["parking", "list", LOT]);
    assert!(listed.err.contains("7 of 7 messages shown"), "{listed:?}");
    let listed = listed.ok();
    let lines: Vec<&str> = listed.lines().collect();
    assert!(lines[0].starts_with("#  id  queue  kind  tries  age"), "{listed}");
    assert!(
        lines[2].starts_with("2  1   jobs   data  1") && lines[2].ends_with("no such customer: 1"),
        "{listed}"
    );
    assert_eq!(lines.len(), 8);

    let of_disk =
        place.run(&["parking", "list", LOT, "--kind", "disk", "-n", "2", "--json"]).json();
    let ids: Vec<_> =
        of_disk.iter().map(|told| told["properties"]["message_id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["0", "3"]);
    assert_eq!(
        (of_disk[1]["position"].as_u64(), of_disk[1]["story"]["error"].as_str()),
        (Some(4), Some("the disk is full: 3"))
    );

    let groups = place.run(&["parking", "groups", LOT, "--json"]).json();
    let counts: Vec<_> = groups
        .iter()
        .map(|group| (group["count"].as_u64().unwrap(), group["error"].as_str().unwrap()))
        .collect();
    assert_eq!(counts, [(4, "no such customer: #"), (3, "the disk is full: #")]);
    assert!(place.run(&["parking", "groups", LOT]).ok().contains("no such customer: #"));

    let shown = place.run(&["parking", "show", LOT, "3"]).ok();
    for part in ["message 3", "failed in       jobs", "no such customer: 2", "job 2"] {
        assert!(shown.contains(part), "{part:?} is not in:\n{shown}");
    }
    assert_eq!(place.run(&["parking", "show", LOT, "--id", "5", "--raw"]).ok(), "job 5\n");
    assert_eq!(place.run(&["parking", "show", LOT, "99"]).status, 1);
    assert_eq!(client.parking_lot(LOT).depth().await.unwrap(), 7);
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_replayed_edited_moved_and_dropped() {
    let place = Place::new().await;
    let client = with_parked(&place, 9).await;
    client.apply(&Topology::new().queue(Queue::quorum("other"))).await.unwrap();

    let dry = place.run(&["parking", "replay", LOT, "--kind", "disk", "--dry-run"]).ok();
    assert_eq!(dry, "3 of 9 messages would be replayed\n");
    place.until_has(&client, "jobs", 0).await;
    let replayed =
        place.run(&["parking", "replay", LOT, "--kind", "disk", "--limit", "2", "--json"]).json();
    assert_eq!((replayed[0]["done"].as_u64(), replayed[0]["failed"].as_u64()), (Some(2), Some(0)));
    place.until_has(&client, "jobs", 2).await;

    let edit = [
        "parking",
        "edit",
        LOT,
        "--id",
        "1",
        "--body",
        "job 100",
        "--set-header",
        "fixed:=true",
        "--content-type",
        "text/plain",
    ];
    assert_eq!(place.run(&edit).ok(), "1 of 7 messages replayed\n");
    let get = ["get", "jobs", "-n", "3", "--json", "--allow-counted-returns"];
    let edited = place.run(&get).json();
    assert_eq!(
        (edited[2]["body"].as_str(), edited[2]["properties"]["content_type"].as_str()),
        (Some("job 100"), Some("text/plain"))
    );

    assert_eq!(
        place.run(&["parking", "move", LOT, "--to-queue", "other", "--limit", "1"]).ok(),
        "1 of 6 messages moved\n"
    );
    place.until_has(&client, "other", 1).await;
    let nowhere = place.run(&["parking", "move", LOT, "--to-queue", "nowhere", "--limit", "1"]);
    assert_eq!(nowhere.status, 1);
    assert!(nowhere.err.contains("stays"), "{nowhere:?}");

    let unasked = place.run(&["parking", "purge", LOT]);
    assert_eq!(unasked.status, 2);
    assert!(unasked.err.contains("--yes"), "{unasked:?}");
    assert_eq!(
        place.run(&["parking", "purge", LOT, "--yes", "--kind", "disk"]).ok(),
        "1 of 5 messages dropped\n"
    );
    place.until_has(&client, LOT, 4).await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lot_is_carried_away_and_back() {
    let place = Place::new().await;
    let client = with_parked(&place, 5).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lot.jsonl");
    let file = file.to_str().unwrap();
    assert_eq!(place.run(&["parking", "export", LOT, file]).ok(), "5 messages exported\n");
    let twice = place.run(&["parking", "export", LOT, file]);
    assert!(twice.status == 2 && twice.err.contains("choose another name"), "{twice:?}");
    let piped = place.run(&["parking", "export", LOT]).ok();
    assert_eq!(piped.lines().count(), 5);

    place.run(&["parking", "purge", LOT, "--yes"]).ok();
    assert_eq!(
        place.run(&["parking", "import", LOT, file, "--dry-run"]).ok(),
        "5 messages would be imported\n"
    );
    place.until_has(&client, LOT, 0).await;
    assert_eq!(place.run(&["parking", "import", LOT, file]).ok(), "5 messages imported\n");
    place.until_has(&client, LOT, 5).await;
    let bad = place.run_with_input(&["parking", "import", LOT], "{\"body\": \"x\"}\nnonsense\n");
    assert_eq!((bad.status, bad.out.as_str()), (1, "1 message imported\n"));
    assert!(bad.err.contains("line 2: not an exported message"), "{bad:?}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_into_a_lot_that_is_not_there_says_so_once() {
    let place = Place::new().await;
    let lines = "{\"body\": \"x\"}\n".repeat(50);
    let said = place.run_with_input(&["parking", "import", "nowhere"], &lines);
    assert_eq!((said.status, said.err.lines().count()), (1, 1), "{said:?}");
    assert!(said.err.contains("nowhere"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_that_fails_leaves_no_file_behind() {
    let place = Place::new().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lot.jsonl");
    let said = place.run(&["parking", "export", "nowhere", file.to_str().unwrap()]);
    assert_eq!(said.status, 1, "{said:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn changing_all_messages_of_a_lot_wants_consent() {
    let place = Place::new().await;
    let client = with_parked(&place, 3).await;
    for command in [&["replay", LOT][..], &["edit", LOT, "--body", "x"]] {
        let said = place.run(&[&["parking"], command].concat());
        assert!(said.status == 2 && said.err.contains("--yes"), "{said:?}");
    }
    place.until_has(&client, LOT, 3).await;
    let (shown, status) = on_a_terminal(place.program(&["parking", "replay", LOT]), "n\n");
    assert!(shown.contains("Replay all of 3 messages in \"jobs.parked\"? [y/N]"), "{shown}");
    assert_eq!(status, 1);
    // One with a filter or a limit has said which messages it means.
    place.run(&["parking", "replay", LOT, "--count", "1"]).ok();
    place.run(&["parking", "edit", LOT, "--position", "1", "--body", "job 7"]).ok();
    place.run(&["parking", "replay", LOT, "-y"]).ok();
    place.until_has(&client, "jobs", 3).await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_message_is_shown_with_the_address_it_was_published_to() {
    let place = Place::new().await;
    let client = with_parked(&place, 1).await;
    let shown = place.run(&["parking", "show", LOT, "1"]).ok();
    assert!(shown.contains("exchange        (default)\nrouting key     jobs\n"), "{shown}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_an_error_with_several_lines_the_last_one_is_listed() {
    let place = Place::new().await;
    let client = place.client().await;
    client.apply(&Topology::new().queue(Queue::quorum("jobs"))).await.unwrap();
    client.publisher("").build().await.unwrap().publish("jobs", "job").await.unwrap();
    let handler = async || {
        let trace = "Traceback (most recent call last):\n  File \"bill.py\"\nKeyError: 'total'";
        Err::<(), _>(Failure::permanent(trace))
    };
    let watched = client.clone();
    let parked = async move {
        eventually(Duration::from_secs(60), "the job in the lot", || async {
            watched.parking_lot(LOT).depth().await.is_ok_and(|depth| depth == 1)
        })
        .await;
    };
    client.consumer("jobs").handle(handler).run_until(parked).await.unwrap();
    for command in ["list", "groups"] {
        let told = place.run(&["parking", command, LOT]).ok();
        assert!(told.trim_end().ends_with("KeyError: 'total'"), "{told}");
    }
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_terminal_one_is_asked_before_messages_are_dropped() {
    let place = Place::new().await;
    let client = with_parked(&place, 3).await;
    let (shown, status) = on_a_terminal(place.program(&["parking", "purge", LOT]), "n\n");
    assert!(
        shown.contains("Drop all of 3 messages in \"jobs.parked\", for good? [y/N]"),
        "{shown}"
    );
    assert!(status == 1 && shown.contains("nothing was done"), "{status} {shown}");
    place.until_has(&client, LOT, 3).await;
    let (shown, status) = on_a_terminal(place.program(&["parking", "purge", LOT]), "y\n");
    assert!(status == 0 && shown.contains("3 of 3 messages dropped"), "{status} {shown}");
    place.until_has(&client, LOT, 0).await;
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_work_shows_a_bar_on_a_terminal_and_none_in_a_pipe() {
    let place = Place::new().await;
    let client = with_parked(&place, 60).await;
    let slowly = ["parking", "replay", LOT, "--rate", "100", "--limit", "40"];
    let (shown, status) = on_a_terminal(place.program(&slowly), "");
    assert_eq!(status, 0, "{shown}");
    assert!(shown.contains("/60 looked at"), "{shown}");
    let piped = place.run(&["parking", "replay", LOT, "--yes"]);
    assert_eq!((piped.status, piped.err.as_str()), (0, ""));
    client.close().await;
}

/// Each message is acked as soon as it is confirmed, so few are in doubt.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_replay_that_is_cut_off_says_how_many_may_have_been_sent_twice() {
    const JOBS: u64 = 60;
    let place = Place::new().await;
    let client = with_parked(&place, JOBS as u32).await;
    let address = place.url().trim_start_matches("amqp://").rsplit('@').next().unwrap();
    let proxy = FaultProxy::to(address.split('/').next().unwrap()).await;
    let mut replay = place.program(&["parking", "replay", LOT, "--rate", "40", "--yes", "--json"]);
    replay.env("LEVERET_URL", proxy.url(place.url()));
    let child = replay.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually(Duration::from_secs(60), "some that are replayed", || async {
        client.inspect_queue("jobs").await.is_ok_and(|info| info.messages >= 20)
    })
    .await;
    proxy.cut(Cut::Reset);
    let said: Said = tokio::task::block_in_place(|| child.wait_with_output()).unwrap().into();
    assert_eq!(said.status, 0, "{said:?}");
    let told = said.json().remove(0);
    assert_eq!(told["failed"], 0, "{told}");
    place.until_has(&client, LOT, 0).await;
    let arrived = u64::from(client.inspect_queue("jobs").await.unwrap().messages);
    let doubtful = told["possibly_duplicated"].as_u64().unwrap();
    assert!((JOBS..=JOBS + doubtful).contains(&arrived) && doubtful <= 10, "{arrived}: {told}");
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_or_stopped_in_the_middle_of_a_replay_it_loses_nothing() {
    const JOBS: u32 = 200;
    let place = Place::new().await;
    let client = with_parked(&place, JOBS).await;
    for signal in [rustix::process::Signal::KILL, rustix::process::Signal::INT] {
        let mut command = place.program(&["parking", "replay", LOT, "--rate", "200", "--yes"]);
        let before = client.inspect_queue("jobs").await.unwrap().messages;
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut child = Killed(child);
        eventually(Duration::from_secs(60), "some that are replayed", || async {
            client.inspect_queue("jobs").await.is_ok_and(|info| info.messages > before)
        })
        .await;
        let process = rustix::process::Pid::from_child(&child.0);
        rustix::process::kill_process(process, signal).unwrap();
        let status = child.0.wait().unwrap().code();
        let expected = (signal == rustix::process::Signal::INT).then_some(130);
        assert_eq!(status, expected);
        // The broker may still be at taking what the one that was killed has sent, and at giving back what it had out.
        // The next one is not to be taken for that: it is stopped once it is at work.
        eventually(Duration::from_secs(60), "all jobs, in one queue or the other", || async {
            let messages =
                async |queue| client.inspect_queue(queue).await.map_or(0, |info| info.messages);
            messages("jobs").await + messages(LOT).await >= JOBS
        })
        .await;
    }
    let rest: Said = place.run(&["parking", "replay", LOT, "--yes"]);
    assert_eq!(rest.status, 0, "{rest:?}");
    assert_eq!(client.parking_lot(LOT).depth().await.unwrap(), 0);
    let ids: BTreeSet<String> = place
        .run(&["get", "jobs", "-n", "1000", "--json", "--allow-counted-returns"])
        .json()
        .iter()
        .map(|told| told["properties"]["message_id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(ids.len() as u32, JOBS);
    client.close().await;
}
