//! Topic exchanges: keys are words between dots; in the key of a binding, `*` stands for one word and `#` for any
//! number of them, none included.
//!
//! The keys of the bindings are a tree of words. `order.*`, `order.#` and `order.#.paid`:
//!
//! ```text
//!   root --order--> o --*--> o.*        !
//!                     --#--> o.#        !
//!                              --paid--> o.#.paid   !        ! = somebody is bound here
//! ```
//!
//! A message goes down the tree on all paths at once, one word at a time, and is routed to whom it finds where it is
//! after its last word. A node has one parent, so it is reached in one way only, unless it is a `#`: that one is reached
//! as soon as its parent is, and stays reached whatever words come. It is entered once per message, then, and what
//! comes of it is bounded by nodes times words. (Trying each length for each `#` in turn would be exponential.)

use std::cell::RefCell;
use std::hash::Hash;

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};

use super::destinations::Destinations;
use crate::Profile;
use crate::refusal::Refusal;

/// How many `#` a binding may have in 4.3.
const MAX_HASHES: usize = 2;

pub(super) fn validate(profile: Profile, key: &[u8]) -> Result<(), Refusal> {
    let hashes = words(key).filter(|word| *word == b"#").count();
    if profile < Profile::RabbitMq4_3 || hashes <= MAX_HASHES {
        return Ok(());
    }
    let key = String::from_utf8_lossy(key);
    Err(Refusal::precondition_failed(format_args!(
        "Topic binding key '{key}' uses {hashes} '#' wildcards, at most {MAX_HASHES} are allowed"
    )))
}

/// The words of a key. The empty key has none; otherwise a dot always has a word on either side, if an empty one.
fn words(key: &[u8]) -> impl Iterator<Item = &[u8]> {
    let words = (!key.is_empty()).then(|| key.split(|byte| *byte == b'.'));
    words.into_iter().flatten()
}

type NodeId = u32;
type WordId = u32;

const ROOT: NodeId = 0;

#[derive(Debug)]
pub(super) struct Topic<D> {
    nodes: Vec<Node<D>>,
    free_nodes: Vec<NodeId>,
    /// Every word that is on an edge. A message's word is looked up here once, and edges by number from then on.
    words: HashMap<Box<[u8]>, Word>,
    free_words: Vec<WordId>,
    edges: HashMap<(NodeId, WordId), NodeId>,
    /// Kept from message to message, so that routing allocates nothing.
    walk: RefCell<Walk>,
}

#[derive(Debug)]
struct Node<D> {
    /// The child for `*`.
    star: Option<NodeId>,
    /// The child for `#`.
    hash: Option<NodeId>,
    /// How many children for words there are among the edges.
    words: u32,
    destinations: Destinations<D>,
}

#[derive(Clone, Copy, Debug)]
struct Word {
    id: WordId,
    /// On how many edges.
    uses: u32,
}

/// Where a message is in the tree.
#[derive(Debug, Default)]
struct Walk {
    /// The nodes, none of them a `#`, reached with the words so far,
    here: Vec<NodeId>,
    /// and with the next one.
    next: Vec<NodeId>,
    /// The `#`s reached so far that lead further.
    hashes: Vec<NodeId>,
    /// For each node that is a `#`, the last message that reached it.
    reached_by: Vec<u64>,
    /// The number of this message.
    message: u64,
}

impl<D> Node<D> {
    fn new() -> Self {
        Node { star: None, hash: None, words: 0, destinations: Destinations::new() }
    }

    /// Whether a word leads on from here.
    fn leads_on(&self) -> bool {
        self.star.is_some() || self.words > 0
    }

    fn is_unused(&self) -> bool {
        !self.leads_on() && self.hash.is_none() && self.destinations.is_empty()
    }
}

impl<D: Copy + Eq + Hash> Topic<D> {
    pub(super) fn new() -> Self {
        Topic {
            nodes: vec![Node::new()],
            free_nodes: Vec::new(),
            words: HashMap::new(),
            free_words: Vec::new(),
            edges: HashMap::new(),
            walk: RefCell::default(),
        }
    }

    pub(super) fn add(&mut self, key: &[u8], destination: D) {
        let mut node = ROOT;
        for word in words(key) {
            node = match self.child(node, word) {
                Some(child) => child,
                None => self.grow(node, word),
            };
        }
        self.nodes[node as usize].destinations.add(destination);
    }

    pub(super) fn remove(&mut self, key: &[u8], destination: D) {
        let mut node = ROOT;
        let mut path = Vec::new();
        for word in words(key) {
            let Some(child) = self.child(node, word) else { return };
            path.push((node, word, child));
            node = child;
        }
        self.nodes[node as usize].destinations.remove(destination);
        for (parent, word, child) in path.into_iter().rev() {
            if !self.nodes[child as usize].is_unused() {
                break;
            }
            self.prune(parent, word);
            self.free_nodes.push(child);
        }
    }

    pub(super) fn route(&self, key: &[u8], found: &mut Vec<D>) {
        self.walk(key, &mut |_, node| found.extend_from_slice(node.destinations.as_slice()));
    }

