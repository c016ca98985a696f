//! Random small models: every forward operation, values read several times, tied and frozen weights, branches that lead nowhere.

use std::sync::Arc;

use proptest::prelude::*;
use tightfit_ir::op::{
    Accumulate, Add, Approximate, Attention, Cast, Embedding, Gelu, LayerNorm, Linear, LinearCrossEntropy, PadRows,
    Reshape, RmsNorm, Rope, RopeScaling, RopeTable, SliceRows, SoftmaxCrossEntropy, SwiGlu,
};
use tightfit_ir::{Binding, DType, Forward, Graph, Init, Op, OutputKind, Phase, Role, Shape, Type, ValueId};

use crate::data::BatchSpec;

/// A model and the data it takes.
#[derive(Clone, Debug)]
pub struct RandomModel {
    /// The model; it verifies and its result is `loss`.
    pub forward: Forward,
    /// What to feed it with.
    pub batch: BatchSpec,
}

/// Random small models: at most 24 rows and a few thousand weights. Shrinks to fewer blocks and smaller sizes.
pub fn model() -> impl Strategy<Value = RandomModel> {
    recipe().prop_map(|recipe| build(&recipe))
}

/// Large enough that norms are smooth at the distances of finite differences, and that nothing grows without end.
const EPS: f64 = 1e-2;
const IGNORE: i32 = -100;

/// What a model is built from.
#[derive(Clone, Debug)]
struct Recipe {
    rows: u64,
    vocab_size: u64,
    hidden: u64,
    heads: Heads,
    blocks: Vec<(Block, Picks)>,
    head: Head,
    /// Bit `n` freezes weight `n`; the head's own weight always trains.
    frozen: u64,
}

#[derive(Clone, Copy, Debug)]
struct Heads {
    kv_heads: u64,
    group: u64,
    head_dim: u64,
    context: u64,
}

/// How the model ends.
#[derive(Clone, Copy, Debug)]
enum Head {
    /// Linear and cross-entropy in one, over the embedding's weight or one of its own.
    Chunked { chunk: u64, tied: bool },
    /// A linear layer, then softmax cross-entropy over its logits.
    Plain { bias: bool },
}

/// One step of the model: it reads values made before and makes one of `[rows, hidden]`.
#[derive(Clone, Copy, Debug)]
enum Block {
    Linear {
        bias: bool,
        shared: bool,
        addend: bool,
    },
    RmsNorm,
    LayerNorm,
    Gelu {
        approximate: Approximate,
        reshaped: bool,
    },
    Gate,
    Mlp,
    Attention {
        window: Option<u64>,
    },
    Add,
    /// To that dtype and back.
    Cast {
        dtype: DType,
    },
    Rows {
        start: u64,
        addend: bool,
    },
    Embedding {
        shared: bool,
    },
}

/// Which of the values made before a block reads, counted back from the newest, modulo how many there are.
type Picks = [usize; 2];

fn recipe() -> impl Strategy<Value = Recipe> {
    let heads = (1..=2_u64, 1..=2_u64, 1..=2_u64, 1..=24_u64).prop_map(|(kv_heads, group, half, context)| Heads {
        kv_heads,
        group,
        head_dim: 2 * half,
        context,
    });
    let head = prop_oneof![
        (1..=30_u64, any::<bool>()).prop_map(|(chunk, tied)| Head::Chunked { chunk, tied }),
        any::<bool>().prop_map(|bias| Head::Plain { bias }),
    ];
    // Mostly the newest value, so that models are chains with some branches.
    let pick = || prop_oneof![3 => Just(0), 2 => 0..6_usize];
    let blocks = prop::collection::vec((block(), [pick(), pick()]), 0..8);
    let frozen = prop_oneof![Just(0), any::<u64>(), Just(u64::MAX)];
    (1..=24_u64, 2..=11_u64, 2..=12_u64, heads, blocks, head, frozen).prop_map(
        |(rows, vocab_size, hidden, heads, blocks, head, frozen)| Recipe {
            rows,
            vocab_size,
            hidden,
            heads,
            blocks,
            head,
            frozen,
        },
    )
}

fn block() -> impl Strategy<Value = Block> {
    let flag = any::<bool>;
    prop_oneof![
        3 => (flag(), flag(), flag()).prop_map(|(bias, shared, addend)| Block::Linear { bias, shared, addend }),
        2 => Just(Block::RmsNorm),
        1 => Just(Block::LayerNorm),
        2 => (flag(), flag()).prop_map(|(tanh, reshaped)| Block::Gelu {
            approximate: if tanh { Approximate::Tanh } else { Approximate::None },
            reshaped,
        }),
        1 => Just(Block::Gate),
        2 => Just(Block::Mlp),
        2 => prop::option::of(1..=9_u64).prop_map(|window| Block::Attention { window }),
        2 => Just(Block::Add),
        1 => prop_oneof![Just(DType::Bf16), Just(DType::F16)].prop_map(|dtype| Block::Cast { dtype }),
        1 => (0..24_u64, flag()).prop_map(|(start, addend)| Block::Rows { start, addend }),
        1 => flag().prop_map(|shared| Block::Embedding { shared }),
    ]
}

