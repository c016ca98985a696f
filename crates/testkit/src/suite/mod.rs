//! The operation suite: cases for every operation, each attribute of it and awkward sizes, and one check that any backend passes.
//!
//! A backend's test is three lines: implement [`Backend`], call [`check_all`] on [`edge_cases`], and [`check`] under proptest on
//! [`any_case`].

mod attention;
mod check;
mod dropout;
mod elementwise;
mod kv_cache;
mod loss;
mod matrix;
mod norm;
mod optimizer;
mod quantised;
mod rows;
mod transfer;

use std::fmt;

use proptest::prelude::*;
use tightfit_ir::op::Rule;
use tightfit_ir::{DType, Op, Shape, Tensor, Type};

use crate::rng::Rng;

pub(crate) use check::within;
pub use check::{Backend, check, check_all, placements};
pub use quantised::Quantised;

/// One operation with operands. Every element of an operand is an exact number of its dtype.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// What is particular about it, e.g. `large values`.
    pub name: String,
    /// The operation.
    pub op: Op,
    /// The operands' types.
    pub types: Vec<Type>,
    /// The operands.
    pub inputs: Vec<Tensor>,
    /// The bytes of the one that is quantised.
    pub quantised: Option<Quantised>,
}

impl Case {
    /// The results' types.
    ///
    /// # Panics
    /// The operands do not fit the operation.
    pub fn results(&self) -> Vec<Type> {
        self.op
            .infer(&self.types)
            .unwrap_or_else(|error| panic!("{self}: {error}"))
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.op)?;
        for ty in &self.types {
            write!(f, " {ty}")?;
        }
        write!(f, " ({})", self.name)
    }
}

/// The sizes that a family's cases are built from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Tokens.
    pub rows: u64,
    /// Columns of a result: outputs of a linear layer, hidden size, vocabulary.
    pub cols: u64,
    /// The inner dimension of a product.
    pub inner: u64,
}

/// Sizes at which kernels go wrong: single rows and columns, one below and above the widths of vectors and tiles, one long
/// dimension at a time.
pub const EDGES: &[Dims] = &[
    dims(1, 1, 1),
    dims(1, 7, 3),
    dims(2, 1, 19),
    dims(3, 17, 33),
    dims(8, 16, 64),
    dims(16, 48, 8),
    dims(33, 15, 7),
    dims(65, 31, 129),
    dims(130, 72, 20),
    dims(20, 24, 520),
    dims(12, 530, 24),
    dims(270, 13, 9),
];

const fn dims(rows: u64, cols: u64, inner: u64) -> Dims {
    Dims { rows, cols, inner }
}

/// How activations are stored, one after the other.
const ACTIVATIONS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Every case at every one of the [`EDGES`]: with activations in `f32`, and in one format of 16 bits, which take turns. They differ in
/// loads and stores alone, for which half of the sizes are enough.
pub fn edge_cases() -> Vec<Case> {
    let edges = EDGES.iter().zip([DType::Bf16, DType::F16].into_iter().cycle()).zip(0..);
    edges
        .flat_map(|((&dims, narrow), seed)| {
            let both = [DType::F32, narrow].into_iter();
            both.flat_map(move |dtype| {
                FAMILIES
                    .iter()
                    .flat_map(move |&family| collect(family, dims, dtype, seed))
            })
        })
        .collect()
}

/// One random case: any operation, any attributes, any small sizes. Sizes shrink towards 1.
pub fn any_case() -> impl Strategy<Value = Case> {
    (
        1..40_u64,
        1..70_u64,
        1..70_u64,
        any::<prop::sample::Index>(),
        0..ACTIVATIONS.len(),
        any::<u64>(),
    )
        .prop_map(|(rows, cols, inner, index, activation, seed)| {
            let family = FAMILIES[index.index(FAMILIES.len())];
            let dims = Dims { rows, cols, inner };
            let mut made = collect(family, dims, ACTIVATIONS[activation], seed);
            if made.is_empty() {
                made = collect(family, dims, DType::F32, seed);
            }
            made.swap_remove(Rng::new(seed).below(made.len() as u64) as usize)
        })
}