    /// What several keys lead to is appended once.
    pub(super) fn route_all(&self, keys: &[&[u8]], found: &mut Vec<D>) {
        let mut seen = HashSet::new();
        for key in keys {
            self.walk(key, &mut |id, node| {
                if !node.destinations.is_empty() && seen.insert(id) {
                    found.extend_from_slice(node.destinations.as_slice());
                }
            });
        }
    }

    /// Shows all nodes that a message with this key reaches.
    #[inline]
    fn walk(&self, key: &[u8], reach: &mut impl FnMut(NodeId, &Node<D>)) {
        let walk = &mut *self.walk.borrow_mut();
        walk.begin(self.nodes.len());
        self.enter(ROOT, walk, reach);
        std::mem::swap(&mut walk.here, &mut walk.next);
        for word in words(key) {
            if walk.here.is_empty() && walk.hashes.is_empty() {
                break;
            }
            self.step(word, walk, reach);
        }
        for &node in &walk.here {
            reach(node, &self.nodes[node as usize]);
        }
    }

    /// Goes on by a word.
    fn step(&self, word: &[u8], walk: &mut Walk, reach: &mut impl FnMut(NodeId, &Node<D>)) {
        let word = self.words.get(word).map(|word| word.id);
        walk.next.clear();
        // A `#` that is reached by this word has a say from the next one on.
        let hashes = walk.hashes.len();
        for place in 0..walk.here.len() + hashes {
            let id = match place.checked_sub(hashes) {
                Some(place) => walk.here[place],
                None => walk.hashes[place],
            };
            let node = &self.nodes[id as usize];
            if let Some(star) = node.star {
                self.enter(star, walk, reach);
            }
            if node.words > 0
                && let Some(word) = word
                && let Some(&child) = self.edges.get(&(id, word))
            {
                self.enter(child, walk, reach);
            }
        }
        std::mem::swap(&mut walk.here, &mut walk.next);
    }

    /// Reaches a node that is not a `#`, and the `#`s below it, which may stand for no word.
    fn enter(&self, id: NodeId, walk: &mut Walk, reach: &mut impl FnMut(NodeId, &Node<D>)) {
        walk.next.push(id);
        let mut below = self.nodes[id as usize].hash;
        while let Some(hash) = below {
            let reached_by = &mut walk.reached_by[hash as usize];
            if *reached_by == walk.message {
                break;
            }
            *reached_by = walk.message;
            let node = &self.nodes[hash as usize];
            // It will still be reached after the last word.
            reach(hash, node);
            if node.leads_on() {
                walk.hashes.push(hash);
            }
            below = node.hash;
        }
    }

    fn child(&self, node: NodeId, word: &[u8]) -> Option<NodeId> {
        match word {
            b"*" => self.nodes[node as usize].star,
            b"#" => self.nodes[node as usize].hash,
            word => self.edges.get(&(node, self.words.get(word)?.id)).copied(),
        }
    }

    /// Makes a child.
    fn grow(&mut self, parent: NodeId, word: &[u8]) -> NodeId {
        let child = self.free_nodes.pop().unwrap_or_else(|| {
            self.nodes.push(Node::new());
            NodeId::try_from(self.nodes.len() - 1).expect("memory ends before node numbers do")
        });
        let node = &mut self.nodes[parent as usize];
        match word {
            b"*" => node.star = Some(child),
            b"#" => node.hash = Some(child),
            word => {
                node.words += 1;
                let word = self.use_word(word);
                self.edges.insert((parent, word), child);
            }
        }
        child
    }

    /// Undoes [`grow`](Self::grow).
    fn prune(&mut self, parent: NodeId, word: &[u8]) {
        let node = &mut self.nodes[parent as usize];
        match word {
            b"*" => node.star = None,
            b"#" => node.hash = None,
            word => {
                node.words -= 1;
                if let Some(word) = self.unuse_word(word) {
                    self.edges.remove(&(parent, word));
                }
            }
        }
    }

    fn use_word(&mut self, text: &[u8]) -> WordId {
        if let Some(word) = self.words.get_mut(text) {
            word.uses += 1;
            return word.id;
        }
        // All numbers given out are in use or free, so the next is how many there are.
        let next = self.words.len() as WordId;
        let id = self.free_words.pop().unwrap_or(next);
        self.words.insert(text.into(), Word { id, uses: 1 });
        id
    }

    fn unuse_word(&mut self, text: &[u8]) -> Option<WordId> {
        let word = self.words.get_mut(text)?;
        word.uses -= 1;
        let Word { id, uses } = *word;
        if uses == 0 {
            self.words.remove(text);
            self.free_words.push(id);
        }
        Some(id)
    }
}

impl Walk {
    fn begin(&mut self, nodes: usize) {
        self.message += 1;
        self.next.clear();
        self.hashes.clear();
        if self.reached_by.len() < nodes {
            self.reached_by.resize(nodes, 0);
        }
    }
}

#[cfg(test)]
impl<D> Topic<D> {
    /// Whether nothing is left of what was bound.
    pub(super) fn is_bare(&self) -> bool {
        let root_alone = self.nodes.len() - self.free_nodes.len() == 1;
        root_alone && self.nodes[0].is_unused() && self.words.is_empty() && self.edges.is_empty()
    }
}
