//! What has come of the transfers, by what the bank has sent.

use std::collections::HashMap;

use leveret::{Client, Delivery};
use tokio::sync::Mutex;

use super::clerk::Receipt;

/// The octets of a message.
type Image = (Vec<u8>, Vec<u8>);

#[derive(Default)]
pub(super) struct Books {
    /// To each request: the reply, and how often it came.
    replies: Mutex<HashMap<usize, (Image, usize)>>,
    receipts: Mutex<Receipts>,
}

#[derive(Default)]
struct Receipts {
    /// Of each account, in order.
    accounts: HashMap<i32, Vec<Receipt>>,
    repeated: usize,
}

impl Books {
    /// How many requests have a reply.
    pub(super) async fn replies(&self) -> usize {
        self.replies.lock().await.len()
    }

    /// Those without a reply.
    pub(super) async fn missing(&self, requests: usize) -> Vec<usize> {
        let replies = self.replies.lock().await;
        (0..requests).filter(|number| !replies.contains_key(number)).collect()
    }

    pub(super) async fn receipts(&self) -> usize {
        self.receipts.lock().await.accounts.values().map(Vec::len).sum()
    }

    /// How many replies came again, and how many receipts.
    pub(super) async fn repeated(&self) -> (usize, usize) {
        let replies = self.replies.lock().await.values().map(|(_, count)| count - 1).sum();
        (replies, self.receipts.lock().await.repeated)
    }

    /// All replies to a request have to be the same.
    pub(super) async fn read_replies(&self, client: &Client) {
        let mut stream = client.consumer("answers").prefetch(1000).stream().await.unwrap();
        while let Some(delivery) = stream.next().await {
            let delivery: Delivery = delivery.unwrap();
            let number = delivery.properties().correlation_id.unwrap().to_string().parse().unwrap();
            let image = (delivery.raw_properties().as_bytes().to_vec(), delivery.body().to_vec());
            let mut replies = self.replies.lock().await;
            let (first, count) = replies.entry(number).or_insert_with(|| (image.clone(), 0));
            assert_eq!(*first, image, "replies to request {number}");
            *count += 1;
            drop(replies);
            // What cannot be acked any more comes again, and is the same.
            let _ = delivery.ack();
        }
    }

    /// Those of an account come in order, and the same as before if they come again.
    pub(super) async fn read_receipts(&self, client: &Client) {
        let mut stream = client.consumer("receipts").prefetch(1000).stream().await.unwrap();
        while let Some(delivery) = stream.next().await {
            let delivery: Delivery = delivery.unwrap();
            let receipt: Receipt = serde_json::from_slice(delivery.body()).unwrap();
            let mut receipts = self.receipts.lock().await;
            let known = receipts.accounts.entry(receipt.account).or_default();
            match known.get(receipt.place as usize - 1) {
                Some(before) => {
                    assert_eq!(*before, receipt);
                    receipts.repeated += 1;
                }
                None => {
                    assert_eq!(known.len() + 1, receipt.place as usize, "the next: {receipt:?}");
                    known.push(receipt);
                }
            }
            drop(receipts);
            let _ = delivery.ack();
        }
    }

    /// What each account was told at last: how often it has changed, and what is on it.
    pub(super) async fn told(&self, account: i32) -> Option<(i64, i64)> {
        let receipts = self.receipts.lock().await;
        let last = receipts.accounts.get(&account).and_then(|told| told.last());
        last.map(|receipt| (receipt.place, receipt.balance))
    }

    /// How many receipts there are for each transfer.
    pub(super) async fn of_transfers(&self, transfers: usize) -> Vec<usize> {
        let mut found = vec![0; transfers];
        for receipt in self.receipts.lock().await.accounts.values().flatten() {
            found[receipt.transfer] += 1;
        }
        found
    }
}
