//! Futures that run beside each other in one task: each is polled when it was woken, and not otherwise.
//!
//! Unlike `FuturesUnordered`, it does not wake its own task after it has polled all of them, for which tokio would wake another
//! thread; and a place is used again, with its memory and its waker, so that one more future costs no allocation.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use crate::amqp::lock;

/// The futures, each in a place.
pub(super) struct Beside<F> {
    places: Vec<Place<F>>,
    free: Vec<usize>,
    /// The places to poll before anybody asks who was woken meanwhile.
    round: VecDeque<usize>,
    woken: Arc<Woken>,
}

struct Place<F> {
    future: Pin<Box<Option<F>>>,
    bell: Arc<Bell>,
    waker: Waker,
}

/// Who was woken since somebody looked.
#[derive(Default)]
struct Woken(Mutex<List>);

#[derive(Default)]
struct List {
    places: VecDeque<usize>,
    /// The task that all of them are polled in.
    task: Option<Waker>,
}

/// Wakes one place.
struct Bell {
    place: usize,
    /// The place is on the list or in the round, once, and is going to be polled.
    has_rung: AtomicBool,
    woken: Arc<Woken>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.has_rung.swap(true, Ordering::AcqRel) {
            return;
        }
        let task = {
            let mut list = lock(&self.woken.0);
            list.places.push_back(self.place);
            list.task.take()
        };
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl<F: Future> Beside<F> {
    pub(super) fn new() -> Self {
        let (round, woken) = (VecDeque::new(), Arc::default());
        Beside { places: Vec::new(), free: Vec::new(), round, woken }
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Takes in one more. It is polled when somebody waits for the [next](Self::poll_next) to be done.
    pub(super) fn push(&mut self, future: F) {
        let place = match self.free.pop() {
            Some(place) => {
                self.places[place].future.set(Some(future));
                place
            }
            None => {
                let place = self.places.len();
                let woken = Arc::clone(&self.woken);
                let bell = Arc::new(Bell { place, has_rung: AtomicBool::new(false), woken });
                let waker = Waker::from(Arc::clone(&bell));
                self.places.push(Place { future: Box::pin(Some(future)), bell, waker });
                place
            }
        };
        // One who was there before may have been woken too late.
        if !self.places[place].bell.has_rung.swap(true, Ordering::AcqRel) {
            self.round.push_back(place);
        }
    }

    /// Takes out those that are not done.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Pin<Box<Option<F>>>> {
        self.free.clear();
        self.round.clear();
        self.places.drain(..).map(|place| place.future).filter(|future| future.is_some())
    }

    /// What one of them gave; `None` if there is none.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<F::Output>> {
        if self.len() == 0 {
            return Poll::Ready(None);
        }
        self.look_who_was_woken(context);
        while let Some(place) = self.round.pop_front() {
            if let Poll::Ready(output) = self.places[place].poll() {
                self.places[place].future.set(None);
                self.free.push(place);
                return Poll::Ready(Some(output));
            }
        }
        Poll::Pending
    }

    /// Whoever is woken after this wakes the task, and has its turn when that is polled again: one that wakes itself does not
    /// keep the others waiting.
    fn look_who_was_woken(&mut self, context: &Context<'_>) {
        let mut list = lock(&self.woken.0);
        self.round.append(&mut list.places);
        match &mut list.task {
            Some(task) => task.clone_from(context.waker()),
            None => list.task = Some(context.waker().clone()),
        }
    }
}

impl<F: Future> Place<F> {
    fn poll(&mut self) -> Poll<F::Output> {
        // Before it is polled: whoever wakes it from here on has something new for it. Not by a mere store, which a processor may
        // let wait until the future has looked for that in vain, while the one who has it finds the bell rung already.
        self.bell.has_rung.swap(false, Ordering::AcqRel);
        match self.future.as_mut().as_pin_mut() {
            Some(future) => future.poll(&mut Context::from_waker(&self.waker)),
            // Woken by what it had left behind, after it was done.
            None => Poll::Pending,
        }
    }
}

impl<F> Drop for Beside<F> {
    fn drop(&mut self) {
        // Whoever keeps one of the wakers does not keep the task.
        lock(&self.woken.0).task = None;
    }
}

