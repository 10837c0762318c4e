//! New images of formats that are filled once: at any moment a power cut leaves a whole image or
//! none, also where there was another image before. So does an operation that fails.

use std::sync::Arc;

use zebu::block::{Device, Format, OpenOptions};
use zebu::jobs::{self, ConvertOptions, CreateValue, CreateValues, PlanRequest, begin_image};
use zebu::storage::{EngineKind, Memory, Queue, Storage};

use crate::common::faulty::libc_enospc;
use crate::common::{Rng, Watchdog, cases, encryption, progress};
use crate::disk::{Disk, Failure, Fault};
use crate::queue;
use crate::states::Cutter;

/// A format and its options.
#[derive(Debug)]
struct Form {
    format: &'static str,
    /// Switches that are on.
    options: &'static [&'static str],
    /// The value of `subformat`, if it is given.
    subformat: Option<&'static str>,
}

const FORMS: [Form; 10] = [
    Form {
        format: "luks",
        options: &[],
        subformat: None,
    },
    Form {
        format: "vdi",
        options: &[],
        subformat: None,
    },
    Form {
        format: "vdi",
        options: &["static"],
        subformat: None,
    },
    Form {
        format: "vpc",
        options: &["force_size"],
        subformat: None,
    },
    Form {
        format: "vpc",
        options: &["force_size"],
        subformat: Some("fixed"),
    },
    Form {
        format: "vhdx",
        options: &[],
        subformat: None,
    },
    Form {
        format: "vhdx",
        options: &[],
        subformat: Some("fixed"),
    },
    Form {
        format: "vmdk",
        options: &[],
        subformat: None,
    },
    Form {
        format: "vmdk",
        options: &["zeroed_grain"],
        subformat: None,
    },
    Form {
        format: "vmdk",
        options: &[],
        subformat: Some("streamOptimized"),
    },
];

/// What is found in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// It does not open.
    Nothing,
    /// The image that was there before.
    Old,
    New,
    Other,
}

/// A conversion.
struct Conversion {
    form: &'static Form,
    old: Vec<u8>,
    new: Vec<u8>,
}

impl Form {
    fn values(&self) -> CreateValues {
        let switches = self.options.iter();
        let values = switches.fold(CreateValues::default(), |values, name| {
            values.with(name, CreateValue::Switch(true))
        });
        match self.subformat {
            Some(name) => values.with("subformat", CreateValue::Text(name.into())),
            None if self.format == "luks" => encryption::container(values),
            None => values,
        }
    }

    /// Converts `content` to an image in `file`.
    fn convert(
        &self,
        queue: &Queue,
        rng: &mut Rng,
        content: &[u8],
        file: Arc<dyn Storage>,
    ) -> Result<(), String> {
        let format: Format = self.format.parse().unwrap();
        let plan = format.plan(&PlanRequest {
            path: "x".as_ref(),
            size: content.len() as u64,
            options: &self.values(),
            backing_id: None,
        });
        let plan = plan.unwrap();
        let target = begin_image(queue, &*plan, vec![file]).map_err(|e| e.to_string())?;
        let source = Arc::new(Memory::new(content.to_vec()));
        let source = Device::from_storage(queue, source, &raw());
        let options = ConvertOptions::default()
            .workers(Some(1 + rng.below(4) as usize))
            .any_order(rng.one_in(2))
            .sparse([0, 4096][rng.index(2)])
            .engine(EngineKind::Threads);
        jobs::convert(vec![source.unwrap()], target, &options, |_| {}).map_err(|e| e.to_string())
    }

    /// Whether `file` is an image with one of these contents.
    fn contents(
        &self,
        queue: &Queue,
        file: Arc<dyn Storage>,
        contents: [&[u8]; 2],
    ) -> Option<[bool; 2]> {
        let options = OpenOptions::default().objects(encryption::objects());
        let options = options.format(Some(self.format.parse().unwrap()));
        let device = Device::from_storage(queue, file, &options).ok()?;
        let mut bytes = vec![0; device.size() as usize];
        let read = device.read_blocking(queue, 0, &mut bytes);
        Some(contents.map(|content| read.is_ok() && bytes == content))
    }
}

fn raw() -> OpenOptions {
    OpenOptions::default().format(Some(Format::RAW))
}

