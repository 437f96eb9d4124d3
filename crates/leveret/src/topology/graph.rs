//! Topologies as pictures: what is routed where, and where messages go that die.

mod layout;
mod svg;

use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::time::Duration;

use super::{Destination, Queue, Topology};
use crate::duration;

/// What is drawn: a topology, and what it only mentions.
#[derive(Debug)]
struct Graph {
    nodes: Vec<Node>,
    edges: Vec<Edge>,
}

#[derive(Debug, PartialEq)]
struct Node {
    kind: NodeKind,
    name: String,
    /// What kind it is, and what matters about it.
    note: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum NodeKind {
    Exchange,
    Queue,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Edge {
    from: usize,
    to: usize,
    label: String,
    kind: EdgeKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum EdgeKind {
    Binding,
    DeadLetter,
    Alternate,
}

impl Topology {
    /// As a flowchart of [Mermaid](https://mermaid.js.org): exchanges, queues, bindings, and where dead letters go.
    ///
    /// ```
    /// use leveret::{Exchange, Queue, Topology};
    ///
    /// let topology = Topology::new()
    ///     .exchange(Exchange::topic("orders"))
    ///     .queue(Queue::quorum("billing").bind("orders", "order.*"));
    /// assert!(topology.to_mermaid().contains(r#"e0 -- "order.*" --> q1"#));
    /// ```
    pub fn to_mermaid(&self) -> String {
        let graph = Graph::of(self);
        let mut text = "flowchart LR\n".to_owned();
        // Writing to a text does not fail.
        for (index, node) in graph.nodes.iter().enumerate() {
            let (name, note) = (quoted(&node.name), quoted(&node.note));
            let _ = match node.kind {
                NodeKind::Exchange => writeln!(text, "  e{index}([\"{name}<br/><i>{note}</i>\"])"),
                NodeKind::Queue => writeln!(text, "  q{index}[\"{name}<br/><i>{note}</i>\"]"),
            };
        }
        for edge in &graph.edges {
            let (from, to) = (graph.id(edge.from), graph.id(edge.to));
            let (begin, end) = match edge.kind {
                EdgeKind::Binding => ("--", "-->"),
                EdgeKind::DeadLetter | EdgeKind::Alternate => ("-.", ".->"),
            };
            let _ = match edge.text().as_str() {
                "" => writeln!(text, "  {from} {end} {to}"),
                label => writeln!(text, "  {from} {begin} \"{}\" {end} {to}", quoted(label)),
            };
        }
        text
    }

    /// As a picture, in SVG.
    pub fn to_svg(&self) -> String {
        svg::draw(&Graph::of(self))
    }
}

/// Mermaid knows the entities of HTML, and no other way to write a quote.
fn quoted(text: &str) -> String {
    let mut quoted = String::new();
    for c in text.chars() {
        match c {
            '"' | '#' | '<' | '>' | '&' | '`' | '\\' => {
                let _ = write!(quoted, "#{};", u32::from(c));
            }
            c if c.is_control() => quoted.push(' '),
            c => quoted.push(c),
        }
    }
    quoted
}

impl Graph {
    fn of(topology: &Topology) -> Graph {
        let mut graph = Building::default();
        for exchange in topology.exchanges() {
            graph.describe(
                NodeKind::Exchange,
                exchange.name(),
                exchange.kind().as_str().to_owned(),
            );
        }
        for queue in topology.queues() {
            graph.describe(NodeKind::Queue, queue.name(), note_of(queue));
        }
        for binding in topology.bindings() {
            let from = graph.node(NodeKind::Exchange, binding.source());
            let to = match binding.destination() {
                Destination::Queue(name) => graph.node(NodeKind::Queue, name),
                Destination::Exchange(name) => graph.node(NodeKind::Exchange, name),
            };
            graph.edge(from, to, binding.routing_key(), EdgeKind::Binding);
        }
        for exchange in topology.exchanges() {
            let alternate = exchange.arguments().find(|(name, _)| *name == "alternate-exchange");
            if let Some(alternate) = alternate.and_then(|(_, value)| value.as_str()) {
                let from = graph.node(NodeKind::Exchange, exchange.name());
                let to = graph.node(NodeKind::Exchange, alternate);
                graph.edge(from, to, "", EdgeKind::Alternate);
            }
        }
        for queue in topology.queues() {
            graph.dead_letters(queue);
        }
        Graph { nodes: graph.nodes, edges: graph.edges }
    }

    fn id(&self, index: usize) -> String {
        match self.nodes[index].kind {
            NodeKind::Exchange => format!("e{index}"),
            NodeKind::Queue => format!("q{index}"),
        }
    }
}

impl Edge {
    /// What stands beside it.
    fn text(&self) -> String {
        let what = match self.kind {
            EdgeKind::Binding => return self.label.clone(),
            EdgeKind::DeadLetter => "dead letters",
            EdgeKind::Alternate => "unroutable",
        };
        match self.label.as_str() {
            "" => what.to_owned(),
            key => format!("{what}: {key}"),
        }
    }
}

#[derive(Default)]
struct Building {
    nodes: Vec<Node>,
    edges: Vec<Edge>,
    known: HashMap<(NodeKind, String), usize>,
    drawn: HashSet<Edge>,
}

impl Building {
    fn node(&mut self, kind: NodeKind, name: &str) -> usize {
        // It is mentioned, and not part of the topology.
        self.describe(kind, name, "elsewhere".to_owned())
    }

    fn describe(&mut self, kind: NodeKind, name: &str, note: String) -> usize {
        let next = self.nodes.len();
        let index = *self.known.entry((kind, name.to_owned())).or_insert(next);
        if index == next {
            self.nodes.push(Node { kind, name: name.to_owned(), note });
        }
        index
    }

    fn edge(&mut self, from: usize, to: usize, label: &str, kind: EdgeKind) {
        let edge = Edge { from, to, label: label.to_owned(), kind };
        if self.drawn.insert(edge.clone()) {
            self.edges.push(edge);
        }
    }

    fn dead_letters(&mut self, queue: &Queue) {
        let text = |name: &str| {
            let argument = queue.arguments().find(|(known, _)| *known == name);
            argument.and_then(|(_, value)| value.as_str())
        };
        let Some(exchange) = text("x-dead-letter-exchange") else { return };
        let key = text("x-dead-letter-routing-key");
        let from = self.node(NodeKind::Queue, queue.name());
        let (to, label) = match (exchange, key) {
            // The default exchange leads to the queue that the key names.
            ("", key) => (self.node(NodeKind::Queue, key.unwrap_or(queue.name())), ""),
            (exchange, key) => (self.node(NodeKind::Exchange, exchange), key.unwrap_or("")),
        };
        self.edge(from, to, label, EdgeKind::DeadLetter);
    }
}

/// The type of a queue, and for how long messages stay.
fn note_of(queue: &Queue) -> String {
    let number = |name: &str| {
        let argument = queue.arguments().find(|(known, _)| *known == name);
        argument.and_then(|(_, value)| value.as_i64())
    };
    let mut note = match queue.queue_type() {
        Some(kind) => kind.as_str().to_owned(),
        None => "queue".to_owned(),
    };
    if let Some(ttl) = number("x-message-ttl") {
        let ttl = Duration::from_millis(u64::try_from(ttl).unwrap_or(0));
        note += &format!(", {}", duration::write(ttl));
    }
    if let Some(length) = number("x-max-length") {
        note += &format!(", at most {length}");
    }
    note
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Exchange;

    fn retrying() -> Topology {
        Topology::new()
            .exchange(Exchange::direct("covers").alternate("unrouted"))
            .exchange(Exchange::fanout("covers.retry"))
            .queue(Queue::quorum("index").bind("covers", "index").dead_letter_to("covers.retry"))
            .queue(
                Queue::classic("retry")
                    .bind("covers.retry", "")
                    .message_ttl(Duration::from_secs(4 * 3600))
                    .dead_letter_to("")
                    .dead_letter_key("index"),
            )
    }

    #[test]
    fn mermaid_shows_bindings_and_where_dead_letters_go() {
        let expected = "flowchart LR
  e0([\"covers<br/><i>direct</i>\"])
  e1([\"covers.retry<br/><i>fanout</i>\"])
  q2[\"index<br/><i>quorum</i>\"]
  q3[\"retry<br/><i>classic, 4h</i>\"]
  e4([\"unrouted<br/><i>elsewhere</i>\"])
  e0 -- \"index\" --> q2
  e1 --> q3
  e0 -. \"unroutable\" .-> e4
  q2 -. \"dead letters\" .-> e1
  q3 -. \"dead letters\" .-> q2
";
        assert_eq!(retrying().to_mermaid(), expected);
    }

    /// As many as a broker may have. Quadratic work would take minutes.
    #[cfg(feature = "files")]
    #[test]
    fn thirty_thousand_queues_are_drawn() {
        let mut text = "[[exchange]]\nname = \"x\"\ntype = \"topic\"\n".to_owned();
        for number in 0..30_000 {
            text += &format!(
                "[[queue]]\nname = \"q{number}\"\nbind = [{{ exchange = \"x\", key = \"k{number}\" }}]\n"
            );
        }
        let topology = Topology::from_toml(&text).unwrap();
        assert_eq!(topology.to_mermaid().lines().count(), 1 + 30_001 + 30_000);
        assert_eq!(topology.to_svg().matches("class=\"name\"").count(), 30_001);
    }

    #[test]
    fn names_cannot_break_out_of_the_text() {
        let topology = Topology::new().queue(Queue::classic("a\"]; <b>\n#"));
        assert!(topology.to_mermaid().contains("a#34;]; #60;b#62; #35;"));
        assert!(topology.to_svg().contains("a&quot;]; &lt;b&gt; #"));
    }
}
