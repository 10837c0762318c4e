//! What a hit and a miss cost inside the library.

use super::Ground;
use crate::error::Context;
use crate::measure::child::{self, command};
use crate::report::Section;
use crate::report::svg::Chart;
use crate::report::table::Table;

/// Nanoseconds of one map step.
pub struct Costs {
    /// Where everything is in the cache, over the whole disk.
    pub hit: f64,
    /// Where the table has to be read from the device.
    pub miss: f64,
}

/// Measures the map step inside the library.
pub fn measure(ground: &Ground<'_>, section: &mut Section) -> Costs {
    let mut costs = Costs {
        hit: f64::NAN,
        miss: f64::NAN,
    };
    let said = std::env::current_exe()
        .context(|| "own path".into())
        .and_then(|own| {
            let mut line = command([own.with_file_name("zebu-map-cost")]);
            line.push(ground.image.clone().into());
            child::run(&line, &ground.bench.scratch())
        });
    let text = match said {
        Ok(outcome) => outcome.stdout,
        Err(e) => {
            section.note(format!("the cost of a hit is left out: {e}"));
            return costs;
        }
    };
    let title = "One map step inside the library";
    let mut table = Table::new(title, &["case", "nanoseconds"]);
    let mut chart = Chart::new(title, "nanoseconds, less is better");
    for (case, nanoseconds) in look_ups(&text) {
        match case {
            "hit, slices of the whole disk" => costs.hit = nanoseconds,
            "miss, table on the device" => costs.miss = nanoseconds,
            _ => {}
        }
        chart.group(case, [("zebu".to_string(), nanoseconds)]);
        table.say(vec![case.into(), format!("{nanoseconds:.0}")]);
    }
    section.method(
        "The map step (`Image::extent`, default slices) is measured in a loop inside a program of its \
         own, `zebu-map-cost`: 2 million hits, 4,000 misses, the median of five rounds. A miss has \
         room for one slice.",
    );
    section.table(table, Some(chart));
    costs
}

/// The lines of zebu-map-cost: a case, a tab, nanoseconds.
fn look_ups(text: &str) -> impl Iterator<Item = (&str, f64)> {
    text.lines().filter_map(|line| {
        let (case, nanoseconds) = line.split_once('\t')?;
        Some((case, nanoseconds.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_loop_are_read() {
        let text = "hit, one slice\t12.5\nnoise\nmiss, table on the device\t60000.0\n";
        let all: Vec<_> = look_ups(text).collect();
        assert_eq!(
            all,
            [
                ("hit, one slice", 12.5),
                ("miss, table on the device", 60000.0)
            ]
        );
    }
}
