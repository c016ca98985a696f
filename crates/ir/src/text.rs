//! The text form of graphs and steps: what tests show, people read, and [`Graph::parse`] takes back.
//!
//! ```text
//! %0 = input "tokens" i32[8] input fed
//! %1 = input "embed.weight" f32[16x4] weight persistent normal(0.02) trainable
//! %2: f32[8x4] activation = embedding(%0, %1) @"embed" forward
//! output "hidden" = %2 read
//! ```
//!
//! A node's attributes stand as a JSON object after its name. A step is `routine NAME` and `program NAME xREPEAT` lines with
//! their graphs beneath.

use std::fmt::{self, Write};
use std::str::FromStr;

use crate::graph::{Binding, Graph, Init, Node, NodeId, Output, OutputKind, Source, Value, ValueId};
use crate::op::Op;
use crate::stage::{Program, Routine, Step};
use crate::types::{DType, LOWER_SUFFIX, Phase, Role, Shape, Tier, Type};

/// A line that is not in the form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Counted from 1.
    pub line: usize,
    /// What was expected.
    pub message: String,
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (id, value, binding) in self.inputs() {
            write!(
                f,
                "%{} = input {} {} {}",
                id.0,
                quoted(&value.name),
                value.ty,
                value.role
            )?;
            match binding {
                Binding::Fed => writeln!(f, " fed")?,
                Binding::Carried => writeln!(f, " carried")?,
                Binding::Persistent { init, trainable } => {
                    let init = match init {
                        Init::Zeros => "zeros".to_owned(),
                        Init::Ones => "ones".to_owned(),
                        Init::Constant(value) => format!("constant({value})"),
                        Init::Normal(std) => format!("normal({std})"),
                        Init::Uniform(bound) => format!("uniform({bound})"),
                    };
                    let trainable = if trainable { " trainable" } else { "" };
                    writeln!(f, " persistent {init}{trainable}")?;
                }
            }
        }
        for node in &self.nodes {
            let results: Vec<String> = node
                .outputs
                .iter()
                .map(|&id| format!("%{}: {} {}", id.0, self.ty(id), self.value(id).role))
                .collect();
            let operands: Vec<String> = node.inputs.iter().map(|id| format!("%{}", id.0)).collect();
            writeln!(
                f,
                "{} = {}({}) @{} {}",
                results.join(", "),
                operation(&node.op)?,
                operands.join(", "),
                quoted(&node.scope),
                node.phase
            )?;
        }
        for output in &self.outputs {
            write!(f, "output {} = %{} ", quoted(&output.name), output.value.0)?;
            match output.kind {
                OutputKind::Read => writeln!(f, "read")?,
                OutputKind::Carry => writeln!(f, "carry")?,
                OutputKind::Update(input) => writeln!(f, "update %{}", input.0)?,
            }
        }
        Ok(())
    }
}

/// A name as JSON: Rust's `{:?}` has escapes that JSON has not.
fn quoted(name: &str) -> serde_json::Value {
    name.into()
}

/// An operation's name and, if it has any, its attributes.
fn operation(op: &Op) -> Result<String, fmt::Error> {
    let tagged = serde_json::to_value(op).map_err(|_| fmt::Error)?;
    let attributes = &tagged[op.name()];
    let mut text = op.name().to_owned();
    if attributes.as_object().is_some_and(|map| !map.is_empty()) {
        write!(text, "{attributes}")?;
    }
    Ok(text)
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for routine in &self.routines {
            writeln!(f, "routine {}", routine.name)?;
            for program in &routine.programs {
                writeln!(f, "program {} x{}", program.name, program.repeat)?;
                program.graph.fmt(f)?;
            }
        }
        Ok(())
    }
}

impl Graph {
    /// Reads the text form. The result is not verified.
    ///
    /// # Errors
    /// The first line that is not in the form.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let mut reader = GraphReader::default();
        for (index, line) in lines(text) {
            reader
                .line(line)
                .map_err(|message| ParseError { line: index, message })?;
        }
        reader.finish().map_err(|message| ParseError {
            line: text.lines().count(),
            message,
        })
    }
}

