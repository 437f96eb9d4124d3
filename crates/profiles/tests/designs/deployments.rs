use leveret::QueueType;

use crate::{deployments, lines};

#[test]
fn a_profile_that_is_told_all_names_declares_what_other_programs_have_declared() {
    for queue_type in [QueueType::Classic, QueueType::Quorum] {
        for deployment in deployments::all(queue_type) {
            assert_eq!(lines(&deployment.ours), lines(&deployment.there), "{}", deployment.design);
        }
    }
}
