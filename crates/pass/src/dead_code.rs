//! Removes what no result needs.
//!
//! Saves whatever the dead nodes would have held; costs nothing; always legal. Inputs that nothing reads go too.

use tightfit_ir::{Graph, NodeId, OutputKind, Source, ValueId};

/// The same graph without nodes and inputs that no output depends on. Values are renumbered in order.
pub fn dead_code(graph: &Graph) -> Graph {
    let mut live = vec![false; graph.values.len()];
    for output in &graph.outputs {
        live[output.value.index()] = true;
        if let OutputKind::Update(input) = output.kind {
            live[input.index()] = true;
        }
    }
    let mut kept = vec![false; graph.nodes.len()];
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        kept[index] = node.outputs.iter().any(|v| live[v.index()]);
        if kept[index] {
            // All results of a kept node exist, whether read or not.
            for value in node.inputs.iter().chain(&node.outputs) {
                live[value.index()] = true;
            }
        }
    }
    let renumber = |keep: &[bool]| -> Vec<u32> {
        let numbers = keep.iter().scan(0, |next, &keep| {
            let number = *next;
            *next += u32::from(keep);
            Some(number)
        });
        numbers.collect()
    };
    let (values, nodes) = (renumber(&live), renumber(&kept));
    let value = |id: ValueId| ValueId(values[id.index()]);
    let mut result = Graph::new();
    for (old, _) in graph.values.iter().zip(&live).filter(|(_, live)| **live) {
        let mut new = old.clone();
        if let Source::Node { node, .. } = &mut new.source {
            *node = NodeId(nodes[node.index()]);
        }
        result.push_value(new);
    }
    for (old, _) in graph.nodes.iter().zip(&kept).filter(|(_, kept)| **kept) {
        let mut new = old.clone();
        for id in new.inputs.iter_mut().chain(&mut new.outputs) {
            *id = value(*id);
        }
        result.nodes.push(new);
    }
    for output in &graph.outputs {
        let kind = match output.kind {
            OutputKind::Update(input) => OutputKind::Update(value(input)),
            kind => kind,
        };
        result.output(&output.name, value(output.value), kind);
    }
    result
}