impl Step {
    /// Reads the text form. The result is not verified.
    ///
    /// # Errors
    /// The first line that is not in the form.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let mut step = Step::default();
        let mut open: Option<GraphReader> = None;
        let mut last = 0;
        for (line, content) in lines(text) {
            let at = |message: String| ParseError { line, message };
            last = line;
            if let Some(name) = content.strip_prefix("routine ") {
                close(&mut step, open.take()).map_err(at)?;
                step.routines.push(Routine {
                    name: name.trim().to_owned(),
                    programs: Vec::new(),
                });
            } else if let Some(header) = content.strip_prefix("program ") {
                close(&mut step, open.take()).map_err(at)?;
                let program = header
                    .rsplit_once(" x")
                    .and_then(|(name, repeat)| Some((name.trim().to_owned(), repeat.trim().parse().ok()?)));
                let (Some((name, repeat)), Some(routine)) = (program, step.routines.last_mut()) else {
                    return Err(at("expected `program NAME xREPEAT` inside a routine".into()));
                };
                routine.programs.push(Program {
                    name,
                    repeat,
                    graph: Graph::new(),
                });
                open = Some(GraphReader::default());
            } else {
                let Some(reader) = &mut open else {
                    return Err(at("expected `routine` or `program` first".into()));
                };
                reader.line(content).map_err(at)?;
            }
        }
        close(&mut step, open).map_err(|message| ParseError { line: last, message })?;
        Ok(step)
    }
}

fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .enumerate()
        .map(|(i, line)| (i + 1, line.trim()))
        .filter(|(_, line)| !line.is_empty())
}

/// Ends the program being read, if any.
fn close(step: &mut Step, reader: Option<GraphReader>) -> Result<(), String> {
    if let Some(reader) = reader {
        let graph = reader.finish()?;
        if let Some(program) = step.routines.last_mut().and_then(|r| r.programs.last_mut()) {
            program.graph = graph;
        }
    }
    Ok(())
}

/// A graph while its lines come in: values may be numbered in any order.
#[derive(Default)]
struct GraphReader {
    values: Vec<Option<Value>>,
    nodes: Vec<Node>,
    outputs: Vec<Output>,
}

impl GraphReader {
    fn line(&mut self, line: &str) -> Result<(), String> {
        let mut cursor = Cursor(line);
        if cursor.eat("output ") {
            return self.output(cursor);
        }
        let first = cursor.value_id()?;
        if cursor.eat("= input ") {
            let value = input(cursor)?;
            return self.define(first, value);
        }
        self.node(first, cursor)
    }

    fn output(&mut self, mut cursor: Cursor<'_>) -> Result<(), String> {
        let name = cursor.string()?;
        cursor.token("=")?;
        let value = cursor.value_id()?;
        let kind = match cursor.word() {
            "read" => OutputKind::Read,
            "carry" => OutputKind::Carry,
            "update" => OutputKind::Update(cursor.value_id()?),
            other => return Err(format!("expected read, carry or update, found `{other}`")),
        };
        self.outputs.push(Output {
            name: name.into(),
            value,
            kind,
        });
        cursor.end()
    }

    fn node(&mut self, first: ValueId, mut cursor: Cursor<'_>) -> Result<(), String> {
        let node = NodeId(self.nodes.len() as u32);
        let mut outputs = Vec::new();
        let mut id = first;
        loop {
            cursor.token(":")?;
            let ty = cursor.ty()?;
            let role = cursor.label("a role", Role::from_name)?;
            let value = Value {
                name: "".into(),
                ty,
                role,
                source: Source::Node {
                    node,
                    output: outputs.len(),
                },
            };
            self.define(id, value)?;
            outputs.push(id);
            if !cursor.eat(",") {
                break;
            }
            id = cursor.value_id()?;
        }
        cursor.token("=")?;
        let op = cursor.operation()?;
        cursor.token("(")?;
        let mut inputs = Vec::new();
        while !cursor.eat(")") {
            inputs.push(cursor.value_id()?);
            cursor.eat(",");
        }
        cursor.token("@")?;
        let scope = cursor.string()?;
        let phase = cursor.label("a phase", Phase::from_name)?;
        self.nodes.push(Node {
            op,
            inputs,
            outputs,
            scope: scope.into(),
            phase,
        });
        cursor.end()
    }

    fn define(&mut self, id: ValueId, value: Value) -> Result<(), String> {
        // Each line defines at most a few values: a number far beyond them is a mistake, not a reason to allocate.
        if id.index() > self.values.len() + 4096 {
            return Err(format!("value %{} skips too many numbers", id.0));
        }
        if self.values.len() <= id.index() {
            self.values.resize(id.index() + 1, None);
        }
        match &mut self.values[id.index()] {
            Some(_) => Err(format!("%{} is defined twice", id.0)),
            slot => {
                *slot = Some(value);
                Ok(())
            }
        }
    }

    fn finish(self) -> Result<Graph, String> {
        let count = self.values.len();
        let values: Vec<Value> = self.values.into_iter().flatten().collect();
        if values.len() != count {
            return Err("values are not numbered without gaps".into());
        }
        let operands = self.nodes.iter().flat_map(|node| &node.inputs);
        let results = self.outputs.iter().map(|output| &output.value);
        let updated = self.outputs.iter().filter_map(|output| match &output.kind {
            OutputKind::Update(input) => Some(input),
            _ => None,
        });
        for id in operands.chain(results).chain(updated) {
            if id.index() >= count {
                return Err(format!("%{} is not defined", id.0));
            }
        }
        Ok(Graph {
            values,
            nodes: self.nodes,
            outputs: self.outputs,
        })
    }
}

