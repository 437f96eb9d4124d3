//! A graph as a picture.

use std::collections::HashMap;
use std::fmt::Write;

use super::layout::{Layout, lay_out};
use super::{Edge, EdgeKind, Graph, NodeKind};

const LETTER: f64 = 7.4;
const HEIGHT: f64 = 46.0;
const MARGIN: f64 = 24.0;
/// Between two nodes of a column.
const BELOW: f64 = 34.0;
/// Between edges that lead back: below the nodes, and beside the columns.
const LANE: f64 = 22.0;
const BESIDE: f64 = 8.0;
/// Of the corners of such edges.
const ROUND: f64 = 8.0;

/// Where a node is drawn.
#[derive(Clone, Copy, Debug)]
struct Frame {
    x: f64,
    y: f64,
    width: f64,
}

pub(super) fn draw(graph: &Graph) -> String {
    let layout = lay_out(graph);
    let lines = lines(graph, &layout);
    let lanes = lines.iter().filter(|line| line.lane.is_some()).count() as f64;
    let (frames, width, bottom) = frames(graph, &layout, &lines);
    let height = bottom + MARGIN + lanes * LANE;
    let mut svg = String::new();
    // Writing to a text does not fail.
    let _ = write!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height:.0}" width="{width:.0}" height="{height:.0}" font-family="sans-serif" font-size="13">
<style>.name {{ fill: #1a1a1a }} .note {{ fill: #666; font-size: 11px }} .label {{ fill: #333; font-size: 11px; paint-order: stroke; stroke: #fff; stroke-width: 4px }} path {{ fill: none; stroke: #555; stroke-width: 1.3 }} .dead {{ stroke: #b3261e; stroke-dasharray: 5 3 }} .other {{ stroke: #888; stroke-dasharray: 2 3 }}</style>
<defs><marker id="arrow" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" style="fill: context-stroke; stroke: none"/></marker></defs>
<rect width="100%" height="100%" fill="#fff"/>
"##
    );
    let mut labels = String::new();
    for Line { edge, text, lane } in &lines {
        let class = match edge.kind {
            EdgeKind::Binding => "",
            EdgeKind::DeadLetter => " class=\"dead\"",
            EdgeKind::Alternate => " class=\"other\"",
        };
        let (path, (x, y)) = match lane {
            None => forward(frames[edge.from], frames[edge.to]),
            Some(lane) => back(frames[edge.from], frames[edge.to], *lane, bottom),
        };
        let _ = writeln!(svg, r#"<path{class} d="{path}" marker-end="url(#arrow)"/>"#);
        let text = escaped(text);
        let _ = writeln!(
            labels,
            r#"<text class="label" x="{x:.0}" y="{y:.0}" text-anchor="middle">{text}</text>"#
        );
    }
    for (node, frame) in graph.nodes.iter().zip(&frames) {
        let (round, fill) = match node.kind {
            NodeKind::Exchange => (HEIGHT / 2.0, "#e8f0fe"),
            NodeKind::Queue => (4.0, "#fff8e1"),
        };
        let Frame { x, y, width } = *frame;
        let (middle, name, note) = (x + width / 2.0, escaped(&node.name), escaped(&node.note));
        let _ = writeln!(
            svg,
            r##"<rect x="{x:.0}" y="{y:.0}" width="{width:.0}" height="{HEIGHT:.0}" rx="{round:.0}" fill="{fill}" stroke="#555"/>
<text class="name" x="{middle:.0}" y="{:.0}" text-anchor="middle">{name}</text>
<text class="note" x="{middle:.0}" y="{:.0}" text-anchor="middle">{note}</text>"##,
            y + 20.0,
            y + 36.0,
        );
    }
    svg + &labels + "</svg>\n"
}

/// An edge that is drawn, for all edges of its kind between the same nodes.
struct Line<'a> {
    edge: &'a Edge,
    text: String,
    /// What leads back goes below all nodes, each on a lane of its own.
    lane: Option<usize>,
}

fn lines<'a>(graph: &'a Graph, layout: &Layout) -> Vec<Line<'a>> {
    let mut lines: Vec<Line<'a>> = Vec::new();
    let mut line_of = HashMap::new();
    let mut lanes = 0..;
    for edge in &graph.edges {
        let ends = (edge.from, edge.to, edge.kind);
        let next = lines.len();
        let index = *line_of.entry(ends).or_insert(next);
        if index < next {
            lines[index].text += &format!(", {}", edge.text());
            continue;
        }
        let leads_back = layout.column_of[edge.to] <= layout.column_of[edge.from];
        let lane = if leads_back { lanes.next() } else { None };
        lines.push(Line { edge, text: edge.text(), lane });
    }
    lines
}

