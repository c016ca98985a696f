//! Which nodes must run before which, and a graph's nodes in another order.

use crate::graph::{Graph, NodeId, OutputKind, Source};

impl Graph {
    /// For each node, by index, those that must run before it: makers of its operands, and readers of what it overwrites for an
    /// update.
    pub fn needs(&self) -> Vec<Vec<usize>> {
        let mut needs: Vec<Vec<usize>> = self
            .nodes
            .iter()
            .map(|node| {
                let makers = node.inputs.iter().filter_map(|&v| self.producer(v));
                makers.map(NodeId::index).collect()
            })
            .collect();
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); self.values.len()];
        for (reader, node) in self.nodes.iter().enumerate() {
            node.inputs.iter().for_each(|v| readers[v.index()].push(reader));
        }
        for output in &self.outputs {
            let OutputKind::Update(input) = output.kind else {
                continue;
            };
            let path = self.in_place_path(output.value, input).unwrap_or_default();
            for pair in path.windows(2) {
                let (new, old) = (pair[0], pair[1]);
                let Some(writer) = self.producer(new) else {
                    continue;
                };
                let others = readers[old.index()].iter().filter(|&&reader| reader != writer.index());
                needs[writer.index()].extend(others);
            }
        }
        needs
    }

    /// Puts the nodes in another order, which lists each of them once. Values keep their numbers.
    pub fn reorder(&mut self, order: &[NodeId]) {
        let mut places = vec![NodeId(0); self.nodes.len()];
        for (place, id) in order.iter().enumerate() {
            places[id.index()] = NodeId(place as u32);
        }
        self.nodes = order.iter().map(|&id| self.node(id).clone()).collect();
        for value in &mut self.values {
            if let Source::Node { node, .. } = &mut value.source {
                *node = places[node.index()];
            }
        }
    }
}
