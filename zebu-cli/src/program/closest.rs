//! What a word with a slip of the finger was meant to be.

/// The candidate that `word` is a slight variation of, if one is: an empty word is of none.
pub fn closest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = match word.chars().count() {
        0..=2 => return None,
        3..=5 => 1,
        6..=9 => 2,
        _ => 3,
    };
    let near = candidates.into_iter().filter_map(|candidate| {
        let steps = distance(word, candidate);
        // Of several, one that is as long.
        let longer = candidate.len().abs_diff(word.len());
        // What is there as it was typed is refused for another reason.
        (1..=most)
            .contains(&steps)
            .then_some((steps, longer, candidate))
    });
    near.min().map(|(_, _, candidate)| candidate)
}

/// How many characters are missing, too many, wrong, or in the other order with their neighbour.
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=other.len()).collect()];
    for i in 1..=one.len() {
        let mut row = vec![i];
        for j in 1..=other.len() {
            let wrong = usize::from(one[i - 1] != other[j - 1]);
            let mut least = (rows[i - 1][j] + 1)
                .min(row[j - 1] + 1)
                .min(rows[i - 1][j - 1] + wrong);
            let is_swapped =
                i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1];
            if is_swapped {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found_and_other_words_are_not() {
        let commands = ["convert", "compare", "check", "create", "map", "io"];
        for (word, meant) in [
            ("conver", Some("convert")),
            ("covnert", Some("convert")),
            ("chekc", Some("check")),
            ("mpa", Some("map")),
            ("creat", Some("create")),
            ("resize", None),
            ("convert", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(closest(word, commands), meant, "{word}");
        }
    }
}
