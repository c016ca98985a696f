//! The search for a mix against all mixes there are.

use clap::Parser;
use tightfit::cli::{Cli, Command};
use tightfit::job::fit_on;
use tightfit::mix::search::SLOWEST;
use tightfit::mix::{Device, Space, search};
use tightfit::settings::{Offload, Request};
use tightfit::subject::Subject;
use tightfit_model::Known;
use tightfit_search::Limits;

/// What a mix that takes about as long may differ by: the search does not look for less.
const TOLERANCE: f64 = 0.02;

fn request(flags: &str) -> Request {
    let line = ["tightfit", "plan"].into_iter().chain(flags.split_whitespace());
    match Cli::try_parse_from(line).unwrap().command {
        Command::Plan(args) => args.request,
        other => panic!("{other:?}"),
    }
}

/// Every mix of a space, planned: of those that fit the rank of their numbers and their time; and how many there are.
fn enumerate(space: &Space, subject: &Subject<'_>, device: &Device, limits: &Limits) -> (Vec<(usize, f64)>, usize) {
    let (mut found, mut planned) = (Vec::new(), 0);
    for (rank, numbers) in space.numbers().iter().enumerate() {
        for cuts in space.cuts() {
            let before = found.len();
            for cut in cuts {
                for offload in [Offload::None, Offload::Auto] {
                    let Ok(mut settings) = space.settings(numbers, Some(cut), offload) else {
                        continue;
                    };
                    planned += 1;
                    let fit = fit_on(&mut settings, subject, device.target(), limits);
                    if let Some(fit) = fit.ok().filter(|fit| fit.fits) {
                        found.push((rank, fit.prediction.seconds));
                    }
                }
            }
            // The next stage is for what does not fit otherwise.
            if found.len() > before {
                break;
            }
        }
    }
    (found, planned)
}

fn agree(flags: &str, device: &Device, reserve: u64, budgets: impl Fn(u64) -> Vec<u64>) {
    let space = |budget| Space::new(request(flags), budget, true).unwrap();
    let settings = space(u64::MAX).plain().unwrap();
    let subject = Subject::of(&settings, None);
    let plain = fit_on(&mut settings.clone(), &subject, device.target(), &unlimited()).unwrap();
    let (mut verdicts, mut tried, mut planned) = (Vec::new(), 0, 0);
    for budget in budgets(plain.plan.arena_bytes()) {
        let space = space(budget + reserve);
        let limits = Limits {
            arena_bytes: budget,
            lower_tier_bytes: u64::MAX,
        };
        let outcome = search(&space, &subject, device, &limits).unwrap();
        let (all, all_planned) = enumerate(&space, &subject, device, &limits);
        let fastest = all.iter().map(|(_, seconds)| *seconds).min_by(f64::total_cmp);
        assert_eq!(
            outcome.fastest_seconds.is_some(),
            fastest.is_some(),
            "{flags}, {budget}"
        );
        verdicts.push(fastest.is_some());
        let (Some(found), Some(fastest)) = (outcome.fastest_seconds, fastest) else {
            continue;
        };
        let near = |a: f64, b: f64| (a / b - 1.0).abs() <= TOLERANCE;
        assert!(near(found, fastest), "{flags}, {budget}: {found} {fastest}");
        let best_of = |rank: usize| {
            let of_rank = all.iter().filter(|(other, _)| *other == rank);
            of_rank.map(|(_, seconds)| *seconds).min_by(f64::total_cmp)
        };
        let numbers = space.numbers();
        let ranks = (0..numbers.len()).filter_map(|rank| Some((rank, best_of(rank)?)));
        // Whichever of two is chosen whose times are about the limit, it is right.
        let expected = ranks
            .clone()
            .find(|(_, seconds)| *seconds <= SLOWEST * fastest * (1.0 - TOLERANCE));
        let (expected, seconds) = expected.or_else(|| ranks.clone().next()).unwrap();
        let chosen = numbers
            .iter()
            .position(|numbers| *numbers == outcome.candidate.numbers)
            .unwrap();
        let is_near_limit = best_of(chosen).is_some_and(|seconds| near(seconds, SLOWEST * fastest));
        assert!(
            chosen == expected || chosen < expected && is_near_limit,
            "{flags}, {budget}"
        );
        assert!(
            near(outcome.candidate.seconds(), best_of(chosen).unwrap()) || seconds > fastest,
            "{flags}, {budget}: {} is not the best of its kind",
            outcome.candidate.seconds()
        );
        assert!(outcome.candidate.fit.plan.arena_bytes() <= budget);
        tried += outcome.tried.len();
        planned += all_planned;
    }
    // Bounds are for something.
    assert!(tried < planned, "{tried} of {planned}");
    // Budgets on both sides.
    assert!(verdicts.contains(&true) && verdicts.contains(&false), "{verdicts:?}");
}

fn unlimited() -> Limits {
    Limits {
        arena_bytes: u64::MAX,
        lower_tier_bytes: u64::MAX,
    }
}

#[test]
fn the_mix_is_the_one_that_enumeration_finds() {
    let budgets = |plain: u64| [4, 40, 200].map(|percent| plain / 100 * percent).to_vec();
    let full = "--hidden-size 128 --layers 2 --heads 4 --kv-heads 2 --intermediate-size 256 --batch 2 --seq 64 --clip-norm none";
    agree(full, &Device::cpu(2), 0, budgets);
    let lora = "--hidden-size 96 --layers 2 --heads 3 --kv-heads 3 --batch 2 --seq 96 --method lora --rank 8 --optimizer adamw";
    agree(lora, &Device::named("a5000", 2).unwrap(), 512 << 20, budgets);
}

#[test]
fn plans_of_llama_7b_start_from_the_bytes_that_people_know() {
    let known = Known::named("llama-7b").unwrap();
    let subject = Subject::known(known).unwrap();
    assert_eq!(subject.config.parameters(), 6_738_415_616);
    let space = Space::new(request("llama-7b --batch 1 --seq 512"), 24 << 30, true).unwrap();
    let device = Device::named("a5000", 2).unwrap();
    let plain = fit_on(&mut space.plain().unwrap(), &subject, device.target(), &unlimited()).unwrap();
    let weights = plain.plan.liveness().persistent.iter();
    let weights = weights.filter(|tensor| tensor.role == tightfit::Role::Weight);
    assert_eq!(weights.map(|tensor| tensor.ty.bytes()).sum::<u64>(), 26_953_662_464);
}