/// Where all nodes are drawn, how wide the picture is, and where the lowest node ends.
fn frames(graph: &Graph, layout: &Layout, lines: &[Line<'_>]) -> (Vec<Frame>, f64, f64) {
    let mut frames = vec![Frame { x: 0.0, y: 0.0, width: 0.0 }; graph.nodes.len()];
    let tallest = layout.columns.iter().map(Vec::len).max().unwrap_or(0) as f64;
    let height = tallest * (HEIGHT + BELOW);
    // What leads back goes down and up beside the columns.
    let aside = lines.iter().filter(|line| line.lane.is_some()).count() as f64 * BESIDE;
    let rooms = rooms(layout, lines);
    let mut x = MARGIN + aside;
    for (number, column) in layout.columns.iter().enumerate() {
        let letters = |node: &usize| {
            let node = &graph.nodes[*node];
            node.name.chars().count().max(node.note.chars().count())
        };
        let width = column.iter().map(letters).max().unwrap_or(0) as f64 * LETTER + 36.0;
        let top = MARGIN + (height - column.len() as f64 * (HEIGHT + BELOW)) / 2.0;
        for (index, node) in column.iter().enumerate() {
            frames[*node] = Frame { x, y: top + index as f64 * (HEIGHT + BELOW), width };
        }
        x += width + rooms[number] + aside;
    }
    (frames, x.max(200.0), MARGIN + height)
}

/// Room for the labels of the edges that leave each column.
fn rooms(layout: &Layout, lines: &[Line<'_>]) -> Vec<f64> {
    let mut letters = vec![0; layout.columns.len()];
    for Line { edge, text, .. } in lines {
        let column = layout.column_of[edge.from];
        if layout.column_of[edge.to] == column + 1 {
            letters[column] = letters[column].max(text.chars().count());
        }
    }
    let mut rooms: Vec<f64> =
        letters.into_iter().map(|letters| (letters as f64 * 6.2 + 40.0).max(70.0)).collect();
    if let Some(last) = rooms.last_mut() {
        *last = MARGIN;
    }
    rooms
}

/// The way of an edge to a column further right, and where its label stands.
fn forward(start: Frame, end: Frame) -> (String, (f64, f64)) {
    let (x1, y1) = (start.x + start.width, start.y + HEIGHT / 2.0);
    let (x2, y2) = (end.x, end.y + HEIGHT / 2.0);
    let middle = (x1 + x2) / 2.0;
    let path = format!("M{x1:.0} {y1:.0} C{middle:.0} {y1:.0} {middle:.0} {y2:.0} {x2:.0} {y2:.0}");
    (path, (middle, (y1 + y2) / 2.0 - 5.0))
}

/// The way of an edge back, or within its column: down on the right, along below all nodes, and up on the left.
fn back(start: Frame, end: Frame, lane: usize, bottom: f64) -> (String, (f64, f64)) {
    let lane = lane as f64;
    let (x1, y1) = (start.x + start.width, start.y + HEIGHT * 0.75);
    let (x2, y2) = (end.x, end.y + HEIGHT * 0.75);
    let (right, left) = (x1 + 12.0 + lane * BESIDE, x2 - 16.0 - lane * BESIDE);
    let low = bottom + lane * LANE;
    let r = ROUND;
    let path = format!(
        "M{x1:.0} {y1:.0} H{:.0} Q{right:.0} {y1:.0} {right:.0} {:.0} V{:.0} Q{right:.0} {low:.0} {:.0} {low:.0} H{:.0} \
         Q{left:.0} {low:.0} {left:.0} {:.0} V{:.0} Q{left:.0} {y2:.0} {:.0} {y2:.0} H{x2:.0}",
        right - r,
        y1 + r,
        low - r,
        right - r,
        left + r,
        low - r,
        y2 + r,
        left + r,
    );
    (path, ((left + right) / 2.0, low - 5.0))
}

fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() => escaped.push(' '),
            c => escaped.push(c),
        }
    }
    escaped
}
