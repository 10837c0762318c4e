//! The report: one page with charts, made from the saved figures of a run.

pub mod chart;
pub mod machine;
pub mod table;

use crate::error::{Context, Error, Result};
use crate::measure::stats::least;
use crate::options;
use crate::results::{Experiment, Group, Ratio, Results, Row, Scale};
use crate::units;
use chart::{Bar, Chart};
use std::fmt::Write as _;
use std::path::Path;
use table::Table;

/// The marks in the README between which the summary goes.
const MARKS: [&str; 2] = ["<!-- benchmarks -->", "<!-- /benchmarks -->"];
/// The chart of the summary.
const SUMMARY: &str = "summary";
/// Programs that are no peers in a table: zebu has its own column, fio is the limit.
const NOT_PEERS: [&str; 3] = ["zebu", "QEMU", "fio"];

/// Writes the page and its charts, and the summary into the README.
pub fn write(options: &options::Report) -> Result<()> {
    let results = Results::load(&options.results)?;
    let page = &options.page;
    let dir = parent(page);
    let charts = dir.join("charts");
    // Charts that the last report had and this one has not must not stay.
    let _ = std::fs::remove_dir_all(&charts);
    std::fs::create_dir_all(&charts).context(|| charts.display().to_string())?;
    for (name, chart) in all_charts(&results) {
        let to = charts.join(format!("{name}.svg"));
        std::fs::write(&to, chart.draw()).context(|| to.display().to_string())?;
    }
    std::fs::write(page, markdown(&results)).context(|| page.display().to_string())?;
    println!("{}", page.display());
    let Some(readme) = &options.readme else {
        return Ok(());
    };
    let name = || readme.display().to_string();
    let text = std::fs::read_to_string(readme).context(name)?;
    let charts = charts.strip_prefix(parent(readme)).unwrap_or(&charts);
    let text = between_marks(
        &text,
        &summary(&results, &charts.to_string_lossy(), false, Group::is_speed),
    )?;
    std::fs::write(readme, text).context(name)
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// `text` with `new` between the marks.
fn between_marks(text: &str, new: &str) -> Result<String> {
    let parts = text.split_once(MARKS[0]).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(MARKS[1])?;
        Some(format!(
            "{before}{}\n\n{new}\n{}{after}",
            MARKS[0], MARKS[1]
        ))
    });
    parts.ok_or_else(|| Error::new(format!("no marks {} and {}", MARKS[0], MARKS[1])))
}

/// The page.
fn markdown(results: &Results) -> String {
    let mut out = String::from(
        "# Benchmarks\n\n\
         zebu side by side with the newest QEMU, which has its best flags. A figure is the median \
         of runs in which the programs take turns; whiskers in charts are the slowest and the \
         fastest run. *Ratio* is how many times as fast as QEMU zebu is. Make this page with\n\n\
         ```sh\nmake bench\n```\n\n\
         [benchmarking.md](benchmarking.md) says how each figure is made.\n\n",
    );
    out += &summary(results, "charts", true, |_| true);
    for experiment in &results.experiments {
        section(&mut out, experiment);
    }
    let _ = write!(out, "\n## The machine\n\n");
    let mut facts = Table::new(&["", ""]);
    for (what, value) in &results.machine {
        facts.rows.push(vec![what.clone(), value.clone()]);
    }
    let took = format!("{:.0} min", results.seconds / 60.0);
    facts.rows.push(vec!["the run took".into(), took]);
    out += &facts.markdown();
    bullets(&mut out, &results.notes);
    out
}

fn section(out: &mut String, experiment: &Experiment) {
    let _ = write!(out, "\n## {}\n\n{}\n", experiment.title, experiment.about);
    for (name, chart) in charts_of(experiment) {
        let _ = write!(out, "\n![{}](charts/{name}.svg)\n", chart.title);
    }
    for group in &experiment.groups {
        if group.rows.is_empty() {
            continue;
        }
        let unit = group.unit.name();
        let title = match group.title.to_lowercase().contains(&unit.to_lowercase()) {
            true => group.title.clone(),
            false => format!("{} ({unit})", group.title),
        };
        let table = table_of(group).markdown();
        let _ = write!(
            out,
            "\n<details><summary>{title}</summary>\n\n{table}\n</details>\n"
        );
    }
    bullets(out, &experiment.notes);
}

