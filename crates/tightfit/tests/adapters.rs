//! Adapters agree with PEFT, by the numbers and files that PEFT made (`fixtures/peft_lora.py`): logits, ten steps of training, and the
//! files' form. Merged weights give the logits of the model with its adapter. Files that do not fit are refused by their place.

#[path = "common/fixture.rs"]
mod fixture;
#[path = "common/run.rs"]
mod run;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use fixture::{Fixture, fill_weights, value};
use run::{Machine, Recorder, persistent, relative_error};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tightfit::adapters::{ADAPTER_CONFIG, ADAPTER_MODEL, Adapter, PREFIX, config_json};
use tightfit::merge::merge;
use tightfit::pretrained::Pretrained;
use tightfit::{Adam, BatchShape, Optimizer, OptimizerConfig, Step, training_step};
use tightfit_cpu::simd::Isa;
use tightfit_exec::load;
use tightfit_ir::{Routine, Tensor};
use tightfit_pass::{LoraConfig, MICRO_STEP, Pattern, TRAIN, Targets, linear_layers, lora, no_grad};
use tightfit_testkit::interpret::Named;

/// On logits, and on the loss of each step.
const TOLERANCE: f64 = 1e-4;
const LOGITS: &str = "logits";
const ADAPTERS: [&str; 2] = ["all_linear", "rslora"];

fn fixture() -> Fixture {
    Fixture::load("peft_lora")
}

fn peft(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/peft")
        .join(name)
}

fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("adapters").join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn shape(fixture: &Fixture) -> BatchShape {
    let (batch, seq) = fixture.batch_shape();
    BatchShape {
        batch,
        seq,
        loss_chunk: 7,
    }
}

/// A Hugging Face folder with the fixture's model, its weights stored as `dtype`.
fn base(name: &str, dtype: Dtype) -> PathBuf {
    let dir = folder(name);
    let config = fixture().llama();
    let tensors = config.weights().unwrap().into_iter().map(|(name, shape)| {
        let centre = if shape.dims().len() == 1 { 1.0 } else { 0.0 };
        let numbers = (0..shape.elements() as u32).map(|i| centre + value(&name, i) / 131_072.0);
        let bytes: Vec<u8> = match dtype {
            Dtype::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
            Dtype::BF16 => numbers.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect(),
            Dtype::F16 => numbers.flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect(),
            other => panic!("{other:?}"),
        };
        let dims: Vec<usize> = shape.dims().iter().map(|&dim| dim as usize).collect();
        (name, (dims, bytes))
    });
    write(&dir.join("model.safetensors"), dtype, &tensors.collect());
    fs::write(dir.join("config.json"), config.to_hf().to_string()).unwrap();
    dir
}

