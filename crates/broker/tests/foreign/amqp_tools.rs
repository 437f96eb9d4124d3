//! The command-line tools of rabbitmq-c, a client in C, are served by the embedded broker as by RabbitMQ.

use tokio::process::Command;

use super::clients::{everywhere, run, succeed, text};

/// One of the tools, told where the broker is.
fn tool(name: &str, url: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(name);
    command.arg("--url").arg(url).args(arguments);
    command
}

#[tokio::test]
async fn a_queue_is_declared_filled_emptied_and_deleted() {
    everywhere(async |url| {
        let declared = tool("amqp-declare-queue", url, &["--queue", "q", "--durable"]);
        assert_eq!(succeed(&mut { declared }).await.trim(), "q");
        for body in ["one", "two"] {
            let publish =
                ["--routing-key", "q", "--body", body, "--persistent", "--header", "a: b"];
            succeed(&mut tool("amqp-publish", url, &publish)).await;
        }
        for body in ["one", "two"] {
            let got = succeed(&mut tool("amqp-get", url, &["--queue", "q"])).await;
            assert_eq!(got, body);
        }
        let nothing = run(&mut tool("amqp-get", url, &["--queue", "q"])).await;
        assert_eq!(nothing.status.code(), Some(2), "an empty queue");
        succeed(&mut tool("amqp-publish", url, &["--routing-key", "q", "--body", "left"])).await;
        let deleted = succeed(&mut tool("amqp-delete-queue", url, &["--queue", "q"])).await;
        assert_eq!(deleted.trim(), "1", "messages that went with the queue");
    })
    .await;
}

#[tokio::test]
async fn a_consumer_takes_as_many_as_it_was_told_and_leaves_the_rest() {
    everywhere(async |url| {
        succeed(&mut tool("amqp-declare-queue", url, &["--queue", "q", "--durable"])).await;
        for body in ["1", "2", "3"] {
            succeed(&mut tool("amqp-publish", url, &["--routing-key", "q", "--body", body])).await;
        }
        let take = ["--queue", "q", "--count", "2", "--prefetch-count", "1", "cat"];
        assert_eq!(succeed(&mut tool("amqp-consume", url, &take)).await, "12");
        let take = ["--queue", "q", "--count", "1", "cat"];
        assert_eq!(succeed(&mut tool("amqp-consume", url, &take)).await, "3");
    })
    .await;
}

#[tokio::test]
async fn a_consumer_binds_a_queue_of_its_own_and_takes_without_acks() {
    everywhere(async |url| {
        let bind = ["--exclusive", "--queue", "own", "--exchange", "amq.topic"];
        let take = ["--routing-key", "order.#", "--no-ack", "--count", "1", "cat"];
        let mut consume = tool("amqp-consume", url, &[&bind[..], &take[..]].concat());
        let publish = async {
            // Only the consumer can tell when it has bound its queue; until then, all this is lost.
            loop {
                let to = ["--exchange", "amq.topic", "--routing-key", "order.new", "--body", "x"];
                succeed(&mut tool("amqp-publish", url, &to)).await;
            }
        };
        let taken = tokio::select! {
            taken = succeed(&mut consume) => taken,
            () = publish => unreachable!("it goes on for ever"),
        };
        assert_eq!(taken, "x");
    })
    .await;
}

#[tokio::test]
async fn a_refusal_is_told_with_its_code_and_text() {
    everywhere(async |url| {
        let refused = run(&mut tool("amqp-get", url, &["--queue", "nowhere"])).await;
        let said = text(&refused.stderr);
        assert!(!refused.status.success());
        assert!(said.contains("server channel error 404"), "{said}");
        assert!(said.contains("NOT_FOUND - no queue 'nowhere' in vhost"), "{said}");

        succeed(&mut tool("amqp-declare-queue", url, &["--queue", "q", "--durable"])).await;
        let consume = ["--queue", "q", "--exclusive", "cat"];
        let refused = run(&mut tool("amqp-consume", url, &consume)).await;
        let said = text(&refused.stderr);
        assert!(said.contains("server channel error 405"), "{said}");
        assert!(said.contains("RESOURCE_LOCKED - cannot obtain exclusive access"), "{said}");

        let wrong = url.replace("guest:guest@", "guest:wrong@");
        let refused = run(&mut tool("amqp-get", &wrong, &["--queue", "q"])).await;
        let said = text(&refused.stderr);
        assert!(said.contains("server connection error 403"), "{said}");
        assert!(said.contains("ACCESS_REFUSED - Login was refused"), "{said}");
    })
    .await;
}

#[tokio::test]
async fn a_body_of_many_frames_comes_out_as_it_went_in() {
    everywhere(async |url| {
        succeed(&mut tool("amqp-declare-queue", url, &["--queue", "q", "--durable"])).await;
        // More would not fit on a command line. The tools agree on frames of 128 KiB.
        let body: String = (0..130_000).map(|n| char::from(b'a' + (n % 26) as u8)).collect();
        succeed(&mut tool("amqp-publish", url, &["--routing-key", "q", "--body", &body])).await;
        let got = succeed(&mut tool("amqp-get", url, &["--queue", "q"])).await;
        assert!(got == body, "{} bytes came out", got.len());
    })
    .await;
}