fn bullets(out: &mut String, lines: &[String]) {
    for (i, line) in lines.iter().enumerate() {
        let _ = writeln!(out, "{}- {line}", if i == 0 { "\n" } else { "" });
    }
}

/// The table of a group: QEMU, zebu, ratio, limit, and other peers.
fn table_of(group: &Group) -> Table {
    let has = |program: &str| group.rows.iter().any(|r| r.of(program).is_some());
    let mut peers: Vec<&str> = Vec::new();
    for figure in group.rows.iter().flat_map(|r| &r.figures) {
        if !NOT_PEERS.contains(&&*figure.program) && !peers.contains(&&*figure.program) {
            peers.push(&figure.program);
        }
    }
    let flags = |r: &Row| r.of("QEMU").map_or(String::new(), |f| f.flags.clone());
    let has_flags = group.ratio == Ratio::Speed && group.rows.iter().any(|r| !flags(r).is_empty());
    let has_bounds = group.rows.iter().any(|r| r.bound.is_some());
    let with = |on: bool, head: &'static str| on.then_some(head);
    let mut heads = vec![""];
    heads.extend(with(has("QEMU"), "QEMU"));
    heads.extend(with(has_flags, "its flags"));
    heads.push("zebu");
    heads.extend(with(group.ratio != Ratio::None, "ratio"));
    heads.extend(with(has("fio"), "limit: fio"));
    heads.extend(with(group.ratio == Ratio::SpeedOfFio, "of fio"));
    heads.extend(with(has_bounds, "asked"));
    heads.extend(peers.iter());
    let mut table = Table::new(&heads);
    let ratio = |r: Option<f64>| r.map_or("—".into(), units::ratio);
    for row in &group.rows {
        let shown = |p: &str| row.of(p).map_or("—".into(), |f| units::figure(f.median()));
        let cell = |head: &&str| match *head {
            "" => row.label.clone(),
            "its flags" if flags(row).is_empty() => "none".into(),
            "its flags" => format!("`{}`", flags(row)),
            "ratio" => ratio(group.ratio_of(row)),
            "of fio" => ratio(group.advantage(row, "fio")),
            "limit: fio" => shown("fio"),
            "asked" => asked(group, row),
            program => shown(program),
        };
        table.rows.push(heads.iter().map(cell).collect());
    }
    table
}

/// A row's bound, and whether it was missed.
fn asked(group: &Group, row: &Row) -> String {
    let Some(bound) = row.bound else {
        return String::new();
    };
    let text = bound_text(group, bound);
    match group.holds(row) {
        Some(false) => format!("{text}, **missed**"),
        _ => text,
    }
}

fn bound_text(group: &Group, bound: f64) -> String {
    match group.ratio {
        Ratio::Size => format!("≤ {bound}×"),
        Ratio::None => format!("≤ {bound}"),
        Ratio::SpeedOfFio => format!("≥ {bound}× fio"),
        Ratio::SpeedOfNative => format!("≥ {bound}× native"),
        Ratio::SpeedOfImago => format!("≥ {bound}× imago"),
        Ratio::Speed => format!("≥ {bound}×"),
    }
}

/// The summary: a table with a row for each group that is meant, and the chart of all. `bounds`: what the
/// project asks of itself is shown, too.
fn summary(
    results: &Results,
    charts: &str,
    bounds: bool,
    is_meant: impl Fn(&Group) -> bool,
) -> String {
    let heads = ["", "zebu against QEMU", "lowest row", "asked", "missed"];
    let columns = if bounds { heads.len() } else { 3 };
    let mut table = Table::new(&heads[..columns]);
    for experiment in &results.experiments {
        for group in (experiment.groups.iter()).filter(|g| !g.rows.is_empty() && is_meant(g)) {
            let mut row = summary_row(experiment, group);
            row.truncate(columns);
            table.rows.push(row);
        }
    }
    format!(
        "{}\n![Speed against QEMU]({charts}/{SUMMARY}.svg)\n",
        table.markdown()
    )
}

