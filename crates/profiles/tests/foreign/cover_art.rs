//! A worker of the Cover Art Archive's indexer.

use leveret_profiles::CoverArt;
use serde_json::json;

use super::program::Program;
use crate::clients::everywhere;
use crate::{Said, WAIT, connect, consumer, counted, expected, failures, jobs, until_depth};

#[tokio::test]
async fn both_sides_count_the_same_retries_down() {
    everywhere(async |url| {
        let client = connect(url).await;
        let profile = CoverArt::new().name("caa").interval(WAIT);
        client.apply(&profile.topology().unwrap()).await.unwrap();
        let (jobs, said) = (jobs(10), Said::beside());
        let settings = json!({"name": "caa", "interval": 40, "publish": jobs});
        let mut theirs = Vec::new();
        let done = async {
            let program = Program::start("cover_art.py", url, settings).await;
            let all = |theirs: &[String]| said.together(theirs, 1) == jobs.len() - 10;
            let program = program.until("all that can be are handled", all).await;
            until_depth(&client, "caa.failed", 10).await;
            theirs = program.end().await;
        };
        let runner = consumer(&client, "caa.index", profile, &said);
        runner.run_until(done).await.unwrap();
        let both = said.with(&theirs);
        let deliveries = |job: &str| (failures(job) + 1).min(5);
        assert_eq!(counted(&both, "delivered "), expected(&jobs, deliveries));
    })
    .await;
}
