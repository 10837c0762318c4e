//! A bar chart as SVG: groups of horizontal bars, one colour a program.

use std::fmt::Write as _;

const COLOURS: [&str; 8] = [
    "#4878a8", "#e08030", "#58a058", "#b04848", "#8868a8", "#807060", "#c878b0", "#909090",
];
const LABELS: f64 = 190.0;
const BARS: f64 = 430.0;
const FIGURES: f64 = 90.0;
const BAR: f64 = 13.0;
const GAP: f64 = 9.0;
const HEAD: f64 = 30.0;
const KEY: f64 = 17.0;

/// Groups of bars. The same series name has the same colour in each group.
#[derive(Debug, Clone, Default)]
pub struct Chart {
    title: String,
    unit: String,
    groups: Vec<(String, Vec<(String, f64)>)>,
}

impl Chart {
    /// An empty chart whose figures are in `unit`.
    pub fn new(title: &str, unit: &str) -> Self {
        Chart {
            title: title.into(),
            unit: unit.into(),
            groups: Vec::new(),
        }
    }

    /// Adds a group of bars: (series, figure). Figures that are not finite are left out.
    pub fn group(&mut self, label: &str, bars: impl IntoIterator<Item = (String, f64)>) {
        let bars: Vec<_> = bars.into_iter().filter(|(_, v)| v.is_finite()).collect();
        if !bars.is_empty() {
            self.groups.push((label.into(), bars));
        }
    }

    /// The chart as an SVG document.
    pub fn draw(&self) -> String {
        let mut series: Vec<&str> = Vec::new();
        let mut most = 0f64;
        for (name, value) in self.groups.iter().flat_map(|g| &g.1) {
            if !series.contains(&name.as_str()) {
                series.push(name);
            }
            most = most.max(*value);
        }
        let scale = if most > 0.0 { BARS / most } else { 0.0 };
        let bars: usize = self.groups.iter().map(|g| g.1.len()).sum();
        let top = HEAD + KEY * series.len() as f64 + GAP;
        let height = top + bars as f64 * BAR + self.groups.len() as f64 * GAP + GAP;
        let width = LABELS + BARS + FIGURES;

        let mut out = String::new();
        let _ = writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
             <text x=\"8\" y=\"19\" font-size=\"13\" font-weight=\"bold\">{} ({})</text>",
            escape(&self.title),
            escape(&self.unit)
        );
        for (i, name) in series.iter().enumerate() {
            let y = HEAD + KEY * i as f64;
            let _ = writeln!(
                out,
                "<rect x=\"8\" y=\"{y}\" width=\"11\" height=\"11\" fill=\"{}\"/>\
                 <text x=\"25\" y=\"{}\">{}</text>",
                colour(i),
                y + 10.0,
                escape(name)
            );
        }
        let mut y = top;
        for (label, bars) in &self.groups {
            let middle = y + BAR * bars.len() as f64 / 2.0 + 4.0;
            let _ = writeln!(
                out,
                "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\">{}</text>",
                LABELS - 8.0,
                escape(label)
            );
            for (name, value) in bars {
                let colour = colour(series.iter().position(|s| s == name).unwrap_or(0));
                let length = (value * scale).max(0.5);
                let _ = writeln!(
                    out,
                    "<rect x=\"{LABELS}\" y=\"{y}\" width=\"{length:.1}\" height=\"{}\" \
                     fill=\"{colour}\"/><text x=\"{:.1}\" y=\"{}\">{}</text>",
                    BAR - 2.0,
                    LABELS + length + 5.0,
                    y + BAR - 3.5,
                    figure(*value)
                );
                y += BAR;
            }
            y += GAP;
        }
        out.push_str("</svg>\n");
        out
    }
}

fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

fn figure(v: f64) -> String {
    match v {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('`', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_fills_the_width_and_names_are_escaped() {
        let mut chart = Chart::new("A & B", "s");
        chart.group(
            "one",
            [("QEMU".to_string(), 4.0), ("zebu".to_string(), 1.0)],
        );
        chart.group("none", [("zebu".to_string(), f64::NAN)]);
        let svg = chart.draw();
        assert!(svg.contains("A &amp; B (s)"));
        assert!(svg.contains("width=\"430.0\""));
        assert!(svg.contains("width=\"107.5\""));
        assert!(!svg.contains(">none<"));
        assert!(svg.ends_with("</svg>\n"));
    }

    #[test]
    fn a_series_keeps_its_colour() {
        let mut chart = Chart::new("t", "s");
        chart.group("a", [("x".to_string(), 1.0), ("y".to_string(), 1.0)]);
        chart.group("b", [("y".to_string(), 1.0)]);
        // The key and the two bars of y.
        assert_eq!(chart.draw().matches(COLOURS[1]).count(), 3);
    }
}