fn build(recipe: &Recipe) -> RandomModel {
    let mut builder = Builder::new(recipe.clone());
    builder.embedding(false);
    for (layer, &(block, picks)) in recipe.blocks.iter().enumerate() {
        builder.scope = format!("layers.{layer}").into();
        builder.block(block, picks);
    }
    builder.scope = "head".into();
    let loss = builder.head(recipe.head);
    builder.graph.output("loss", loss, OutputKind::Read);
    RandomModel {
        forward: Forward { graph: builder.graph },
        batch: BatchSpec {
            rows: recipe.rows,
            vocab_size: recipe.vocab_size,
            context: recipe.heads.context,
            ignore_index: IGNORE,
        },
    }
}

struct Builder {
    recipe: Recipe,
    graph: Graph,
    scope: Arc<str>,
    /// Every `[rows, hidden]` made so far.
    made: Vec<ValueId>,
    weights: u32,
    /// The first `[hidden, hidden]` weight and the first embedding table: what later blocks can share.
    square: Option<ValueId>,
    table: Option<ValueId>,
    /// Cosines and sines, made once for all layers.
    angles: Option<ValueId>,
}

impl Builder {
    fn new(recipe: Recipe) -> Self {
        Self {
            recipe,
            graph: Graph::new(),
            scope: "embed".into(),
            made: Vec::new(),
            weights: 0,
            square: None,
            table: None,
            angles: None,
        }
    }

    fn block(&mut self, block: Block, picks: Picks) {
        let [x, other] = picks.map(|back| self.made[self.made.len() - 1 - back % self.made.len()]);
        let y = match block {
            Block::Linear { bias, shared, addend } => {
                let weight = match (shared, self.square) {
                    (true, Some(weight)) => weight,
                    _ => self.matrix(self.recipe.hidden, self.recipe.hidden),
                };
                self.square.get_or_insert(weight);
                self.linear(x, weight, bias, addend.then_some(other))
            }
            Block::RmsNorm => self.rms_norm(x),
            Block::LayerNorm => {
                let hidden = self.recipe.hidden;
                let operands = [
                    x,
                    self.weight("weight", [hidden], 1.0),
                    self.weight("bias", [hidden], 1.0),
                ];
                self.push(LayerNorm { eps: EPS }, &operands)
            }
            Block::Gelu { approximate, reshaped } => {
                let (rows, hidden) = (self.recipe.rows, self.recipe.hidden);
                let view = |shape| Reshape {
                    shape: Shape::from(shape),
                };
                if reshaped {
                    let flat = self.push(view(vec![hidden, rows]), &[x]);
                    let y = self.push(Gelu { approximate }, &[flat]);
                    self.push(view(vec![rows, hidden]), &[y])
                } else {
                    self.push(Gelu { approximate }, &[x])
                }
            }
            Block::Gate => {
                let gate = self.rms_norm(x);
                self.push(SwiGlu {}, &[gate, other])
            }
            Block::Mlp => self.mlp(x),
            Block::Attention { window } => self.attention(x, window),
            Block::Add => self.push(Add {}, &[x, other]),
            Block::Cast { dtype } => {
                let narrow = self.push(Cast { dtype }, &[x]);
                self.push(Cast { dtype: DType::F32 }, &[narrow])
            }
            Block::Rows { start, addend } => self.rows(x, start, addend.then_some(other)),
            Block::Embedding { shared } => return self.embedding(shared),
        };
        self.made.push(y);
    }

    fn embedding(&mut self, shared: bool) {
        let tokens = self.fed("tokens");
        let table = match (shared, self.table) {
            (true, Some(table)) => table,
            _ => self.weight("weight", [self.recipe.vocab_size, self.recipe.hidden], 1.0),
        };
        self.table.get_or_insert(table);
        let y = self.push(Embedding::default(), &[tokens, table]);
        self.made.push(y);
    }

    fn mlp(&mut self, x: ValueId) -> ValueId {
        let (hidden, intermediate) = (self.recipe.hidden, self.recipe.hidden + 3);
        let normed = self.rms_norm(x);
        let [gate, up] = ["gate", "up"].map(|_| {
            let weight = self.matrix(intermediate, hidden);
            self.linear(normed, weight, false, None)
        });
        let product = self.push(SwiGlu {}, &[gate, up]);
        let down = self.matrix(hidden, intermediate);
        self.linear(product, down, false, Some(x))
    }

