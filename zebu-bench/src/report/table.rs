//! Tables: rows on standard output as they come, and Markdown.

/// A table of text.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// Its title; may be empty.
    pub title: String,
    /// Column heads.
    pub heads: Vec<String>,
    /// Rows, each as long as `heads`.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub fn new(title: &str, heads: &[&str]) -> Self {
        Table {
            title: title.into(),
            heads: heads.iter().map(|h| (*h).into()).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row and prints it.
    pub fn say(&mut self, row: Vec<String>) {
        println!("{}", row.join(" | "));
        self.rows.push(row);
    }

    /// The table as aligned Markdown: the first column to the left; others to the right where
    /// all their cells begin with a digit.
    pub fn markdown(&self) -> String {
        let width: Vec<usize> = (0..self.heads.len())
            .map(|c| {
                self.column(c)
                    .map(|t| escape(t).chars().count())
                    .max()
                    .unwrap_or(0)
                    .max(3)
            })
            .collect();
        let right: Vec<bool> = (0..self.heads.len())
            .map(|c| c > 0 && !self.rows.is_empty() && self.rows.iter().all(|r| is_figure(&r[c])))
            .collect();
        let mut out = line(&self.heads, &width, &right);
        out.push('|');
        for (w, r) in width.iter().zip(&right) {
            let dashes = "-".repeat(*w);
            out.push_str(&if *r {
                format!(" {}: |", &dashes[1..])
            } else {
                format!(" {dashes} |")
            });
        }
        out.push('\n');
        for row in &self.rows {
            out.push_str(&line(row, &width, &right));
        }
        out
    }

    fn column(&self, c: usize) -> impl Iterator<Item = &str> {
        std::iter::once(self.heads[c].as_str()).chain(self.rows.iter().map(move |r| r[c].as_str()))
    }
}

fn line(cells: &[String], width: &[usize], right: &[bool]) -> String {
    let mut out = String::from("|");
    for ((cell, w), r) in cells.iter().zip(width).zip(right) {
        let text = escape(cell);
        let pad = " ".repeat(w.saturating_sub(text.chars().count()));
        out.push_str(&if *r {
            format!(" {pad}{text} |")
        } else {
            format!(" {text}{pad} |")
        });
    }
    out.push('\n');
    out
}

fn escape(text: &str) -> String {
    text.replace('|', "\\|")
}

fn is_figure(text: &str) -> bool {
    text.is_empty() || text == "—" || text.starts_with(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_is_aligned_and_figures_go_right() {
        let mut t = Table::new("T", &["file", "s"]);
        t.rows.push(vec!["t-seq".into(), "1.5".into()]);
        t.rows.push(vec!["a|b".into(), "12.25".into()]);
        assert_eq!(
            t.markdown(),
            "| file  |     s |\n| ----- | ----: |\n| t-seq |   1.5 |\n| a\\|b  | 12.25 |\n"
        );
    }

    #[test]
    fn text_columns_stay_left() {
        let mut t = Table::new("", &["a", "b"]);
        t.rows.push(vec!["x".into(), "word".into()]);
        assert!(t.markdown().contains("| ---- |"));
    }
}