/// A disk with some data.
fn content(rng: &mut Rng, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    for _ in 0..1 + rng.below(4) {
        let at = rng.index(size);
        let length = (1 + rng.index(12_000)).min(size - at);
        rng.fill(&mut bytes[at..at + length]);
    }
    bytes
}

impl Conversion {
    fn new(form: &'static Form, rng: &mut Rng) -> Self {
        let mut size = || 512 * (1 + rng.index(6000));
        let (old, new) = (size(), size());
        // Old and new data may be in the same places.
        let old = if rng.one_in(2) { new } else { old };
        Conversion {
            form,
            old: content(rng, old),
            new: content(rng, new),
        }
    }

    /// Runs it on a disk that may hold another image, and returns the disk, its file and the result.
    fn run(
        &self,
        queue: &Queue,
        rng: &mut Rng,
        fault: Option<Fault>,
    ) -> (Arc<Disk>, Arc<crate::disk::File>, Result<(), String>) {
        let held = Arc::new(Memory::default());
        if rng.one_in(2) {
            self.form
                .convert(queue, rng, &self.old, held.clone())
                .unwrap();
        }
        let delays = rng.one_in(2).then(|| Rng::new(rng.next()));
        let disk = Disk::new(delays, fault);
        let file = disk.files(vec![held.to_vec()]).remove(0);
        let result = self.form.convert(queue, rng, &self.new, file.clone());
        (disk, file, result)
    }

    fn find(&self, queue: &Queue, file: Arc<dyn Storage>) -> Found {
        match self.form.contents(queue, file, [&self.old, &self.new]) {
            None => Found::Nothing,
            Some([_, true]) => Found::New,
            Some([true, _]) => Found::Old,
            Some([false, false]) => Found::Other,
        }
    }
}

#[test]
fn a_power_cut_leaves_a_whole_image_or_none() {
    let queue = queue();
    for form in &FORMS {
        let what = format!("states of new images after a power cut ({form:?})");
        let mut seeds = cases(4, what).share(1, FORMS.len());
        while let Some(seed) = seeds.next() {
            let what = format!("{form:?}, seed {seed}");
            let _watchdog = Watchdog::new(&what);
            let mut rng = Rng::new(seed);
            let conversion = Conversion::new(form, &mut rng);
            let (disk, file, result) = conversion.run(&queue, &mut rng, None);
            result.unwrap();
            let ended = disk.now();
            let log = disk.log().clone();
            let mut moments = Cutter::moments(&log);
            moments.push(ended);
            moments.sort_unstable();
            let mut cutter = Cutter::new(&[file], &log);
            for moment in moments {
                cutter.cut(moment, &mut rng, 2, |state, _| {
                    seeds.add(1);
                    progress();
                    let found = conversion.find(&queue, state[0].clone());
                    let is_right = match found {
                        Found::Nothing | Found::Old => moment < ended,
                        Found::New => true,
                        Found::Other => false,
                    };
                    assert!(is_right, "{what}, time {moment} of {ended}: {found:?}");
                });
            }
        }
    }
}

#[test]
fn an_error_leaves_a_whole_image_or_none() {
    let queue = queue();
    for form in &FORMS {
        let what = format!("failures of an operation of a new image ({form:?})");
        let mut seeds = cases(1, what).share(1, FORMS.len());
        while let Some(seed) = seeds.next() {
            let what = format!("{form:?}, seed {seed}");
            let _watchdog = Watchdog::new(&what);
            for nth in 1.. {
                let mut is_over = false;
                for how in [Failure::Error(libc_enospc()), Failure::Short] {
                    let mut rng = Rng::new(seed);
                    let conversion = Conversion::new(form, &mut rng);
                    let fault = Fault { nth, how };
                    let (disk, file, result) = conversion.run(&queue, &mut rng, Some(fault));
                    progress();
                    let operations = disk.operations();
                    let left = Arc::new(Memory::new(file.to_vec()));
                    let found = conversion.find(&queue, left);
                    let is_right = match (&result, disk.failed(), found) {
                        (Ok(()), false, Found::New) => true,
                        (Err(_), true, found) => found != Found::Other,
                        _ => false,
                    };
                    assert!(is_right, "{what}, {fault:?}: {result:?}, {found:?}");
                    is_over |= operations < nth;
                    seeds.add(u64::from(operations >= nth));
                }
                if is_over {
                    break;
                }
            }
        }
    }
}
