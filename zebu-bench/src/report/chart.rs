//! A bar chart as SVG: rows of horizontal bars with whiskers, one colour a program. It brings its
//! own background and follows the reader's light or dark colour scheme.

use crate::measure::stats::{greatest, least};
use crate::units;
use std::fmt::Write as _;

/// The colours of the programs that have one of their own.
const COLOURS: [(&str, &str); 6] = [
    ("zebu", "#2f81d7"),
    ("QEMU", "#e08b3e"),
    ("fio", "#8b949e"),
    ("go-qcow2reader", "#4fa56b"),
    ("qcow2-rs", "#a371c9"),
    ("imago", "#d4a72c"),
];
const OTHER: &str = "#c06a8c";

const STYLE: &str = "\
.bg{fill:#ffffff;stroke:#d1d9e0}.t{fill:#1f2328}.m{fill:#59636e}.g{stroke:#e3e8ed}\
.r{stroke:#59636e;stroke-dasharray:4 3}.w{stroke:#1f2328;stroke-width:1.2}\
@media(prefers-color-scheme:dark){.bg{fill:#151b23;stroke:#3d444d}.t{fill:#f0f6fc}.m{fill:#9198a1}\
.g{stroke:#2b323b}.r{stroke:#9198a1}.w{stroke:#f0f6fc}}";

const WIDTH: f64 = 760.0;
const MARGIN: f64 = 20.0;
/// Room for the figure behind the longest bar.
const FIGURES: f64 = 56.0;
/// Height of a bar, the space it takes, and the space between rows.
const BAR: f64 = 12.0;
const PITCH: f64 = 15.0;
const GAP: f64 = 11.0;
/// Width of a letter of the labels, on average.
const LETTER: f64 = 6.7;

/// One bar.
#[derive(Debug, Clone)]
pub struct Bar {
    program: String,
    value: f64,
    least: f64,
    greatest: f64,
}

impl Bar {
    /// A bar with whiskers from the least to the greatest of `spread`.
    pub fn new(program: &str, value: f64, spread: &[f64]) -> Self {
        Bar {
            program: program.into(),
            value,
            least: least(spread),
            greatest: greatest(spread),
        }
    }
}

/// Rows of bars.
#[derive(Debug, Clone)]
pub struct Chart {
    /// Its heading.
    pub title: String,
    /// What is said below the axis.
    pub note: &'static str,
    /// Where a dashed line stands for comparison.
    pub reference: Option<f64>,
    axis: String,
    rows: Vec<(String, Vec<Bar>)>,
}

impl Chart {
    /// An empty chart; `axis` names the unit.
    pub fn new(title: &str, axis: &str) -> Self {
        Chart {
            title: title.into(),
            note: "",
            reference: None,
            axis: axis.into(),
            rows: Vec::new(),
        }
    }

    /// Adds a row. Bars that are no finite numbers are left out.
    pub fn row(&mut self, label: &str, mut bars: Vec<Bar>) {
        bars.retain(|b| b.value.is_finite() && b.greatest.is_finite());
        if !bars.is_empty() {
            self.rows.push((label.into(), bars));
        }
    }

    fn bars(&self) -> impl Iterator<Item = &Bar> {
        self.rows.iter().flat_map(|(_, bars)| bars)
    }

    /// The chart as an SVG document.
    pub fn draw(&self) -> String {
        let most = self
            .bars()
            .map(|b| b.greatest.max(b.value))
            .fold(0.0, f64::max);
        let step = tick_step(most);
        let ticks = (most / step).ceil().max(1.0);
        let longest = self
            .rows
            .iter()
            .map(|(label, _)| label.chars().count())
            .max();
        let left = MARGIN + 10.0 + longest.unwrap_or(0) as f64 * LETTER;
        let scale = (WIDTH - MARGIN - FIGURES - left) / (step * ticks);
        let x = |value: f64| left + value * scale;

        let programs = self.programs();
        let top = if programs.len() > 1 { 74.0 } else { 52.0 };
        let rows: f64 = (self.rows.iter())
            .map(|(_, bars)| bars.len() as f64 * PITCH + GAP)
            .sum();
        let bottom = top + rows;
        let height = bottom + 62.0;

        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" font-family=\"-apple-system,Segoe UI,Helvetica,\
             Arial,sans-serif\" font-size=\"12\">\n<style>{STYLE}</style>\n\
             <rect class=\"bg\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"8\"/>\n",
            WIDTH - 1.0,
            height - 1.0
        );
        text(
            &mut out,
            "t",
            (MARGIN, 30.0),
            "start\" font-size=\"16\" font-weight=\"600",
            &self.title,
        );
        if programs.len() > 1 {
            legend(&mut out, &programs);
        }
        for i in 0..=ticks as u64 {
            let value = i as f64 * step;
            line(&mut out, "g", (x(value), top), (x(value), bottom));
            text(
                &mut out,
                "m",
                (x(value), bottom + 16.0),
                "middle",
                &tick(value, step),
            );
        }
        let middle = (x(0.0) + x(step * ticks)) / 2.0;
        text(&mut out, "t", (middle, bottom + 35.0), "middle", &self.axis);
        text(
            &mut out,
            "m",
            (WIDTH / 2.0, bottom + 51.0),
            "middle\" font-size=\"11",
            self.note,
        );
        if let Some(at) = self.reference {
            line(&mut out, "r", (x(at), top), (x(at), bottom));
        }
        let mut y = top + GAP / 2.0;
        for (label, bars) in &self.rows {
            let center = y + bars.len() as f64 * PITCH / 2.0 + 3.0;
            text(&mut out, "t", (left - 8.0, center), "end", label);
            for bar in bars {
                draw_bar(&mut out, bar, y, &x);
                y += PITCH;
            }
            y += GAP;
        }
        out.push_str("</svg>\n");
        out
    }

    /// The programs in the order in which they first occur.
    fn programs(&self) -> Vec<&str> {
        let mut all: Vec<&str> = Vec::new();
        for bar in self.bars() {
            if !all.contains(&&*bar.program) {
                all.push(&bar.program);
            }
        }
        all
    }
}

