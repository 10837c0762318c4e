//! P5: a raw image of a real file system to qcow2.

use super::Experiment;
use super::conversion::{Conversion, Conversions, content, tried};
use crate::bench::Bench;
use crate::error::{Context, Error, Result};
use crate::inputs::fs_image::{self, Kind};
use crate::measure::series::find;
use crate::measure::{Contender, Series};
use crate::peers::qemu::done;
use crate::report::Section;
use crate::report::verdict::{Bound, Verdict};
use crate::units;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How zebu is measured: as it comes, and in any order.
const ZEBU_FLAGS: [&str; 2] = ["", "-W"];
/// Peak memory of any conversion, in MiB (P8).
const LIMIT_MIB: f64 = 64.0;

/// The experiment `to-qcow2`.
pub struct ToQcow2;

impl Experiment for ToQcow2 {
    fn name(&self) -> &'static str {
        "to-qcow2"
    }

    fn about(&self) -> &'static str {
        "a real file system to plain, zlib and zstd qcow2 (P5)"
    }

    fn run(&self, bench: &Bench, section: &mut Section) -> Result<()> {
        let raw = fs_image::raw(bench, bench.size())?;
        section.method(format!(
            "A raw {} to new qcow2 images of three kinds on the same file system. Flags of QEMU: the \
             fastest of {}. Each program's image is checked and compared with the raw one by \
             qemu-img, once. Sizes are lengths of files, against that of QEMU without flags, which \
             packs in order.",
            content(bench, &raw)?,
            tried(bench),
        ));
        let more = ["size against QEMU", "peak MiB"];
        let mut conversions = Conversions::new(bench, "Convert to qcow2", ZEBU_FLAGS, &[], &more);
        for (kind, target) in [(Kind::Plain, 1.5), (Kind::Zlib, 6.0), (Kind::Zstd, 2.0)] {
            let label = kind.name();
            let verb = format!("convert -f raw -O qcow2 {}", kind.options().join(" "));
            let lengths = RefCell::new(HashMap::new());
            let judge = |c: &Contender| {
                let length = judged(&bench.peers.qemu.img, c, &raw)?;
                let key = (c.name.clone(), c.flags.clone());
                lengths.borrow_mut().insert(key, length);
                Ok(())
            };
            let conversion = Conversion {
                label,
                verb: &verb,
                input: &raw,
                ending: "qcow2",
                others: vec![],
                judge: &judge,
            };
            let all = conversions.measure(section, conversion);
            let length = |name: &str| {
                let length = lengths.borrow().get(&(name.into(), String::new())).copied();
                length.map_or(f64::NAN, |l: u64| l as f64)
            };
            let length = length("zebu") / length("QEMU");
            let peak = find(&all, "zebu", "").map(|z: &Series| z.peak);
            let more = vec![units::ratio(length), peak.map_or("—".into(), units::mib)];
            let ratio = conversions.add(section, label, &all, more);
            verdicts(section, label, target, [ratio, length], peak);
        }
        conversions.finish(section);
        Ok(())
    }
}

fn verdicts(
    section: &mut Section,
    label: &str,
    target: f64,
    [speed, length]: [f64; 2],
    peak: Option<u64>,
) {
    section.verdict(Verdict::new(
        "P5",
        format!("convert to {label} qcow2, against QEMU's best"),
        Bound::AtLeast(target),
        speed,
    ));
    section.verdict(Verdict::new(
        "P5",
        format!("size of {label} qcow2, against QEMU's"),
        Bound::AtMost(1.02),
        length,
    ));
    let peak = peak.map_or(f64::NAN, |p| p as f64 / units::MIB as f64);
    let what = format!("peak memory of convert to {label} qcow2");
    section.verdict(Verdict::new("P8", what, Bound::AtMost(LIMIT_MIB), peak).unit(" MiB"));
}

/// The length of what a contender made, if it is whole and has the content of `raw`.
fn judged(qemu_img: &Path, contender: &Contender, raw: &Path) -> Result<u64> {
    let output: &PathBuf = contender
        .output
        .as_ref()
        .ok_or_else(|| Error::new("no output"))?;
    let mut check = Command::new(qemu_img);
    check.args(["check", "-q", "-f", "qcow2"]).arg(output);
    done(check)?;
    let mut compare = Command::new(qemu_img);
    compare
        .args(["compare", "-q", "-f", "raw", "-F", "qcow2"])
        .arg(raw)
        .arg(output);
    done(compare)?;
    let about = || output.display().to_string();
    Ok(output.metadata().context(about)?.len())
}
