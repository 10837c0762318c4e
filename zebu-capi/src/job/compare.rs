//! Comparison.

use std::ffi::c_int;

use zebu::jobs::{self, CompareError, CompareOptions, Comparison};
use zebu::{Queue, QueueOptions};

use super::{Job, Outcome, start};
use crate::error::{Failure, Out, Result, call_object};
use crate::open::{COpenOptions, Opening};
use crate::text::{OptionsPointer, Text, check_flags};

const STRICT: u32 = 1 << 0;

/// `zebu_compare_result`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CCompareResult {
    pub identical: c_int,
    pub reserved: c_int,
    pub offset: u64,
}

/// The failure of a comparison of these images.
fn failure(error: CompareError, names: &[String; 2]) -> Failure {
    match error {
        CompareError::Engine(error) => error.into(),
        CompareError::Status { device, source, .. } | CompareError::Read { device, source, .. } => {
            Failure::from(source).during(&names[device])
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn zebu_compare(
    first: Text,
    first_options: OptionsPointer<COpenOptions>,
    second: Text,
    second_options: OptionsPointer<COpenOptions>,
    flags: u32,
    error: Out<'_>,
) -> Option<Box<Job>> {
    call_object(error, || {
        check_flags(flags, STRICT)?;
        let openings = [
            Opening::new(first, "first", &first_options.get()?)?,
            Opening::new(second, "second", &second_options.get()?)?,
        ];
        let engine = openings[0].engine;
        let names = [0, 1].map(|n: usize| openings[n].name().display().to_string());
        let prepare = move || {
            let queue = Queue::new(QueueOptions::default().engine(engine))?;
            let [first, second] = openings;
            let devices = [first.open(&queue)?, second.open(&queue)?];
            Ok(devices)
        };
        start(prepare, move |devices, state| -> Result<Outcome> {
            let sizes = [devices[0].size(), devices[1].size()];
            let is_strict = flags & STRICT != 0;
            let differ = |offset| CCompareResult {
                identical: 0,
                reserved: 0,
                offset,
            };
            if is_strict && sizes[0] != sizes[1] {
                return Ok(Outcome::Compared(differ(sizes[0].min(sizes[1]))));
            }
            let options = CompareOptions::default().strict(is_strict).engine(engine);
            let result = jobs::compare(devices, &options, |now| state.progress(now));
            Ok(Outcome::Compared(
                match result.map_err(|e| failure(e, &names))? {
                    Comparison::Identical => CCompareResult {
                        identical: 1,
                        ..differ(0)
                    },
                    Comparison::Content(offset) | Comparison::Status(offset) => differ(offset),
                },
            ))
        })
    })
}