    /// About half of the rows of `x` from `start` on, put back where they were.
    fn rows(&mut self, x: ValueId, start: u64, addend: Option<ValueId>) -> ValueId {
        let total = self.recipe.rows;
        let start = start % total;
        let rows = (total - start).div_ceil(2);
        let slice = self.push(SliceRows { start, rows }, &[x]);
        let accumulate = match addend {
            Some(_) => Accumulate::NONE.with(1, 0).0,
            None => Accumulate::NONE,
        };
        let pad = PadRows {
            start,
            total,
            accumulate,
        };
        let operands: Vec<ValueId> = [slice].into_iter().chain(addend).collect();
        self.push(pad, &operands)
    }

    fn attention(&mut self, x: ValueId, window: Option<u64>) -> ValueId {
        let Heads {
            kv_heads,
            group,
            head_dim,
            context,
        } = self.recipe.heads;
        let (hidden, heads) = (self.recipe.hidden, kv_heads * group);
        let normed = self.rms_norm(x);
        let [query, key, value] = [heads, kv_heads, kv_heads].map(|heads| {
            let weight = self.matrix(heads * head_dim, hidden);
            self.linear(normed, weight, false, None)
        });
        let angles = self.angles.unwrap_or_else(|| {
            let positions = self.fed("positions");
            let table = RopeTable {
                head_dim,
                theta: 1e4,
                scaling: window.map(|_| RopeScaling::Linear { factor: 2.0 }),
            };
            self.push(table, &[positions])
        });
        self.angles = Some(angles);
        let [query, key] = [query, key].map(|x| self.push(Rope { inverse: false }, &[x, angles]));
        let op = Attention {
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            context,
            window,
        };
        let doc_start = self.fed("doc_start");
        let o = self.push(op, &[query, key, value, doc_start]);
        let weight = self.matrix(hidden, heads * head_dim);
        self.linear(o, weight, false, Some(x))
    }

    fn head(&mut self, head: Head) -> ValueId {
        let x = self.made[self.made.len() - 1];
        let x = self.rms_norm(x);
        let (targets, token_count) = (self.fed("targets"), self.fed("token_count"));
        // So that there is something to train.
        self.recipe.frozen = 0;
        let own = |builder: &mut Self| builder.matrix(builder.recipe.vocab_size, builder.recipe.hidden);
        match head {
            Head::Chunked { chunk, tied } => {
                let weight = match self.table.filter(|_| tied) {
                    Some(table) => table,
                    None => own(self),
                };
                self.push(
                    LinearCrossEntropy::new(chunk, IGNORE),
                    &[x, weight, targets, token_count],
                )
            }
            Head::Plain { bias } => {
                let weight = own(self);
                let logits = self.linear(x, weight, bias, None);
                let op = SoftmaxCrossEntropy { ignore_index: IGNORE };
                self.push(op, &[logits, targets, token_count])
            }
        }
    }

    fn rms_norm(&mut self, x: ValueId) -> ValueId {
        let weight = self.weight("norm", [self.recipe.hidden], 1.0);
        self.push(RmsNorm { eps: EPS }, &[x, weight])
    }

    fn linear(&mut self, x: ValueId, weight: ValueId, bias: bool, addend: Option<ValueId>) -> ValueId {
        let mut operands = vec![x, weight];
        if bias {
            let columns = self.graph.ty(weight).dim(0);
            operands.push(self.weight("bias", [columns], 1.0));
        }
        let accumulate = match addend {
            Some(_) => Accumulate::NONE.with(operands.len(), 0).0,
            None => Accumulate::NONE,
        };
        operands.extend(addend);
        self.push(Linear { bias, accumulate }, &operands)
    }

    fn matrix(&mut self, rows: u64, cols: u64) -> ValueId {
        self.weight("weight", [rows, cols], 1.0 / (cols as f64).sqrt())
    }

    fn weight(&mut self, name: &str, shape: impl Into<Shape>, std: f64) -> ValueId {
        let number = self.weights;
        self.weights += 1;
        let binding = Binding::Persistent {
            init: Init::Normal(std),
            trainable: self.recipe.frozen.rotate_right(number) & 1 == 0,
        };
        let name = format!("{}.{number}.{name}", self.scope);
        self.graph.input(&name, Type::f32(shape), Role::Weight, binding)
    }

    /// The fed input of that name, made when first asked for.
    fn fed(&mut self, name: &str) -> ValueId {
        let ty = match name {
            "token_count" => Type::f32([1]),
            _ => Type::i32([self.recipe.rows]),
        };
        let known = self.graph.input_named(name);
        known.unwrap_or_else(|| self.graph.input(name, ty, Role::Input, Binding::Fed))
    }

    /// Appends a node; gives its first result.
    fn push(&mut self, op: impl Into<Op>, operands: &[ValueId]) -> ValueId {
        let pushed = self
            .graph
            .push(op.into(), operands, &self.scope, Phase::Forward, Role::Activation);
        match pushed {
            Ok(results) => results[0],
            Err(error) => panic!("the generator made a malformed model: {error}"),
        }
    }
}
