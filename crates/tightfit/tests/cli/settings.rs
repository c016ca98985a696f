//! Flags and the settings file.

use std::fs;

use crate::util::{expect, folder, json, names, run, tiny, train, with};

/// What `--json` promises; other fields may come.
const FIELDS: [&str; 18] = [
    "schema_version",
    "status",
    "planned_peak_bytes",
    "arena_bytes",
    "lower_bound_bytes",
    "measured_arena_peak_bytes",
    "reserve_bytes",
    "process_peak_bytes",
    "budget_bytes",
    "parameters",
    "steps",
    "tokens_per_step",
    "seconds_per_step",
    "tokens_per_second",
    "loss_first",
    "loss_last",
    "eval_loss",
    "entropy_floor",
];

#[test]
fn json_is_one_object_with_every_field() {
    let done = expect(tiny("--json"), 0, &["arena", "step 3/3", "held out"]);
    let report = json(&done);
    for field in FIELDS {
        assert!(!report[field].is_null(), "{field} in {report:#}");
    }
    assert_eq!(report["status"], "done");
    assert_eq!(report["steps"], 3);
    assert_eq!(report["measured_arena_peak_bytes"], report["planned_peak_bytes"]);

    let planned = json(&expect(tiny("--json --plan-only"), 0, &["arena"]));
    let refused = json(&expect(
        tiny("--json --budget 1KiB"),
        3,
        &["does not fit", "largest buffers", "budget"],
    ));
    for (report, status) in [(&planned, "planned"), (&refused, "does_not_fit")] {
        assert_eq!(report["status"], status);
        let unknown = FIELDS.iter().filter(|&&field| report.get(field).unwrap().is_null());
        let expected = [
            "measured_arena_peak_bytes",
            "process_peak_bytes",
            "steps",
            "seconds_per_step",
            "tokens_per_second",
            "loss_first",
            "loss_last",
            "eval_loss",
        ];
        assert_eq!(Vec::from_iter(unknown.copied()), expected);
    }
}

#[test]
fn errors_print_no_object() {
    for (flags, code) in [("--steps 0", 2), ("--plan nowhere.json", 4), ("--lr 1e30", 1)] {
        let done = expect(tiny(&format!("--json {flags}")), code, &["error: "]);
        assert_eq!(done.stdout, "");
    }
}

#[test]
fn absurd_values_are_refused_by_name() {
    let counts = "batch seq steps micro-batch loss-chunk mlp-tile eval-batches eval-batch threads num-hidden-layers hidden-size \
                  num-attention-heads num-key-value-heads vocab-size intermediate-size warmup-steps eval-every seed";
    for flag in counts.split_whitespace() {
        for value in [
            "-1",
            "18446744073709551615",
            "99999999999999999999",
            "1.5",
            "NaN",
            "many",
        ] {
            expect(
                tiny(&format!("--{flag} {value}")),
                2,
                &["error: ", &format!("--{flag}")],
            );
        }
        if !["warmup-steps", "eval-every", "seed"].contains(&flag) {
            expect(tiny(&format!("--{flag} 0")), 2, &[&format!("--{flag} is 0")]);
        }
    }
    let numbers =
        "lr min-lr-ratio weight-decay adam-eps clip-norm beta1 beta2 rms-norm-eps rope-theta initializer-range";
    for flag in numbers.split_whitespace() {
        for value in ["-1", "NaN", "inf", "1e400", "much"] {
            expect(
                tiny(&format!("--{flag} {value}")),
                2,
                &["error: ", &format!("--{flag}")],
            );
        }
    }
}

