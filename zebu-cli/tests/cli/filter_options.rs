//! Options of filters, in every spelling, compared with QEMU: one that a filter does not have, or of a shape
//! that it does not take, is refused and named. It is never ignored.

use crate::common::{Answer, Lab, Rng, cases, compare_answers, peer};

const OBJECT: [&str; 2] = ["--object", "throttle-group,id=g"];

/// Filters with their options.
const FILTERS: &[(&str, &[&str])] = &[
    ("throttle", &["throttle-group"]),
    ("compress", &[]),
    ("copy-on-read", &["bottom"]),
    ("preallocate", &["prealloc-align", "prealloc-size"]),
    #[cfg(debug_assertions)]
    ("xor", &["key"]),
];

/// Values as JSON. Those without a form in a list of options have none there.
const VALUES: &[(&str, &[&str])] = &[
    ("5", &["=5"]),
    ("512", &["=512"]),
    ("-1", &["=-1"]),
    ("1.5", &["=1.5"]),
    ("true", &["=on"]),
    ("null", &[]),
    ("\"g\"", &["=g"]),
    ("\"1k\"", &["=1k"]),
    ("\"\"", &["="]),
    ("{}", &[]),
    ("[]", &[]),
    (r#"{"x":5}"#, &[".x=5"]),
    (r#"{"x":{}}"#, &[]),
    (r#"{"x":{"y":true}}"#, &[".x.y=on"]),
    (r#"[7]"#, &[".0=7"]),
    (r#"[{"x":"a"}]"#, &[".0.x=a"]),
];

fn below(rng: &mut Rng, count: usize) -> usize {
    rng.below(count as u64) as usize
}

#[derive(Clone)]
struct Case {
    filter: &'static str,
    /// Names of options, with an index of their values.
    options: Vec<(&'static str, usize)>,
    format: &'static str,
    over_file: bool,
}

impl Case {
    fn random(rng: &mut Rng) -> Case {
        let (filter, own) = FILTERS[below(rng, FILTERS.len())];
        let mut options = Vec::new();
        if filter == "throttle" && !rng.one_in(4) {
            options.push(("throttle-group", 6));
        }
        if filter == "xor" && !rng.one_in(4) {
            options.push(("key", 0));
        }
        // One more: which of several QEMU names follows from how it hashes them.
        if !rng.one_in(3) {
            let others = FILTERS[below(rng, FILTERS.len())].1;
            let name = match rng.below(4) {
                0 if !others.is_empty() => rng.pick(others),
                1 => rng.pick(&["x", "filename", "size", "limits", "cache.x"]),
                _ if own.is_empty() => "x",
                _ => rng.pick(own),
            };
            if options.iter().all(|(other, _)| *other != name) {
                options.push((name, below(rng, VALUES.len())));
            }
        }
        let over_file = rng.one_in(3);
        Case {
            filter,
            options,
            format: match over_file && filter == "xor" {
                // What it makes of a file is no other image.
                true => "raw",
                false => rng.pick(&["raw", "qcow2"]),
            },
            over_file,
        }
    }

    fn json(&self) -> String {
        let (filter, format) = (self.filter, self.format);
        let own: String = self
            .options
            .iter()
            .map(|(name, value)| format!(r#""{name}":{},"#, VALUES[*value].0))
            .collect();
        let file = format!(r#"{{"driver":"file","filename":"{format}"}}"#);
        match self.over_file {
            true => format!(
                r#"json:{{"driver":"{format}","file":{{"driver":"{filter}",{own}"file":{file}}}}}"#
            ),
            false => format!(
                r#"json:{{"driver":"{filter}",{own}"file":{{"driver":"{format}","file":{file}}}}}"#
            ),
        }
    }

    /// None: a value has no such form.
    fn dotted(&self, rng: &mut Rng) -> Option<String> {
        let (filter, format) = (self.filter, self.format);
        let (start, prefix, end) = match self.over_file {
            true => (
                format!("driver={format},file.driver={filter}"),
                "file.",
                "file.file",
            ),
            false => (
                format!("driver={filter},file.driver={format}"),
                "",
                "file.file",
            ),
        };
        let mut text = start;
        for (name, value) in &self.options {
            let forms = VALUES[*value].1;
            let form = (!forms.is_empty()).then(|| rng.pick(forms))?;
            text += &format!(",{prefix}{name}{form}");
        }
        Some(format!("{text},{end}.driver=file,{end}.filename={format}"))
    }

    /// QEMU takes these for options that are not given.
    fn has_empty_value(&self) -> bool {
        let is_empty = |(_, value): &(&str, usize)| ["{}", "[]"].contains(&VALUES[*value].0);
        self.options.iter().any(is_empty)
    }

    /// What only zebu has: a right key, and nothing else.
    fn judge_alone(&self, answer: &Answer, what: &str) {
        let is_right = |(name, value): &(&str, usize)| *name == "key" && VALUES[*value].0 == "5";
        match self.options.len() == 1 && self.options.iter().all(is_right) {
            true => assert_eq!(answer.status, 0, "{what}: {answer:?}"),
            false => assert!(
                answer.status == 1 && !answer.err.is_empty(),
                "{what}: {answer:?}"
            ),
        }
    }
}

#[test]
fn options_of_filters_are_read_or_refused_as_in_qemu() {
    let lab = Lab::new();
    lab.make("raw raw 1048576; create qcow2 1M");
    for seed in cases(60, "options of filters") {
        let rng = &mut Rng::new(seed);
        let case = Case::random(rng);
        let (json, dotted) = (case.json(), case.dotted(rng));
        let named = ["info", OBJECT[0], OBJECT[1], &json];
        judge(&case, lab.zebu(&named), || lab.qemu_img(&named), &named);
        let io = [OBJECT[0], OBJECT[1], "-c", "length", &json];
        judge(&case, lab.zebu_io(&io), || lab.qemu_io(&io), &io);
        let short = [OBJECT[0], OBJECT[1], "-f", case.filter, case.format];
        let told = [&short[..], &["-c", "length"]].concat();
        let alone = Case {
            options: Vec::new(),
            ..case.clone()
        };
        judge(&alone, lab.zebu_io(&told), || lab.qemu_io(&told), &told);
        let told = [&["info"][..], &short].concat();
        judge(&alone, lab.zebu(&told), || lab.qemu_img(&told), &told);
        let Some(dotted) = dotted else {
            continue;
        };
        let listed = ["info", OBJECT[0], OBJECT[1], "--image-opts", &dotted];
        judge(&case, lab.zebu(&listed), || lab.qemu_img(&listed), &listed);
        let (io, script) = (
            [OBJECT[0], OBJECT[1]],
            format!("open -o {dotted}\nlength\n"),
        );
        let ours = lab.zebu_io_script(&io, &script);
        judge(&case, ours, || lab.qemu_io_script(&io, &script), &[&script]);
    }
}

#[track_caller]
fn judge(case: &Case, ours: Answer, theirs: impl Fn() -> Answer, args: &[&str]) {
    let what = args.join(" ");
    if case.filter == "xor" {
        return case.judge_alone(&ours, &what);
    }
    let theirs = theirs();
    if case.has_empty_value() && theirs.status == 0 {
        assert!(
            ours.err.contains("does not support the option"),
            "{what}: {ours:?}"
        );
        return;
    }
    match peer().is_current() {
        true => {
            let mut theirs = theirs;
            // Zebu has a hint of its own.
            let hint = |line: &&str| {
                !line.starts_with("Optional suffix") && !line.starts_with("and exabytes")
            };
            theirs.err = theirs.err.split_inclusive('\n').filter(hint).collect();
            compare_answers(&ours, &theirs, args, "options of a filter");
        }
        false => assert_eq!(ours.status, theirs.status, "{what}: {ours:?} {theirs:?}"),
    }
}