fn input(mut cursor: Cursor<'_>) -> Result<Value, String> {
    let name = cursor.string()?;
    let ty = cursor.ty()?;
    let role = cursor.label("a role", Role::from_name)?;
    let binding = match cursor.word() {
        "fed" => Binding::Fed,
        "carried" => Binding::Carried,
        "persistent" => {
            let init = cursor.label(
                "zeros, ones, constant(X), normal(STD) or uniform(BOUND)",
                |word| match word {
                    "zeros" => Some(Init::Zeros),
                    "ones" => Some(Init::Ones),
                    _ => {
                        let (kind, number) = word.strip_suffix(')')?.split_once('(')?;
                        let number = number.parse().ok()?;
                        match kind {
                            "constant" => Some(Init::Constant(number)),
                            "normal" => Some(Init::Normal(number)),
                            "uniform" => Some(Init::Uniform(number)),
                            _ => None,
                        }
                    }
                },
            )?;
            let trainable = cursor.eat("trainable");
            Binding::Persistent { init, trainable }
        }
        other => return Err(format!("expected fed, carried or persistent, found `{other}`")),
    };
    cursor.end()?;
    Ok(Value {
        name: name.into(),
        ty,
        role,
        source: Source::Input(binding),
    })
}

/// The rest of a line.
struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    fn skip_spaces(&mut self) {
        self.0 = self.0.trim_start();
    }

    fn eat(&mut self, token: &str) -> bool {
        self.skip_spaces();
        match self.0.strip_prefix(token) {
            Some(rest) => {
                self.0 = rest;
                true
            }
            None => false,
        }
    }

    fn token(&mut self, token: &str) -> Result<(), String> {
        if self.eat(token) {
            return Ok(());
        }
        Err(format!("expected `{token}` before `{}`", self.0))
    }

    fn end(&mut self) -> Result<(), String> {
        self.skip_spaces();
        if self.0.is_empty() {
            return Ok(());
        }
        Err(format!("unexpected `{}`", self.0))
    }

    /// Everything up to the next space or comma.
    fn word(&mut self) -> &'a str {
        self.skip_spaces();
        let (word, rest) = self.0.split_at(self.0.find([' ', ',']).unwrap_or(self.0.len()));
        self.0 = rest;
        word
    }

    fn label<T>(&mut self, what: &str, read: impl Fn(&str) -> Option<T>) -> Result<T, String> {
        let word = self.word();
        read(word).ok_or_else(|| format!("expected {what}, found `{word}`"))
    }

    fn value_id(&mut self) -> Result<ValueId, String> {
        self.token("%")?;
        let digits = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
        let (number, rest) = self.0.split_at(digits);
        self.0 = rest;
        u32::from_str(number)
            .map(ValueId)
            .map_err(|_| format!("expected a value number, found `{number}`"))
    }

    /// A quoted name, or a JSON value: read as far as it goes.
    fn json(&mut self) -> Result<serde_json::Value, String> {
        self.skip_spaces();
        let mut stream = serde_json::Deserializer::from_str(self.0).into_iter();
        let value = stream
            .next()
            .ok_or("the line ends too early")?
            .map_err(|error| error.to_string())?;
        self.0 = &self.0[stream.byte_offset()..];
        Ok(value)
    }

    fn string(&mut self) -> Result<String, String> {
        match self.json()? {
            serde_json::Value::String(text) => Ok(text),
            other => Err(format!("expected a quoted name, found `{other}`")),
        }
    }

    fn ty(&mut self) -> Result<Type, String> {
        self.label("a type like f32[2x3]", |word| {
            let (word, tier) = match word.strip_suffix(LOWER_SUFFIX) {
                Some(word) => (word, Tier::Lower),
                None => (word, Tier::Memory),
            };
            let (dtype, dims) = word.strip_suffix(']')?.split_once('[')?;
            let dims = match dims {
                "" => Vec::new(),
                dims => dims.split('x').map(|d| d.parse().ok()).collect::<Option<Vec<u64>>>()?,
            };
            Some(Type::new(DType::from_name(dtype)?, Shape::from(dims)).on(tier))
        })
    }

    fn operation(&mut self) -> Result<Op, String> {
        self.skip_spaces();
        let end = self
            .0
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
            .unwrap_or(self.0.len());
        let (name, rest) = self.0.split_at(end);
        self.0 = rest;
        let attributes = if self.0.starts_with('{') {
            self.json()?
        } else {
            serde_json::json!({})
        };
        serde_json::from_value(serde_json::json!({ name: attributes }))
            .map_err(|error| format!("operation `{name}`: {error}"))
    }
}