#[test]
fn settings_that_do_not_go_together_are_refused() {
    for (flags, words) in [
        ("--vocab-size 255", ["--vocab-size is 255", "256"]),
        ("--hidden-size 252 --heads 4", ["--hidden-size is 252", "heads of 63"]),
        (
            "--hidden-size 32 --heads 3",
            ["--hidden-size is 32", "num_attention_heads 3"],
        ),
        (
            "--heads 4 --kv-heads 3",
            ["--num-attention-heads is 4", "num_key_value_heads 3"],
        ),
        (
            "--batch 4 --micro-batch 3",
            ["--micro-batch is 3", "divide the batch of 4"],
        ),
        ("--threads 5000", ["--threads is 5000", "1024"]),
        ("--batch 65536 --seq 65536", ["--seq is 65536", "2147483647"]),
        ("--decay step", ["--decay", "cosine, linear or constant"]),
        (
            "--tie-word-embeddings=maybe",
            ["--tie-word-embeddings", "true or false"],
        ),
        ("--budget 1EiB", ["--budget", "KiB, MiB, GiB"]),
        ("--print-config --json", ["--print-config", "--json"]),
        ("--overwrite", ["--out", "required"]),
        (
            "--eval-batch 17 --batch 4 --eval-batches 4",
            ["--eval-batch is 17", "between 1 and 16"],
        ),
        (
            "--batch 2147483647 --seq 2 --micro-batch auto",
            ["--micro-batch is auto", "no divisor"],
        ),
        (
            "--seq 1073741824 --batch 4 --micro-batch auto --eval-batch 2",
            ["--seq is 1073741824", "an evaluation's batch has 2 sequences"],
        ),
        (
            "--batch 4 --micro-batch 2 --update-in-backward",
            ["--update-in-backward is true", "say --micro-batch 4"],
        ),
        ("--update-in-backward=maybe", ["--update-in-backward", "true or false"]),
        ("--recompute some", ["--recompute", "auto, none, block"]),
        ("--recompute 101%", ["--recompute", "from 0% to 100%"]),
        ("--recompute 3MiBs", ["--recompute", "such as 512MiB"]),
        ("--offload gradients", ["--offload", "`gradients` cannot be offloaded"]),
        (
            "--offload optimizer,none",
            ["--offload", "activations, optimizer and weights"],
        ),
        ("--offload=", ["--offload", "none, auto"]),
        ("--disk much", ["--disk", "such as 3.8GiB"]),
        (
            "--host-memory 4GiB",
            ["--host-memory is of no use on the CPU", "--disk"],
        ),
        (
            "--momentum 0.5",
            ["--momentum is of sgd", "--optimizer adamw has no use for it"],
        ),
        (
            "--optimizer sgd --beta1 0.5",
            ["--beta1 is of adamw, adamw-8bit, apollo, lion", "sgd"],
        ),
        (
            "--optimizer lion --apollo-rank 8",
            ["--apollo-rank is of apollo", "lion"],
        ),
        (
            "--method lora --base bf16 --base-embeddings",
            ["--base-embeddings is of quantised weights", "--base int8"],
        ),
    ] {
        expect(tiny(flags), 2, &words);
    }
    expect(with(tiny(""), "--budget", "12 parsecs"), 2, &["--budget", "`parsecs`"]);
    // Larger than 64 bits can address is larger than any budget.
    let vast =
        "--hidden-size 1048576 --layers 256 --heads 1024 --intermediate-size 16777216 --seq 2147483647 --plan-only";
    expect(tiny(vast), 3, &["error: "]);
}

#[test]
fn the_smallest_jobs_run() {
    for flags in [
        "--steps 1 --seq 1",
        "--seq 1 --micro-batch 1 --loss-chunk 1",
        "--heads 1 --hidden-size 2 --intermediate-size 1",
        "--lr 0 --clip-norm none --weight-decay 0",
        "--tie-word-embeddings=false --eval-every 1",
        "--micro-batch auto --loss-chunk auto --eval-batch auto",
    ] {
        expect(tiny(flags), 0, &[]);
    }
}