fn write(path: &Path, dtype: Dtype, tensors: &BTreeMap<String, (Vec<usize>, Vec<u8>)>) {
    let views = tensors
        .iter()
        .map(|(name, (dims, bytes))| (name, TensorView::new(dtype, dims.clone(), bytes).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The logits of the fixture's first batch.
fn logits(model: &Pretrained) -> Vec<f32> {
    let fixture = fixture();
    let forward = model.adapt(model.config.logits(shape(&fixture)).unwrap()).unwrap();
    let mut step = Step {
        routines: vec![Routine::of(LOGITS, no_grad(forward).unwrap().graph)],
    };
    let load = load::routine(&model.fills(), step.persistent());
    step.routines.push(load);
    let mut session = Machine::new(Isa::detect(), 2).session(step);
    model.load(&mut session).unwrap();
    let data = fixture.batch(0, 1).remove(0);
    let mut recorder = Recorder::new(&session, |_, _| data.clone());
    session.run(LOGITS, &mut recorder).unwrap();
    recorder.runs.remove(0).results.remove(LOGITS).unwrap()
}

#[test]
fn adapters_that_peft_saved_give_its_logits() {
    let base = base("peft-base", Dtype::F32);
    let plain = logits(&Pretrained::open(&base).unwrap());
    for (name, expected) in fixture().tensors("/logits") {
        let model = Pretrained::open_with(&base, Some(&peft(&name))).unwrap();
        let found = logits(&model);
        let error = relative_error(&found, &expected);
        assert!(error <= TOLERANCE, "{name}: logits are off by {error:e}");
        assert!(
            relative_error(&plain, &expected) > 100.0 * TOLERANCE,
            "{name}: the adapter does nothing"
        );
    }
}

#[test]
fn ten_steps_are_those_of_peft() {
    let fixture = fixture();
    let optimizer = |field: &str| fixture.number(&format!("/training/optimizer/{field}"));
    let config = OptimizerConfig {
        optimizer: Optimizer::AdamW(Adam {
            beta1: optimizer("betas/0"),
            beta2: optimizer("betas/1"),
            eps: optimizer("eps"),
        }),
        weight_decay: optimizer("weight_decay"),
        clip_norm: None,
        loss_scale: None,
        seed: 1,
    };
    let adapters = LoraConfig {
        rank: fixture.number("/adapters/all_linear/r") as u64,
        alpha: fixture.number("/adapters/all_linear/lora_alpha"),
        rslora: false,
        dropout: 0.0,
        seed: 0,
        targets: Targets::AllLinear,
    };
    for threads in [1, 2] {
        let forward = lora(fixture.llama().loss(shape(&fixture)).unwrap(), &adapters).unwrap();
        let step = training_step(forward, &config, 1, None).unwrap();
        let mut session = Machine::new(Isa::detect(), threads).session(step);
        fill_weights(&mut session);
        let initial = persistent(&mut session);
        for (index, expected) in fixture.numbers("/training/losses").into_iter().enumerate() {
            let batch = fixture.batch(index % 4, 1).remove(0);
            let mut recorder = Recorder::new(&session, |program, _| match program {
                MICRO_STEP => batch.clone(),
                _ => Named::from([
                    ("lr".to_owned(), Tensor::scalar(optimizer("lr"))),
                    ("step".to_owned(), Tensor::scalar((index + 1) as f64)),
                ]),
            });
            session.run(TRAIN, &mut recorder).unwrap();
            let loss = f64::from(recorder.runs[0].results["loss"][0]);
            assert!(
                (loss - expected).abs() <= TOLERANCE * expected,
                "step {index}: {loss}, expected {expected}"
            );
        }
        let trained = persistent(&mut session);
        let expected: BTreeMap<_, _> = fixture.tensors("/training/final_parameters").into_iter().collect();
        for (name, initial) in initial.iter().filter(|(name, _)| !name.contains(".exp_avg")) {
            let Some(expected) = expected.get(name) else {
                assert!(trained[name] == *initial, "{name} is frozen");
                continue;
            };
            let change = |to: &[f32]| to.iter().zip(initial).map(|(to, from)| to - from).collect::<Vec<_>>();
            let error = relative_error(&change(&trained[name]), &change(expected));
            assert!(error <= 1e-3, "the change of {name} is off by {error:e}");
        }
        assert!(expected.keys().all(|name| trained.contains_key(name)));
    }
}

/// PEFT wrote it for the same adapters: what it says is what ours says, and theirs has more. It may name the same layers otherwise.
#[test]
fn the_configuration_is_one_of_peft() {
    let forward = fixture().llama().loss(shape(&fixture())).unwrap();
    let all = linear_layers(&forward);
    let named = |config: &Value| {
        let names = config["target_modules"].as_array().unwrap().iter();
        let names = names.map(|name| Pattern(name.as_str().unwrap().to_owned()));
        let targets = Targets::Patterns(names.collect());
        let layers = all.iter().filter(|layer| targets.select(layer));
        layers.cloned().collect::<Vec<_>>()
    };
    for name in ADAPTERS {
        let text = fs::read_to_string(peft(name).join(ADAPTER_CONFIG)).unwrap();
        let theirs: Value = serde_json::from_str(&text).unwrap();
        let ours = config_json(Adapter::open(&peft(name)).unwrap().config(), &all, None);
        assert_eq!(named(&theirs), named(&ours), "{name}");
        for (key, value) in ours.as_object().unwrap() {
            assert!(key == "target_modules" || theirs[key] == *value, "{name}: {key}");
        }
    }
}

#[test]
fn merged_weights_give_the_logits_of_model_and_adapter() {
    // Half an ulp of each weight, which is what rounding a sum once comes to.
    for (dtype, tolerance) in [(Dtype::F32, 1e-5), (Dtype::F16, 2e-3), (Dtype::BF16, 2e-2)] {
        let base = base(&format!("merge-{dtype:?}"), dtype);
        let plain = logits(&Pretrained::open(&base).unwrap());
        for name in ADAPTERS {
            let model = Pretrained::open_with(&base, Some(&peft(name))).unwrap();
            let expected = logits(&model);
            let out = folder(&format!("merged-{dtype:?}-{name}"));
            let mut read = 0;
            let bytes = merge(&model, &out.join("model.safetensors"), |bytes| read += bytes, || Ok(())).unwrap();
            assert_eq!(bytes, read, "each tensor is stored as it was");
            fs::copy(base.join("config.json"), out.join("config.json")).unwrap();
            let merged = Pretrained::open(&out).unwrap();
            let (of, then) = (model.checkpoint().tensors(), merged.checkpoint().tensors());
            assert!(of.iter().all(|(name, entry)| then[name].encoding == entry.encoding));
            let (error, effect) = (
                relative_error(&logits(&merged), &expected),
                relative_error(&plain, &expected),
            );
            assert!(error <= tolerance, "{dtype:?}, {name}: off by {error:e}");
            assert!(
                error <= 0.1 * effect,
                "{dtype:?}, {name}: off by {error:e} of {effect:e}"
            );
        }
    }
}

/// An adapter of the fixture's model with one thing changed in its settings.
fn with_setting(key: &str, value: Value) -> PathBuf {
    let dir = folder("hostile");
    let text = fs::read_to_string(peft("rslora").join(ADAPTER_CONFIG)).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config[key] = value;
    fs::write(dir.join(ADAPTER_CONFIG), config.to_string()).unwrap();
    fs::copy(peft("rslora").join(ADAPTER_MODEL), dir.join(ADAPTER_MODEL)).unwrap();
    dir
}

#[test]
fn settings_that_mean_something_else_are_refused_by_their_name() {
    for (key, value) in [
        ("peft_type", json!("IA3")),
        ("r", json!(0)),
        ("r", json!(-1)),
        ("r", json!(3.5)),
        ("r", json!(1_u64 << 40)),
        ("r", json!("3")),
        ("lora_alpha", json!(0)),
        ("lora_alpha", json!(1e300)),
        ("lora_alpha", json!(null)),
        ("use_rslora", json!("yes")),
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("fan_in_fan_out", json!(true)),
        ("init_lora_weights", json!("pissa")),
        ("kasa_config", json!({ "beta": 1 })),
        ("modules_to_save", json!(["lm_head"])),
        ("rank_pattern", json!({ "q_proj": 8 })),
        ("alpha_pattern", json!({ "q_proj": 8 })),
    ] {
        let error = Adapter::open(&with_setting(key, value.clone()))
            .unwrap_err()
            .to_string();
        for words in [key, ADAPTER_CONFIG, &value.to_string()] {
            assert!(error.contains(words), "{key} {value}: {error}");
        }
    }
    for text in ["", "{", "[]", "{\"peft_type\": \"LORA\"}", &"[".repeat(100_000)] {
        let dir = with_setting("r", json!(3));
        fs::write(dir.join(ADAPTER_CONFIG), text).unwrap();
        let error = Adapter::open(&dir).unwrap_err().to_string();
        assert!(error.contains(ADAPTER_CONFIG), "{error}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_their_name() {
    let base = base("hostile-base", Dtype::F32);
    let q = |layer: &str, matrix: &str| format!("{PREFIX}model.layers.{layer}.self_attn.q_proj.lora_{matrix}.weight");
    let pair = |layer: &str, a: [usize; 2], b: [usize; 2]| {
        BTreeMap::from([(q(layer, "A"), a.to_vec()), (q(layer, "B"), b.to_vec())])
    };
    let (a, b) = ([3, 32], [32, 3]);
    let mut half_a_pair = pair("0", a, b);
    half_a_pair.remove(&q("0", "B"));
    let named = |name: &str| BTreeMap::from([(name.to_owned(), vec![3, 32])]);
    let norm = format!("{PREFIX}model.norm");
    let of_norm = ["A", "B"].map(|matrix| (format!("{norm}.lora_{matrix}.weight"), vec![3, 3]));
    for (tensors, tensor, words) in [
        (pair("0", [4, 32], [32, 4]), q("0", "A"), "has 4 rows, the rank `r`"),
        (pair("0", a, [32, 2]), q("0", "B"), "has 2 columns"),
        (pair("0", [3, 31], b), q("0", "A"), "has shape [3, 31]"),
        (pair("0", a, [33, 3]), q("0", "B"), "has shape [33, 3]"),
        (pair("7", a, b), q("7", "A"), "a layer that the model does not have"),
        (half_a_pair, q("0", "A"), "beside it"),
        (
            named("model.layers.0.lora_A.weight"),
            "model.layers.0.lora_A.weight".to_owned(),
            "none of an adapter",
        ),
        (named(&format!("{PREFIX}x")), format!("{PREFIX}x"), "none of an adapter"),
        (BTreeMap::from(of_norm), format!("{norm}.lora_A.weight"), "not linear"),
    ] {
        let dir = with_setting("r", json!(3));
        let tensors = tensors.into_iter().map(|(name, dims)| {
            let bytes = vec![0; 4 * dims.iter().product::<usize>()];
            (name, (dims, bytes))
        });
        write(&dir.join(ADAPTER_MODEL), Dtype::F32, &tensors.collect());
        let error = Pretrained::open_with(&base, Some(&dir)).unwrap_err().to_string();
        for words in [&*tensor, words, ADAPTER_MODEL] {
            assert!(error.contains(words), "{words}: {error}");
        }
    }
    let dir = with_setting("r", json!(3));
    let whole = fs::read(dir.join(ADAPTER_MODEL)).unwrap();
    for bytes in [0, 7, 8, 100, whole.len() - 1] {
        fs::write(dir.join(ADAPTER_MODEL), &whole[..bytes]).unwrap();
        let error = Adapter::open(&dir).unwrap_err().to_string();
        assert!(error.contains(ADAPTER_MODEL), "{bytes}: {error}");
    }
}
