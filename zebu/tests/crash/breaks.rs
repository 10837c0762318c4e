//! Proves that the replay can fail: each rule of the order on the disk is broken in turn, and the
//! crash replay or the faults must detect it.
//!
//! `cargo test -p zebu --test crash -- --ignored breaks`, with the name of one rule as `ZEBU_ONLY` or
//! without. A rule is broken for the whole process, so no other test may run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use zebu::internal::broken::{Rule, break_rule};

use crate::common::counted;
use crate::workloads::{self, Workload};
use crate::{Effort, faults, run};

/// The most runs of a workload that should detect a broken rule.
const RUNS: u64 = 60;

/// The workloads that depend on a rule, the quickest to detect it first.
fn workloads_of(rule: Rule) -> &'static [&'static str] {
    match rule {
        Rule::RefcountsBeforeMappings | Rule::DurableBeforeMappings => &["allocating"],
        Rule::DataFileBeforeMappings => &["data-file"],
        Rule::CopyBeforeFlush | Rule::DataBeforeEntry => &["in-flight"],
        Rule::DroppedBeforeCopy => &["in-flight"],
        Rule::GoneBeforeFree => &["reuse"],
        Rule::FlushIsDurable => &["allocating"],
        Rule::TableIsWhole => &["reuse", "growth"],
        Rule::BlockBeforeTable => &["growth"],
        Rule::RefcountTableBeforeHeader => &["growth"],
        Rule::L1BeforeHeader | Rule::SizeBeforeTail => &["resize"],
        Rule::SnapshotsBeforeHeader | Rule::FlagsBeforeSnapshot | Rule::SnapshotGoneBeforeFree => {
            &["snapshots"]
        }
        Rule::TablesBeforeNewHeader => &["convert"],
        Rule::DataBeforeBacking | Rule::NameBeforeHeader => &["rebase"],
        Rule::BaseBeforeEmpty => &["commit"],
        Rule::WidthBeforeHeader => &["amend"],
        Rule::RepairBarriers => &["repair"],
        Rule::FailedFlushIsFinal => &["allocating"],
        Rule::InUseBeforeChange | Rule::BitsBeforeFlag => &["bitmaps"],
        Rule::AnnouncedAnew => &["in-flight-bitmaps"],
        Rule::BlocksBeforeMap | Rule::CountBeforeMap => &["written"],
        Rule::TablesBeforeNextEntry => &["written-tables"],
        Rule::BlocksBeforeLog
        | Rule::LogIsDurable
        | Rule::EntryStaysWhole
        | Rule::RecoveredBeforeEmptyLog
        | Rule::IdentityBeforeContent => &["written"],
    }
}

/// The seed that the search for a broken rule begins with: before the others no run comes to the
/// order of requests that depends on the rule.
fn first_seed(rule: Rule) -> u64 {
    match rule {
        Rule::DroppedBeforeCopy => 18,
        Rule::AnnouncedAnew => 14,
        Rule::BlocksBeforeLog => 94,
        _ => 1,
    }
}

/// The failure by which a broken rule was detected; None: it was not.
fn detected(rule: Rule) -> Option<String> {
    let effort = Effort {
        samples: 1,
        more: 4,
        qemu: u64::MAX,
    };
    let is_wanted = |w: &&Workload| workloads_of(rule).contains(&w.name);
    for seed in first_seed(rule)..first_seed(rule) + RUNS {
        for workload in workloads::ALL.iter().filter(is_wanted) {
            let attempt = catch_unwind(AssertUnwindSafe(|| match rule {
                Rule::FailedFlushIsFinal => faults::try_workload(*workload, seed, 1).map(drop),
                _ => run(*workload, seed, effort).map(drop),
            }));
            let what = match attempt {
                Ok(Ok(())) => continue,
                Ok(Err(what)) => what,
                Err(panic) => match panic.downcast::<String>() {
                    Ok(text) => *text,
                    Err(panic) => panic
                        .downcast::<&str>()
                        .map_or_else(|_| "?".into(), |t| (*t).into()),
                },
            };
            let line = what.lines().next().unwrap_or("").to_string();
            return Some(format!("{}, seed {seed}: {line}", workload.name));
        }
    }
    None
}

#[test]
#[ignore = "alone in its process"]
fn breaks() {
    let mut missed = Vec::new();
    let only = zebu_testkit::only();
    let is_wanted = |rule: &Rule| {
        only.as_ref()
            .is_none_or(|only| *only == format!("{rule:?}"))
    };
    let rules: Vec<Rule> = Rule::ALL.into_iter().filter(is_wanted).collect();
    assert!(!rules.is_empty(), "{only:?} is no rule");
    for rule in rules.iter().copied() {
        let began = Instant::now();
        break_rule(Some(rule));
        match detected(rule) {
            Some(what) => println!("{rule:?}, {:?}: {what}", began.elapsed()),
            None => missed.push(rule),
        }
        break_rule(None);
    }
    counted(
        (rules.len() - missed.len()) as u64,
        &format!("of {} broken rules detected", rules.len()),
    );
    assert!(missed.is_empty(), "not detected: {missed:?}");
}