fn summary_row(experiment: &Experiment, group: &Group) -> Vec<String> {
    let judged = group
        .rows
        .iter()
        .filter_map(|r| Some((r, group.judged(r)?)));
    let most = matches!(group.ratio, Ratio::Size | Ratio::None);
    let worst = judged.max_by(|a, b| match most {
        true => a.1.total_cmp(&b.1),
        false => b.1.total_cmp(&a.1),
    });
    let (against, worst) = match (group.ratio, worst) {
        (_, None) => ("—".into(), "—".into()),
        (Ratio::None, Some((row, value))) => {
            let unit = group.unit.name().replace("nanoseconds", "ns");
            let worst = format!("{} {unit} ({})", units::figure(value), row.label);
            ("—".into(), worst)
        }
        (ratio, Some((row, value))) => {
            let of = if ratio == Ratio::SpeedOfFio {
                " of fio"
            } else {
                ""
            };
            let worst = format!("{}{of} ({})", units::ratio(value), row.label);
            (units::ratio(group.mean()), worst)
        }
    };
    let mut bounds: Vec<String> = Vec::new();
    for bound in group.rows.iter().filter_map(|r| r.bound) {
        let text = bound_text(group, bound);
        if !bounds.contains(&text) {
            bounds.push(text);
        }
    }
    let mut asked = bounds.join(", ");
    let mut missed = group
        .rows
        .iter()
        .filter(|r| group.holds(r) == Some(false))
        .count();
    if let Some(floor) = group.mean_floor {
        let _ = write!(asked, "; mean ≥ {floor}×");
        missed += usize::from(group.mean() < floor);
    }
    let missed = match (missed, asked.is_empty()) {
        (_, true) => String::new(),
        (0, _) => "none".into(),
        (n, _) => format!("**{n}**"),
    };
    vec![name_of(experiment, group), against, worst, asked, missed]
}

/// The name of a group where its experiment is not the heading.
fn name_of(experiment: &Experiment, group: &Group) -> String {
    // Where only one group compares speed, the experiment names it.
    let speeds = experiment.groups.iter().filter(|g| g.is_speed()).count();
    match speeds == 1 && group.is_speed() {
        true => experiment.title.clone(),
        false => format!("{}: {}", experiment.title, first_lower(&group.title)),
    }
}

/// The text with a small first letter, but for abbreviations.
fn first_lower(text: &str) -> String {
    let mut chars = text.chars();
    match (chars.next(), text.chars().nth(1)) {
        (Some(first), Some(second)) if second.is_lowercase() || second == ' ' => {
            first.to_lowercase().chain(chars).collect()
        }
        _ => text.into(),
    }
}

/// All charts with the names of their files.
fn all_charts(results: &Results) -> Vec<(String, Chart)> {
    let mut all = vec![(SUMMARY.to_owned(), summary_chart(results))];
    all.extend(results.experiments.iter().flat_map(charts_of));
    all
}

/// The mean of each group that compares speed; whiskers go down to its slowest row.
fn summary_chart(results: &Results) -> Chart {
    let mut chart = Chart::new(
        "Speed against QEMU",
        "times as fast as QEMU; more is better",
    );
    chart.reference = Some(1.0);
    chart.note = "bars: geometric mean of an experiment's rows; whiskers: down to its slowest row";
    for experiment in &results.experiments {
        for group in &experiment.groups {
            let ratios = group.ratios();
            if !group.is_speed() || ratios.is_empty() {
                continue;
            }
            let label = name_of(experiment, group);
            let mean = group.mean();
            chart.row(
                &label,
                vec![Bar::new("zebu", mean, &[least(&ratios), mean])],
            );
        }
    }
    chart
}

