//! The text form: what is printed parses back to the same graph; what is not in the form is refused with its line.

use proptest::prelude::*;
use tightfit_ir::op::{AdamW, Attention, Linear, Reshape, Rope, RopeScaling, RopeTable, Rounding};
use tightfit_ir::{Binding, Graph, Init, Op, OutputKind, Phase, Role, Step, Type};
use tightfit_pass::{Adam, Optimizer, OptimizerConfig, accumulate, autodiff, optimizer};
use tightfit_testkit::random::model;
use tightfit_testkit::suite::{Case, any_case};

const GRAPH: &str = "\
%0 = input \"tokens\" i32[8] input fed
%1 = input \"embed.weight\" f32[16x4] weight persistent normal(0.02) trainable
%2 = input \"norm.weight\" f32[4] weight persistent ones
%5 = input \"sum\" f32[4] gradient carried
%3: f32[8x4] activation = embedding(%0, %1) @\"embed\" forward
%4: f32[8x4] activation, %6: f32[8] activation = rms_norm{\"eps\":0.00001}(%3, %2) @\"layers.0.norm\" recompute
output \"hidden\" = %4 read
output \"left\" = %6 carry
output \"sum\" = %5 update %5
";

fn graph_of(case: &Case) -> Graph {
    let mut graph = Graph::new();
    let operands: Vec<_> = case
        .types
        .iter()
        .enumerate()
        .map(|(i, ty)| graph.input(&format!("operand {i}"), ty.clone(), Role::Input, Binding::Fed))
        .collect();
    let results = graph
        .push(
            case.op.clone(),
            &operands,
            &"case".into(),
            Phase::Forward,
            Role::Activation,
        )
        .unwrap();
    graph.output("result", results[0], OutputKind::Read);
    graph
}

#[test]
fn a_hand_written_graph_parses_and_prints_as_written() {
    let graph = Graph::parse(GRAPH).unwrap();
    graph.verify().unwrap();
    assert_eq!(graph.nodes.len(), 2);
    assert_eq!(&*graph.nodes[1].scope, "layers.0.norm");
    assert_eq!(graph.nodes[1].phase, Phase::Recompute);
    let norm = graph.value(graph.input_named("norm.weight").unwrap());
    let binding = Binding::Persistent {
        init: Init::Ones,
        trainable: false,
    };
    assert_eq!((&norm.ty, norm.role), (&Type::f32([4]), Role::Weight));
    assert_eq!(graph.binding(graph.input_named("norm.weight").unwrap()), Some(binding));
    assert_eq!(graph.to_string(), GRAPH);
}

#[test]
fn spaces_and_empty_lines_do_not_matter() {
    let spread = GRAPH
        .replace('\n', " \n\n  ")
        .replace(" = ", "  =   ")
        .replace("(%0, %1)", "( %0,%1 )");
    // The keywords themselves are one token each.
    let spread = spread.replace("=   input", "= input");
    assert_eq!(Graph::parse(&spread).unwrap(), Graph::parse(GRAPH).unwrap());
}

#[test]
fn names_may_hold_anything() {
    for name in [
        "a b",
        "a\"b\\c",
        "line\nbreak",
        "tab\t nul\0 del\u{7f}",
        "权重.é\u{301}.\u{202e}",
        "'",
        "output \"x\" = %0",
    ] {
        let mut graph = Graph::new();
        let x = graph.input(name, Type::f32([2, 2]), Role::Input, Binding::Fed);
        let rows = Op::from(Reshape { shape: [4].into() });
        let y = graph
            .push(rows, &[x], &name.into(), Phase::Forward, Role::Activation)
            .unwrap()[0];
        graph.output(name, y, OutputKind::Read);
        let text = graph.to_string();
        assert_eq!(Graph::parse(&text).as_ref(), Ok(&graph), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
    }
}

#[test]
fn errors_name_the_line_and_what_was_expected() {
    for (line, from, to, message) in [
        (1, "i32[8]", "i31[8]", "expected a type like f32[2x3], found `i31[8]`"),
        (1, "i32[8]", "i32[-8]", "expected a type"),
        (1, "input fed", "inputs fed", "expected a role, found `inputs`"),
        (1, "fed", "feed", "expected fed, carried or persistent, found `feed`"),
        (1, "\"tokens\"", "tokens", "expected"),
        (1, "\"tokens\"", "7", "expected a quoted name, found `7`"),
        (
            2,
            "normal(0.02)",
            "gamma(0.02)",
            "expected zeros, ones, constant(X), normal(STD) or uniform(BOUND)",
        ),
        (2, "trainable", "trainable twice", "unexpected `twice`"),
        (4, "%5 =", "%1 =", "%1 is defined twice"),
        (4, "%5 =", "%99999 =", "skips too many numbers"),
        (5, "embedding", "embeding", "operation `embeding`"),
        (5, "(%0, %1)", "(%0, %1", "expected `%`"),
        (5, "@\"embed\"", "\"embed\"", "expected `@`"),
        (5, "forward", "sideways", "expected a phase, found `sideways`"),
        (6, "{\"eps\":0.00001}", "", "missing field `eps`"),
        (6, "{\"eps\":0.00001}", "{\"eps\":}", "expected value"),
        (7, "read", "write", "expected read, carry or update, found `write`"),
        (9, "update %5", "update 5", "expected `%`"),
        (9, "update %5", "update %55", "%55 is not defined"),
        (9, "update %5", "update %5000000000", "expected a value number"),
    ] {
        let text = GRAPH.replacen(from, to, if from == "%5 =" { 1 } else { usize::MAX });
        let error = Graph::parse(&text).unwrap_err();
        assert!(error.message.contains(message), "{to}: {error}");
        assert_eq!(error.line, line, "{to}: {error}");
        assert!(error.to_string().starts_with(&format!("line {line}: ")));
    }
    let gap = Graph::parse(&GRAPH.replace("%6", "%8")).unwrap_err();
    assert!(gap.message.contains("without gaps"), "{gap}");
}

#[test]
fn errors_of_steps_name_the_line() {
    let header = "routine train\nprogram micro_step x2\n";
    let step = Step::parse(&format!("{header}{GRAPH}")).unwrap();
    assert_eq!(step.to_string(), format!("{header}{GRAPH}"));
    for (text, line, message) in [
        (GRAPH.to_owned(), 1, "expected `routine` or `program` first"),
        ("program a x1".to_owned(), 1, "inside a routine"),
        ("routine a\nprogram b".to_owned(), 2, "xREPEAT"),
        ("routine a\nprogram b x-1".to_owned(), 2, "xREPEAT"),
        (
            format!("{header}{}", GRAPH.replace("embedding", "nothing")),
            7,
            "operation `nothing`",
        ),
        (
            format!("{header}%1 = input \"x\" f32[1] input fed\n\n"),
            3,
            "without gaps",
        ),
    ] {
        let error = Step::parse(&text).unwrap_err();
        assert!(error.message.contains(message), "{error}");
        assert_eq!(error.line, line, "{error}");
    }
}

#[test]
fn attributes_that_have_their_default_are_not_printed() {
    let operation = |op: Op, types: &[Type]| {
        let case = Case {
            name: String::new(),
            op,
            types: types.to_vec(),
            inputs: Vec::new(),
            quantised: None,
        };
        let text = graph_of(&case).to_string();
        let line = text.lines().find(|line| line.contains(" @")).unwrap();
        line[line.rfind("= ").unwrap() + 2..line.find(" @").unwrap()].to_owned()
    };
    let matrix = Type::f32([2, 2]);
    let plain = Linear {
        bias: false,
        accumulate: Default::default(),
    };
    assert_eq!(
        operation(plain.into(), &[matrix.clone(), matrix.clone()]),
        "linear(%0, %1)"
    );
    let inverse = Rope { inverse: true };
    assert_eq!(
        operation(inverse.into(), &[matrix.clone(), matrix]),
        "rope{\"inverse\":true}(%0, %1)"
    );
    let table = |scaling| RopeTable {
        head_dim: 2,
        theta: 10_000.0,
        scaling,
    };
    assert_eq!(
        operation(table(None).into(), &[Type::i32([2])]),
        "rope_table{\"head_dim\":2,\"theta\":10000.0}(%0)"
    );
    let linear = RopeScaling::Linear { factor: 4.0 };
    assert_eq!(
        operation(table(Some(linear)).into(), &[Type::i32([2])]),
        "rope_table{\"head_dim\":2,\"theta\":10000.0,\"scaling\":{\"linear\":{\"factor\":4.0}}}(%0)"
    );
}

/// A graph of two operations with floating-point attributes.
fn attributes(x: f64, y: f64) -> Graph {
    let mut graph = Graph::new();
    let init = Init::Normal(x);
    let binding = Binding::Persistent { init, trainable: true };
    let mut input = |name: &str, ty| graph.input(name, ty, Role::Weight, binding);
    let [q, k, v] = ["q", "k", "v"].map(|name| input(name, Type::f32([3, 2])));
    let doc_start = input("doc_start", Type::i32([3]));
    let [lr, step] = ["lr", "step"].map(|name| input(name, Type::f32([1])));
    let attention = Attention {
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        scale: x,
        context: 3,
        window: None,
    };
    let adamw = AdamW {
        beta1: x,
        beta2: y,
        eps: y,
        weight_decay: x,
        factor: false,
        rounding: Rounding::Nearest,
    };
    let mut push = |op: Op, operands: &[_]| {
        let pushed = graph.push(op, operands, &"s".into(), Phase::Forward, Role::Activation);
        pushed.unwrap()[0]
    };
    let o = push(attention.into(), &[q, k, v, doc_start]);
    push(adamw.into(), &[o, q, k, v, lr, step]);
    graph
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_operation_with_any_attributes_parses_back(case in any_case()) {
        let graph = graph_of(&case);
        let text = graph.to_string();
        prop_assert_eq!(Graph::parse(&text), Ok(graph), "{}", text);
    }

    #[test]
    fn numbers_parse_back_to_the_last_bit(x: f64, y in 0.0..1e3_f64) {
        prop_assume!(x.is_finite());
        let graph = attributes(x, y);
        prop_assert_eq!(Graph::parse(&graph.to_string()), Ok(graph));
    }

    #[test]
    fn models_and_their_steps_parse_back(model in model(), micro_batches in 1..4_u32) {
        let graph = &model.forward.graph;
        prop_assert_eq!(Graph::parse(&graph.to_string()), Ok(graph.clone()));
        let config = OptimizerConfig {
            optimizer: Optimizer::AdamW(Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8 }),
            weight_decay: 0.1,
            clip_norm: Some(1.0),
            loss_scale: None,
            seed: 1,
        };
        if let Ok(step) = autodiff(model.forward) {
            let step = optimizer(accumulate(step, micro_batches).unwrap(), &config).unwrap();
            prop_assert_eq!(Step::parse(&step.to_string()), Ok(step));
        }
    }

    /// Whatever happens to the text, it parses or is refused; what parses prints and parses to the same again.
    #[test]
    fn spoilt_text_never_panics(
        model in model(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), edit()), 1..4),
    ) {
        let mut text = format!("routine train\nprogram micro_step x1\n{}", model.forward.graph);
        for (at, edit) in edits {
            let at = (0..=at.index(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap();
            match edit {
                Edit::Insert(what) => text.insert_str(at, &what),
                Edit::Remove(length) => {
                    let end = (at + length).min(text.len());
                    let end = (end..=text.len()).find(|&i| text.is_char_boundary(i)).unwrap();
                    text.replace_range(at..end, "");
                }
                Edit::SwapLines(other) => {
                    let mut lines: Vec<&str> = text.lines().collect();
                    let (a, b) = (at % lines.len(), other % lines.len());
                    lines.swap(a, b);
                    text = lines.join("\n");
                }
            }
        }
        if let Ok(step) = Step::parse(&text) {
            let again = Step::parse(&step.to_string());
            prop_assert_eq!(again.as_ref(), Ok(&step));
            // Any graph can be checked, however wrong it is.
            let _ = step.verify();
        }
    }
}

#[derive(Clone, Debug)]
enum Edit {
    Insert(String),
    Remove(usize),
    SwapLines(usize),
}

fn edit() -> impl Strategy<Value = Edit> {
    const TOKENS: &[&str] = &[
        "%",
        "%7",
        "%4294967295",
        "{",
        "}",
        "\"",
        "(",
        ")",
        ",",
        ":",
        "=",
        "[",
        "]",
        "x",
        "\n",
        "output ",
        "é",
    ];
    prop_oneof![
        prop::sample::select(TOKENS).prop_map(|token| Edit::Insert(token.to_owned())),
        "\\PC{1,3}".prop_map(Edit::Insert),
        "[0-9]{1,25}".prop_map(Edit::Insert),
        (1..20_usize).prop_map(Edit::Remove),
        any::<usize>().prop_map(Edit::SwapLines),
    ]
}