fn draw_bar(out: &mut String, bar: &Bar, y: f64, x: &dyn Fn(f64) -> f64) {
    let (from, to) = (x(0.0), x(bar.value));
    let _ = writeln!(
        out,
        "<rect x=\"{from:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\" rx=\"1.5\" fill=\"{}\"/>",
        (to - from).max(1.0),
        colour(&bar.program)
    );
    let middle = y + BAR / 2.0;
    let (low, high) = (x(bar.least), x(bar.greatest));
    // Shorter than the bar's own edge it shows nothing.
    if high - low > 1.5 {
        line(out, "w", (low, middle), (high, middle));
        for end in [low, high] {
            line(out, "w", (end, middle - 3.0), (end, middle + 3.0));
        }
    }
    let behind = (high.max(to) + 6.0, middle + 4.0);
    text(
        out,
        "m",
        behind,
        "start\" font-size=\"11",
        &units::figure(bar.value),
    );
}

fn legend(out: &mut String, programs: &[&str]) {
    let mut x = MARGIN;
    for program in programs {
        let _ = writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"44\" width=\"12\" height=\"12\" rx=\"2\" fill=\"{}\"/>",
            colour(program)
        );
        let name = if *program == "fio" {
            "limit: fio"
        } else {
            program
        };
        text(out, "t", (x + 18.0, 54.0), "start", name);
        x += 18.0 + name.chars().count() as f64 * LETTER + 22.0;
    }
}

fn line(out: &mut String, class: &str, a: (f64, f64), b: (f64, f64)) {
    let _ = writeln!(
        out,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        a.0, a.1, b.0, b.1
    );
}

fn text(out: &mut String, class: &str, at: (f64, f64), anchor: &str, text: &str) {
    if !text.is_empty() {
        let _ = writeln!(
            out,
            "<text class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
            at.0,
            at.1,
            escape(text)
        );
    }
}

fn colour(program: &str) -> &'static str {
    let own = COLOURS.iter().find(|(name, _)| *name == program);
    own.map_or(OTHER, |(_, colour)| colour)
}

/// The distance of ticks: 1, 2 or 5 times a power of ten, so that there are four to eight.
fn tick_step(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf((most / 4.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|n| n * power);
    *steps
        .iter()
        .find(|s| most / **s <= 8.0)
        .unwrap_or(&steps[3])
}

/// The number at a tick, with as many places as the steps need.
fn tick(value: f64, step: f64) -> String {
    let places = (-step.log10().floor()).max(0.0) as usize;
    match value >= 1000.0 {
        true => units::thousands(value),
        false => format!("{value:.places$}"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_bars_whiskers_axis_and_legend() {
        let mut chart = Chart::new("A & B", "seconds; less is better");
        chart.row(
            "one",
            vec![
                Bar::new("QEMU", 4.0, &[3.0, 5.0]),
                Bar::new("zebu", 1.0, &[1.0, 1.0]),
            ],
        );
        chart.row("none", vec![Bar::new("zebu", f64::NAN, &[])]);
        let svg = chart.draw();
        assert!(svg.contains("A &amp; B") && svg.contains("seconds; less is better"));
        assert_eq!(
            svg.matches("class=\"w\"").count(),
            3,
            "one whisker with two ends"
        );
        // In the legend and in the row.
        assert_eq!(svg.matches("fill=\"#e08b3e\"").count(), 2);
        assert!(!svg.contains(">none<") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn ticks_are_round_numbers() {
        for (most, step) in [
            (4.2, 1.0),
            (9.0, 2.0),
            (31.0, 5.0),
            (1.3, 0.2),
            (65_000.0, 10_000.0),
        ] {
            assert!(
                (tick_step(most) - step).abs() < step / 1e6,
                "{most}: {}",
                tick_step(most)
            );
        }
        assert_eq!(tick(0.4, 0.2), "0.4");
        assert_eq!(tick(3.0, 1.0), "3");
        assert_eq!(tick(20_000.0, 10_000.0), "20,000");
    }
}
