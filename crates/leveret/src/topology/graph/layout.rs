//! Where the nodes of a graph stand: in columns from left to right, in the order in which messages go.
//!
//! An edge that leads back, as that of a retry does, has no say in which column a node stands. Within a column, nodes stand near
//! those that they are connected with.

use super::Graph;

/// Where each node stands: its column, and its place in it from above.
#[derive(Debug, PartialEq)]
pub(super) struct Layout {
    pub(super) columns: Vec<Vec<usize>>,
    pub(super) column_of: Vec<usize>,
}

/// How often the nodes of each column are put in order by their neighbours.
const SWEEPS: usize = 8;

pub(super) fn lay_out(graph: &Graph) -> Layout {
    let forward = forward_edges(graph);
    let column_of = columns(graph.nodes.len(), &forward);
    let count = column_of.iter().max().map_or(0, |last| last + 1);
    let mut columns = vec![Vec::new(); count];
    for (node, column) in column_of.iter().enumerate() {
        columns[*column].push(node);
    }
    let mut layout = Layout { columns, column_of };
    for _ in 0..SWEEPS {
        layout.draw_together(graph);
    }
    layout
}

/// The edges without those that lead back to where one came from.
fn forward_edges(graph: &Graph) -> Vec<(usize, usize)> {
    #[derive(Clone, Copy, PartialEq)]
    enum State {
        New,
        OnPath,
        Done,
    }
    let mut state = vec![State::New; graph.nodes.len()];
    let mut forward = Vec::new();
    // Nodes to which nothing leads come first, so that the picture begins with them.
    let is_target =
        |node: usize| graph.edges.iter().any(|edge| edge.to == node && edge.from != node);
    let (inner, first): (Vec<usize>, Vec<usize>) =
        (0..graph.nodes.len()).partition(|node| is_target(*node));
    for start in first.into_iter().chain(inner) {
        // A path of nodes, each with the number of the edge to go on with.
        let mut path = vec![(start, 0)];
        if state[start] != State::New {
            continue;
        }
        state[start] = State::OnPath;
        while let Some((node, next)) = path.last_mut() {
            let node = *node;
            let edge =
                graph.edges.iter().enumerate().skip(*next).find(|(_, edge)| edge.from == node);
            let Some((index, edge)) = edge else {
                state[node] = State::Done;
                path.pop();
                continue;
            };
            *next = index + 1;
            if state[edge.to] == State::OnPath {
                continue;
            }
            forward.push((node, edge.to));
            if state[edge.to] == State::New {
                state[edge.to] = State::OnPath;
                path.push((edge.to, 0));
            }
        }
    }
    forward
}

/// Each node stands right of all that lead to it. There is no circle among the edges.
fn columns(nodes: usize, forward: &[(usize, usize)]) -> Vec<usize> {
    let mut column_of = vec![0; nodes];
    for _ in 0..nodes {
        for &(from, to) in forward {
            column_of[to] = column_of[to].max(column_of[from] + 1);
        }
    }
    column_of
}

impl Layout {
    /// Puts the nodes of each column in the order of the average place of their neighbours.
    fn draw_together(&mut self, graph: &Graph) {
        for column in 0..self.columns.len() {
            let place = self.places(graph.nodes.len());
            let average = |node: usize| {
                let neighbours = graph.edges.iter().filter_map(|edge| match (edge.from, edge.to) {
                    (from, to) if from == node && to != node => Some(place[to]),
                    (from, to) if to == node && from != node => Some(place[from]),
                    _ => None,
                });
                let places: Vec<f64> = neighbours.collect();
                match places.len() {
                    0 => place[node],
                    count => places.iter().sum::<f64>() / count as f64,
                }
            };
            let mut nodes = std::mem::take(&mut self.columns[column]);
            nodes.sort_by(|a, b| average(*a).total_cmp(&average(*b)));
            self.columns[column] = nodes;
        }
    }

    /// The place of each node, with the middle of every column at 0.
    fn places(&self, nodes: usize) -> Vec<f64> {
        let mut places = vec![0.0; nodes];
        for column in &self.columns {
            for (index, node) in column.iter().enumerate() {
                places[*node] = index as f64 - (column.len() as f64 - 1.0) / 2.0;
            }
        }
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{Exchange, Queue, Topology};

    #[test]
    fn messages_go_from_left_to_right_but_for_what_leads_back() {
        let topology = Topology::new()
            .exchange(Exchange::fanout("a"))
            .exchange(Exchange::fanout("again"))
            .queue(Queue::classic("work").bind("a", "").dead_letter_to("again"))
            .queue(Queue::classic("wait").bind("again", "").dead_letter_to("a"));
        let layout = lay_out(&Graph::of(&topology));
        // a, again, work, wait
        assert_eq!(layout.column_of, [0, 2, 1, 3]);
    }

    #[test]
    fn a_graph_of_nothing_and_one_with_a_loop_have_an_end() {
        assert!(lay_out(&Graph::of(&Topology::new())).columns.is_empty());
        let looping = Topology::new().exchange(Exchange::fanout("a").bind("a", ""));
        assert_eq!(lay_out(&Graph::of(&looping)).columns, [[0]]);
    }
}
