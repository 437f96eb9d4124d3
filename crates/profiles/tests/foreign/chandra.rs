//! A consumer and a producer by the document of Chandra.

use leveret::{Exchange, Queue};
use leveret_profiles::Chandra;
use serde_json::json;

use super::program::Program;
use crate::clients::everywhere;
use crate::{Said, WAIT, connect, consumer, counted, expected, failures, jobs, until_depth};

#[tokio::test]
async fn both_sides_share_a_queue_and_its_parking_lot() {
    everywhere(async |url| {
        let client = connect(url).await;
        let profile = Chandra::new(Exchange::topic("orders")).interval(WAIT).max_retries(3);
        let queue = Queue::new("billing").bind("orders", "order.*");
        client.apply(&profile.topology(queue).unwrap()).await.unwrap();
        let (jobs, said) = (jobs(4), Said::beside());
        let settings = json!({"interval": 40, "max_retries": 3, "publish": jobs});
        let mut theirs = Vec::new();
        let done = async {
            let program = Program::start("chandra.py", url, settings).await;
            let all = |theirs: &[String]| said.together(theirs, 1) == jobs.len() - 4;
            let program = program.until("all that can be are handled", all).await;
            until_depth(&client, "billing.parking_lot", 4).await;
            theirs = program.end().await;
        };
        let runner = consumer(&client, "billing", profile, &said);
        runner.run_until(done).await.unwrap();
        let both = said.with(&theirs);
        let deliveries = |job: &str| (failures(job) + 1).min(4);
        assert_eq!(counted(&both, "delivered "), expected(&jobs, deliveries));
    })
    .await;
}