#[test]
fn a_flag_given_twice_counts_as_given_last() {
    let report = json(&expect(
        tiny("--json --plan-only --steps 7 --layers 3 --layers 2"),
        0,
        &[],
    ));
    assert_eq!(report["settings"]["steps"], 7);
    assert_eq!(report["settings"]["num_hidden_layers"], 2);
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_and_saves_nothing() {
    let dir = folder("not-finite");
    // With one step, only the evaluation sees what the update did.
    for flags in [
        "--lr 1e30",
        "--lr 1e38 --weight-decay 1e38 --steps 1 --warmup-steps 0",
        "--lr 1e30 --clip-norm none",
    ] {
        expect(with(tiny(flags), "--out", &dir), 1, &["at step", "--lr"]);
        let left = names(&dir);
        assert!(
            left.iter()
                .all(|name| !name.ends_with(".safetensors") && !name.starts_with("checkpoint-")),
            "{left:?}"
        );
    }
}

#[test]
fn printed_settings_make_the_same_plan() {
    let dir = folder("print-config");
    let file = dir.join("job.toml");
    let flags = "--layers 2 --batch 4 --micro-batch 2 --seq 24 --lr 1.25e-3 --clip-norm none --decay linear \
                 --tie-word-embeddings false --rms-norm-eps 1e-6 --rope-theta 5e5 --seed 9223372036854775807 \
                 --budget 18446744073709551615 --threads 2 --recompute 12.5% --offload weights,optimizer --disk 1.5TiB \
                 --mlp-tile 16 --eval-batch 3 --scratch .";
    let printed = expect(tiny(&format!("--print-config {flags}")), 0, &[]);
    fs::write(&file, &printed.stdout).unwrap();
    let again = expect(with(train("--print-config"), "--config", &file), 0, &[]);
    assert_eq!(again.stdout, printed.stdout);

    let [first, second] = ["a", "b"].map(|name| dir.join(name));
    expect(with(tiny(&format!("--plan-only {flags}")), "--out", &first), 0, &[]);
    expect(
        with(with(train("--plan-only"), "--config", &file), "--out", &second),
        0,
        &[],
    );
    for name in ["plan.json", "config.toml", "config.json"] {
        assert_eq!(
            fs::read(first.join(name)).unwrap(),
            fs::read(second.join(name)).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn every_setting_can_come_from_a_file_and_flags_win() {
    let dir = folder("config");
    let file = dir.join("job.toml");
    // A second value for every setting, and a flag of the same name for each.
    let settings = "method = \"lora\"\nvocab_size = 300\nhidden_size = 48\nintermediate_size = 80\nnum_hidden_layers = 2\n\
                    num_attention_heads = 3\nnum_key_value_heads = 3\nrms_norm_eps = 0.001\nrope_theta = 500.0\n\
                    tie_word_embeddings = false\ninitializer_range = 0.5\nlong = \"drop\"\nskip_bad_lines = true\n\
                    eval_fraction = 0.25\nbatch = 6\nseq = 8\nsteps = 9\noptimizer = \"apollo\"\n\
                    lr = 0.25\nwarmup_steps = 4\ndecay = \"linear\"\nmin_lr_ratio = 0.75\nweight_decay = 0.5\n\
                    beta1 = 0.125\nbeta2 = 0.25\nadam_eps = 0.0625\napollo_rank = 4\napollo_refresh = 7\n\
                    clip_norm = \"none\"\neval_every = 5\neval_batches = 6\neval_batch = 12\nseed = 7\nrank = 8\n\
                    alpha = 3.0\nrslora = true\ndropout = 0.25\ntargets = \"q_proj,mlp.*\"\nsave_every = 3\nkeep = 1\n\
                    precision = \"bf16-mixed\"\nloss_scale = \"none\"\nbase = \"int8\"\nbase_embeddings = true\nrecompute = \"512MiB\"\n\
                    offload = \"activations,optimizer\"\nupdate_in_backward = true\nloss_chunk = 4\nmlp_tile = 64\n\
                    disk = 21474836480\nhost_memory = \"none\"\nmicro_batch = 6\nbudget = 536870912\nthreads = 1000\n\
                    scratch = \"/scratch\"\n";
    fs::write(&file, settings).unwrap();
    let printed = expect(with(train("--print-config"), "--config", &file), 0, &[]);
    assert_eq!(printed.stdout, settings);
    let of_some = "--method lora --optimizer apollo --base int8";
    let defaults = run(train(&format!("--print-config {of_some}"))).stdout;
    for (line, default) in settings.lines().zip(defaults.lines()) {
        let (name, value) = line.split_once(" = ").unwrap();
        let (same, default) = default.split_once(" = ").unwrap();
        assert_eq!(same, name);
        // On the CPU, the one has no other value; the others must have this one for what depends on them to be there.
        assert!(
            value != default || ["host_memory", "method", "optimizer", "base"].contains(&name),
            "{name} would not show whether it was read"
        );
        let flag = format!("--{}={}", name.replace('_', "-"), value.trim_matches('"'));
        // Sizes and choices with which each of the others is possible.
        let needed = match name {
            "apollo_rank" | "apollo_refresh" => "--optimizer apollo",
            "base_embeddings" => "--base int8",
            _ => "",
        };
        let sizes = "--hidden-size 48 --heads 3 --kv-heads 1 --batch 6 --method lora";
        let printed = expect(train(&format!("--print-config {sizes} {needed} {flag}")), 0, &[]).stdout;
        assert!(printed.lines().any(|printed| printed == line), "{flag}: {printed}");
    }
    let sgd = expect(train("--print-config --optimizer sgd --momentum 0.5"), 0, &[]).stdout;
    assert!(sgd.contains("\nmomentum = 0.5\n") && !sgd.contains("beta1"), "{sgd}");
    let won = with(train("--print-config --lr 0.5"), "--config", &file);
    assert_eq!(expect(won, 0, &[]).stdout, settings.replace("lr = 0.25", "lr = 0.5"));
    let spelled =
        "budget = \"512MiB\"\nlr = 1\nclip_norm = 2\ndisk = \"20GiB\"\nrecompute = 1048576\nloss_chunk = \"auto\"\n";
    fs::write(&file, spelled).unwrap();
    let printed = expect(with(train("--print-config --scratch here"), "--config", &file), 0, &[]).stdout;
    let scratch = std::env::current_dir().unwrap().join("here");
    for line in [
        "budget = 536870912",
        "lr = 1.0",
        "clip_norm = 2.0",
        "disk = 21474836480",
        "recompute = \"1MiB\"",
        "loss_chunk = \"auto\"",
        &format!("scratch = \"{}\"", scratch.display()),
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{printed}");
    }
}

#[test]
fn bad_settings_files_are_named_with_the_reason() {
    let dir = folder("bad-config");
    let file = dir.join("job.toml");
    let name = file.to_str().unwrap();
    for (content, words) in [
        (&b"learning_rate = 1"[..], ["learning_rate", "unknown field"]),
        (b"steps = \"ten\"", ["steps", "invalid type"]),
        (b"steps = -1", ["steps", "invalid value"]),
        (b"steps = 1.5", ["steps", "invalid type"]),
        (b"budget = \"3 apples\"", ["budget", "`apples`"]),
        (b"budget = -1", ["budget", "`-1` is not a size"]),
        (b"budget = []", ["budget", "a number of bytes"]),
        (b"clip_norm = \"some\"", ["clip_norm", "none"]),
        (b"clip_norm = true", ["clip_norm", "a number or"]),
        (b"micro_batch = 1.0", ["micro_batch", "a whole number or auto"]),
        (b"mlp_tile = []", ["mlp_tile", "a whole number or"]),
        (b"recompute = \"200%\"", ["recompute", "from 0% to 100%"]),
        (b"offload = \"all\"", ["offload", "`all` cannot be offloaded"]),
        (b"offload = true", ["offload", "activations,optimizer"]),
        (b"disk = \"auto\"", ["disk", "`auto` is not a size"]),
        (b"host_memory = 1", ["--host-memory", "--disk"]),
        (b"decay = \"step\"", ["decay", "cosine"]),
        (b"steps = 1\nsteps = 2", ["steps", "duplicate key"]),
        (b"steps = ", ["TOML", "line 1"]),
        (b"steps = \xff", [name, "UTF-8"]),
        (b"lr = nan", ["--lr is NaN", "between"]),
    ] {
        fs::write(&file, content).unwrap();
        expect(with(tiny(""), "--config", &file), 2, &["error: ", words[0], words[1]]);
    }
    expect(
        with(tiny(""), "--config", dir.join("nowhere.toml")),
        2,
        &["nowhere.toml", "No such file"],
    );
    expect(
        with(tiny(""), "--config", &dir),
        2,
        &[dir.to_str().unwrap(), "directory"],
    );
    expect(
        with(tiny(""), "--config", "/dev/zero"),
        2,
        &["/dev/zero", "larger than"],
    );
}

#[test]
fn help_shows_every_default_and_the_exit_codes() {
    let help = expect(train("--help"), 0, &[]).stdout;
    let defaults = expect(train("--print-config"), 0, &[]).stdout;
    for line in defaults.lines() {
        let (name, _) = line.split_once(" = ").unwrap();
        let flag = format!("--{}", name.replace('_', "-"));
        let (_, after) = help
            .split_once(&flag)
            .unwrap_or_else(|| panic!("{flag} is not in the help"));
        let entry = after.split("\n      --").next().unwrap();
        assert!(
            entry.replace("\n", " ").contains("[default:"),
            "{flag} has no default: {entry}"
        );
    }
    for words in ["Examples:", "Exit codes:", "[alias: --layers]"] {
        assert!(help.contains(words), "{words}");
    }
    expect(train("--bogus"), 2, &["--bogus"]);
}