/// The cases of all operations at those sizes, with data from a seed.
pub fn cases(dims: Dims, seed: u64) -> Vec<Case> {
    let families = FAMILIES.iter();
    families.flat_map(|&family| collect_all(family, dims, seed)).collect()
}

/// The cases of one operation's family at those sizes.
pub fn cases_like(op: &Op, dims: Dims, seed: u64) -> Vec<Case> {
    collect_all(family_of(op), dims, seed).collect()
}

/// Adds the cases of one operation.
type Family = fn(&mut Cases);

/// Lists the operations with the function that makes their cases. The match is closed: an operation without cases does not compile.
macro_rules! families {
    ($($name:ident => $family:path),+ $(,)?) => {
        const FAMILIES: &[Family] = &[$($family),+];

        fn family_of(op: &Op) -> Family {
            match op { $(Op::$name(_) => $family),+ }
        }
    };
}

families! {
    Add => elementwise::add,
    Attention => attention::attention,
    AttentionBackward => attention::attention_backward,
    CachedAttention => kv_cache::cached_attention,
    Cast => elementwise::cast,
    SoftmaxCrossEntropy => loss::softmax_cross_entropy,
    SoftmaxCrossEntropyBackward => loss::softmax_cross_entropy_backward,
    Dropout => dropout::dropout,
    Embedding => matrix::embedding,
    EmbeddingBackward => matrix::embedding_backward,
    Fetch => transfer::fetch,
    Gelu => elementwise::gelu,
    GeluBackward => elementwise::gelu_backward,
    KvAppend => kv_cache::kv_append,
    LayerNorm => norm::layer_norm,
    LayerNormBackward => norm::layer_norm_backward,
    Linear => matrix::linear,
    LinearBackwardInput => matrix::linear_backward_input,
    LinearBackwardWeight => matrix::linear_backward_weight,
    BiasBackward => matrix::bias_backward,
    LinearCrossEntropy => loss::linear_cross_entropy,
    Adafactor => optimizer::adafactor,
    AdamW => optimizer::adamw,
    AdamW8bit => optimizer::adamw_8bit,
    Apollo => optimizer::apollo,
    AppliedStep => optimizer::applied_step,
    GlobalNorm => optimizer::global_norm,
    GradientFactor => optimizer::gradient_factor,
    Lion => optimizer::lion,
    Norm => optimizer::norm,
    PadRows => rows::pad_rows,
    Reshape => elementwise::reshape,
    RmsNorm => norm::rms_norm,
    RmsNormBackward => norm::rms_norm_backward,
    Rope => attention::rope,
    RopeTable => attention::rope_table,
    Scale => elementwise::scale,
    Settle => transfer::settle,
    Sgd => optimizer::sgd,
    Store => transfer::store,
    SliceRows => rows::slice_rows,
    SwiGlu => elementwise::swiglu,
    SwiGluBackward => elementwise::swiglu_backward,
    UpdateLossScale => optimizer::update_loss_scale,
    Zero => elementwise::zero,
}

/// Where a family puts its cases.
struct Cases {
    dims: Dims,
    /// Of activations; those of operands and results that an operation has in any float dtype.
    dtype: DType,
    rng: Rng,
    made: Vec<Case>,
}

/// A family's cases with activations of every dtype.
fn collect_all(family: Family, dims: Dims, seed: u64) -> impl Iterator<Item = Case> {
    ACTIVATIONS
        .into_iter()
        .flat_map(move |dtype| collect(family, dims, dtype, seed))
}

/// A family's cases with activations of that dtype; in 16 bits only those that have any.
fn collect(family: Family, dims: Dims, dtype: DType, seed: u64) -> Vec<Case> {
    let mut cases = Cases {
        dims,
        dtype,
        rng: Rng::new(seed),
        made: Vec::new(),
    };
    family(&mut cases);
    let has_any = |case: &Case| case.types.iter().chain(&case.results()).any(|ty| ty.dtype == dtype);
    cases.made.retain(|case| dtype == DType::F32 || has_any(case));
    cases.made
}

