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
    let column_of = columns(graph);
    let count = column_of.iter().max().map_or(0, |last| last + 1);
    let mut columns = vec![Vec::new(); count];
    for (node, column) in column_of.iter().enumerate() {
        columns[*column].push(node);
    }
    let mut layout = Layout { columns, column_of };
    let neighbours = neighbours(graph);
    for _ in 0..SWEEPS {
        layout.draw_together(&neighbours);
    }
    layout
}

/// The nodes at the other ends of each node's edges.
fn neighbours(graph: &Graph) -> Vec<Vec<usize>> {
    let mut neighbours = vec![Vec::new(); graph.nodes.len()];
    for edge in graph.edges.iter().filter(|edge| edge.from != edge.to) {
        neighbours[edge.from].push(edge.to);
        neighbours[edge.to].push(edge.from);
    }
    neighbours
}

/// Each node stands right of all that lead to it, but for edges that lead back to where the search came from.
fn columns(graph: &Graph) -> Vec<usize> {
    #[derive(Clone, Copy, PartialEq)]
    enum State {
        New,
        OnPath,
        Done,
    }
    let mut state = vec![State::New; graph.nodes.len()];
    let mut forward = vec![Vec::new(); graph.nodes.len()];
    // Each node behind all to which it leads forward.
    let mut done = Vec::new();
    let mut is_target = vec![false; graph.nodes.len()];
    let mut targets = vec![Vec::new(); graph.nodes.len()];
    for edge in &graph.edges {
        is_target[edge.to] |= edge.from != edge.to;
        targets[edge.from].push(edge.to);
    }
    // Nodes to which nothing leads come first, so that the picture begins with them.
    let (inner, first): (Vec<usize>, Vec<usize>) =
        (0..graph.nodes.len()).partition(|&node| is_target[node]);
    for start in first.into_iter().chain(inner) {
        // A path of nodes, each with the number of the edge to go on with.
        let mut path = vec![(start, 0)];
        if state[start] != State::New {
            continue;
        }
        state[start] = State::OnPath;
        while let Some((node, next)) = path.last_mut() {
            let node = *node;
            let Some(&to) = targets[node].get(*next) else {
                state[node] = State::Done;
                done.push(node);
                path.pop();
                continue;
            };
            *next += 1;
            if state[to] == State::OnPath {
                continue;
            }
            forward[node].push(to);
            if state[to] == State::New {
                state[to] = State::OnPath;
                path.push((to, 0));
            }
        }
    }
    let mut column_of = vec![0; graph.nodes.len()];
    for from in done.into_iter().rev() {
        for &to in &forward[from] {
            column_of[to] = column_of[to].max(column_of[from] + 1);
        }
    }
    column_of
}

impl Layout {
    /// Puts the nodes of each column in the order of the average place of their neighbours.
    fn draw_together(&mut self, neighbours: &[Vec<usize>]) {
        let mut place = vec![0.0; neighbours.len()];
        self.columns.iter().for_each(|column| set_places(column, &mut place));
        for column in &mut self.columns {
            let average = |node: usize| match neighbours[node].len() {
                0 => place[node],
                count => {
                    neighbours[node].iter().map(|&near| place[near]).sum::<f64>() / count as f64
                }
            };
            let mut nodes: Vec<(f64, usize)> =
                column.iter().map(|&node| (average(node), node)).collect();
            nodes.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            *column = nodes.into_iter().map(|(_, node)| node).collect();
            set_places(column, &mut place);
        }
    }
}

/// The places of a column's nodes, with the middle of the column at 0.
fn set_places(column: &[usize], place: &mut [f64]) {
    for (index, &node) in column.iter().enumerate() {
        place[node] = index as f64 - (column.len() as f64 - 1.0) / 2.0;
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
