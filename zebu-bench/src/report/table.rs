//! Tables in Markdown.

/// A table of text.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// Column heads.
    pub heads: Vec<String>,
    /// Rows, each as long as `heads`.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub fn new(heads: &[&str]) -> Self {
        Table {
            heads: heads.iter().map(|h| (*h).into()).collect(),
            rows: Vec::new(),
        }
    }

    /// The table as Markdown; columns whose cells begin with a digit are aligned to the right.
    pub fn markdown(&self) -> String {
        let mark = |c: usize| match c > 0 && self.rows.iter().all(|r| is_figure(&r[c])) {
            true => "---:".to_owned(),
            false => "---".to_owned(),
        };
        let marks: Vec<String> = (0..self.heads.len()).map(mark).collect();
        let mut out = line(&self.heads) + &line(&marks);
        self.rows.iter().for_each(|row| out += &line(row));
        out
    }
}

fn line(cells: &[String]) -> String {
    let cells: Vec<String> = cells.iter().map(|c| c.replace('|', "\\|")).collect();
    format!("| {} |\n", cells.join(" | "))
}

fn is_figure(text: &str) -> bool {
    text.is_empty() || text == "—" || text.starts_with(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_go_right_and_text_stays_left() {
        let mut t = Table::new(&["file", "s", "flags"]);
        t.rows.push(vec!["t-seq".into(), "1.5".into(), "-W".into()]);
        t.rows.push(vec!["a|b".into(), "—".into(), "".into()]);
        let text = "| file | s | flags |\n| --- | ---: | --- |\n| t-seq | 1.5 | -W |\n";
        assert_eq!(t.markdown(), format!("{text}| a\\|b | — |  |\n"));
    }
}