impl Cases {
    /// Adds a case with all its variants that accumulate: each result alone and all that can together.
    fn add(&mut self, name: &str, op: impl Into<Op>, operands: Vec<Operand>) {
        let op = op.into();
        let types: Vec<Type> = operands.iter().map(|operand| operand.0.clone()).collect();
        let mut case = Case {
            name: name.to_owned(),
            op,
            inputs: operands.into_iter().map(|operand| operand.1).collect(),
            types,
            quantised: None,
        };
        self.made.push(case.clone());
        let results = case.results();
        let able: Vec<usize> = (0..results.len())
            .filter(|&output| case.op.accumulating(output).is_some_and(|(op, _)| op != case.op))
            .collect();
        for &output in &able {
            let mut alone = case.clone();
            self.accumulate(&mut alone, output, &results[output]);
            self.made.push(alone);
        }
        if able.len() > 1 {
            for &output in able.iter().rev() {
                self.accumulate(&mut case, output, &results[output]);
            }
            self.made.push(case);
        }
    }

    /// Turns a case into the variant that adds result `output` to one more operand.
    fn accumulate(&mut self, case: &mut Case, output: usize, ty: &Type) {
        if let Some((op, addend)) = case.op.accumulating(output) {
            case.op = op;
            let (ty, tensor) = exact(ty.clone(), self.rng.tensor(ty.shape.clone(), 1.0));
            case.types.insert(addend, ty);
            case.inputs.insert(addend, tensor);
        }
    }

    /// Normal `f32` values of that spread.
    fn normal(&mut self, shape: impl Into<Shape>, std: f64) -> Operand {
        float(self.rng.tensor(shape, std))
    }

    /// Normal values of that spread in the dtype of activations.
    fn activation(&mut self, shape: impl Into<Shape>, std: f64) -> Operand {
        let tensor = self.rng.tensor(shape, std);
        exact(Type::new(self.dtype, tensor.shape.clone()), tensor)
    }

    /// Normal values of that spread in the dtype of a weight, which may be any float whatever activations are.
    fn weight(&mut self, shape: impl Into<Shape>, std: f64) -> Operand {
        let dtype = ACTIVATIONS[self.rng.below(3) as usize];
        let tensor = self.rng.tensor(shape, std);
        exact(Type::new(dtype, tensor.shape.clone()), tensor)
    }

    /// Integers in `0..n`.
    fn ids(&mut self, rows: u64, n: u64) -> Operand {
        integer((0..rows).map(|_| self.rng.below(n) as f64).collect())
    }
}

/// A type and a tensor of it.
type Operand = (Type, Tensor);

/// An `f32` operand; the tensor is rounded to it.
fn float(tensor: Tensor) -> Operand {
    exact(Type::f32(tensor.shape.clone()), tensor)
}

/// An operand of that type, to which the tensor is rounded.
fn exact(ty: Type, mut tensor: Tensor) -> Operand {
    let round = |x: f64| match ty.dtype {
        DType::Bf16 => half::bf16::from_f64(x).to_f64(),
        DType::F16 => half::f16::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    };
    tensor.data.iter_mut().for_each(|x| *x = round(*x));
    (ty, tensor)
}

/// An `i32` operand of rank 1.
fn integer(data: Vec<f64>) -> Operand {
    let tensor = Tensor::new([data.len() as u64], data);
    (Type::i32(tensor.shape.clone()), tensor)
}

/// Results of an operation's reference as operands: what a backward node reads of its forward.
fn forward(op: impl Into<Op>, operands: &[Operand]) -> Vec<Operand> {
    let (types, inputs): (Vec<Type>, Vec<Tensor>) = operands.iter().cloned().unzip();
    let case = Case {
        name: "a forward".to_owned(),
        op: op.into(),
        types,
        inputs,
        quantised: None,
    };
    let results = case.op.reference(&case.inputs);
    case.results()
        .into_iter()
        .zip(results)
        .map(|(ty, tensor)| exact(ty, tensor))
        .collect()
}