impl<F> fmt::Debug for Beside<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Beside").field("places", &self.places.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;

    /// Counts how often its task is woken.
    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll<F: Future>(beside: &mut Beside<F>, task: &Arc<Task>) -> Poll<Option<F::Output>> {
        beside.poll_next(&mut Context::from_waker(&Waker::from(Arc::clone(task))))
    }

    fn wakes(task: &Task) -> usize {
        task.0.load(Ordering::Relaxed)
    }

    #[test]
    fn they_are_done_in_the_order_in_which_they_are_woken() {
        let (mut beside, task) = (Beside::new(), Arc::new(Task::default()));
        assert_eq!(poll(&mut beside, &task), Poll::Ready(None));
        let mut senders: Vec<_> = (0..3)
            .map(|_| {
                let (sender, receiver) = oneshot::channel();
                beside.push(receiver);
                sender
            })
            .collect();
        assert!(poll(&mut beside, &task).is_pending());
        // Nobody has woken the task: there is nothing to do.
        assert_eq!((beside.len(), wakes(&task)), (3, 0));
        for number in [2, 0, 1] {
            let index = usize::from(number == 2 && senders.len() == 3) * 2;
            senders.remove(index).send(number).unwrap();
        }
        // Once for all three.
        assert_eq!(wakes(&task), 1);
        for number in [2, 0, 1] {
            assert_eq!(poll(&mut beside, &task), Poll::Ready(Some(Ok(number))));
        }
        assert_eq!(poll(&mut beside, &task), Poll::Ready(None));
    }

    #[test]
    fn a_place_is_used_again_and_late_wakers_do_no_harm() {
        let (mut beside, task) = (Beside::new(), Arc::new(Task::default()));
        let kept: Arc<Mutex<Option<Waker>>> = Arc::default();
        let (keep, mut polls) = (Arc::clone(&kept), 0);
        beside.push(Box::pin(poll_fn(move |context| {
            *lock(&keep) = Some(context.waker().clone());
            polls += 1;
            if polls == 2 { Poll::Ready(()) } else { Poll::Pending }
        })) as Pin<Box<dyn Future<Output = ()>>>);
        assert!(poll(&mut beside, &task).is_pending());
        let waker = lock(&kept).clone().unwrap();
        waker.wake_by_ref();
        assert_eq!(poll(&mut beside, &task), Poll::Ready(Some(())));
        assert_eq!(beside.len(), 0);
        // It wakes a place where nobody is, and then one where somebody else is.
        waker.wake_by_ref();
        assert_eq!(poll(&mut beside, &task), Poll::Ready(None));
        beside.push(Box::pin(std::future::pending()));
        assert_eq!(beside.places.len(), 1);
        assert!(poll(&mut beside, &task).is_pending());
        waker.wake_by_ref();
        assert!(poll(&mut beside, &task).is_pending());
        assert_eq!(beside.len(), 1);
    }

    #[test]
    fn one_that_wakes_itself_lets_others_have_their_turn() {
        let (mut beside, task) = (Beside::new(), Arc::new(Task::default()));
        beside.push(Box::pin(poll_fn(|context| {
            context.waker().wake_by_ref();
            Poll::<&str>::Pending
        })) as Pin<Box<dyn Future<Output = &str>>>);
        beside.push(Box::pin(std::future::ready("done")));
        assert_eq!(poll(&mut beside, &task), Poll::Ready(Some("done")));
        for polls in 2..5 {
            assert!(poll(&mut beside, &task).is_pending());
            // The task is to be polled again, and is not kept here.
            assert_eq!(wakes(&task), polls);
        }
    }

    #[test]
    fn those_who_are_done_at_once_leave_nothing_behind() {
        let (mut beside, task) = (Beside::new(), Arc::new(Task::default()));
        for _ in 0..1000 {
            beside.push(poll_fn(|context| {
                context.waker().wake_by_ref();
                Poll::Ready(())
            }));
            assert_eq!(poll(&mut beside, &task), Poll::Ready(Some(())));
        }
        assert!(beside.places.len() == 1 && beside.round.len() <= 1, "{beside:?}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nobody_is_forgotten_when_others_wake_them_from_other_threads() {
        let mut beside = Beside::new();
        let (mut begun, mut sum) = (0u64, 0);
        while begun < 20_000 || beside.len() > 0 {
            while begun < 20_000 && beside.len() < 50 {
                let (sender, receiver) = oneshot::channel();
                let number = begun;
                tokio::spawn(async move {
                    tokio::task::yield_now().await;
                    sender.send(number)
                });
                beside.push(receiver);
                begun += 1;
            }
            let next = poll_fn(|context| beside.poll_next(context));
            let next = timeout(Duration::from_secs(60), next).await.expect("somebody is forgotten");
            sum += next.unwrap().unwrap();
        }
        assert_eq!(sum, 20_000 * 19_999 / 2);
    }
}