/// The charts of an experiment with the names of their files.
fn charts_of(experiment: &Experiment) -> Vec<(String, Chart)> {
    let drawn = |group: &Group| Some(chart_of(experiment, group, group.chart?));
    let charts = experiment
        .groups
        .iter()
        .filter(|g| !g.rows.is_empty())
        .filter_map(drawn);
    let name = |(i, chart)| match i {
        0 => (experiment.name.clone(), chart),
        i => (format!("{}-{}", experiment.name, i + 1), chart),
    };
    charts.enumerate().map(name).collect()
}

fn chart_of(experiment: &Experiment, group: &Group, scale: Scale) -> Chart {
    let better = match group.unit.less_is_better() {
        true => "less is better",
        false => "more is better",
    };
    let axis = match scale {
        Scale::Absolute => format!("{}; {better}", group.unit.name()),
        Scale::Relative => format!("{}, QEMU = 1; {better}", group.unit.name()),
    };
    let mut chart = Chart::new(&name_of(experiment, group), &axis);
    chart.note = "whiskers: the slowest and the fastest run";
    if scale == Scale::Relative {
        chart.reference = Some(1.0);
    }
    for row in &group.rows {
        let unit = match (scale, row.of("QEMU")) {
            (Scale::Absolute, _) => 1.0,
            (Scale::Relative, Some(qemu)) => qemu.median(),
            (Scale::Relative, None) => continue,
        };
        let bar = |f: &crate::results::Figure| {
            let runs: Vec<f64> = f.runs.iter().map(|v| v / unit).collect();
            Bar::new(&f.program, f.median() / unit, &runs)
        };
        chart.row(&row.label, row.figures.iter().map(bar).collect());
    }
    chart
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Unit;
    use crate::results::tests::row;

    fn results() -> Results {
        let mut group = Group::new("Seconds", Unit::Seconds, Ratio::Speed).drawn(Scale::Absolute);
        group.rows = vec![
            row(
                "zlib",
                Some(3.3),
                &[("QEMU", &[4.0, 4.2]), ("zebu", &[1.0]), ("fio", &[0.5])],
            ),
            row(
                "plain",
                Some(1.25),
                &[("QEMU", &[1.0]), ("zebu", &[1.0]), ("go", &[2.0])],
            ),
        ];
        let mut memory = Group::new("Peak memory in MiB", Unit::Mebibytes, Ratio::None);
        memory.rows = vec![row("zlib", Some(64.0), &[("zebu", &[26.0])])];
        Results {
            machine: vec![("CPU".into(), "a cpu".into())],
            experiments: vec![Experiment {
                name: "convert".into(),
                title: "Convert to raw".into(),
                about: "How.".into(),
                groups: vec![group, memory],
                notes: vec!["go is left out".into()],
            }],
            ..Results::default()
        }
    }

    #[test]
    fn a_page_has_summary_tables_charts_and_notes() {
        let page = markdown(&results());
        for part in [
            "charts/summary.svg",
            "| Convert to raw | ",
            "1.00× (plain)",
            "≥ 3.3×, ≥ 1.25×",
            "26.0 MiB (zlib)",
            "## Convert to raw\n\nHow.\n",
            "![Convert to raw](charts/convert.svg)",
            "≥ 1.25×, **missed**",
            "- go is left out",
            "a cpu",
        ] {
            assert!(page.contains(part), "{part} is not in\n{page}");
        }
        let names: Vec<String> = all_charts(&results()).into_iter().map(|c| c.0).collect();
        assert_eq!(names, ["summary", "convert"]);
    }

    #[test]
    fn the_summary_goes_between_the_marks() {
        let text = "a\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\nb\n";
        let new = between_marks(text, "new").unwrap();
        assert_eq!(
            new,
            "a\n<!-- benchmarks -->\n\nnew\n<!-- /benchmarks -->\nb\n"
        );
        assert_eq!(between_marks(&new, "new").unwrap(), new);
        assert!(between_marks("nothing", "new").is_err());
    }

    #[test]
    fn abbreviations_keep_their_case() {
        assert_eq!(first_lower("Peak memory"), "peak memory");
        assert_eq!(first_lower("A look-up"), "a look-up");
        assert_eq!(first_lower("NBD"), "NBD");
        assert_eq!(first_lower("4 KiB"), "4 KiB");
    }
}
