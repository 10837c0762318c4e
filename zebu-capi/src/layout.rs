//! The layout of the structures of `zebu.h` as Rust has it.

use std::mem::offset_of;

use crate::bitmaps::{CBitmap, CRange};
use crate::info::CInfo;
use crate::io::CExtent;
use crate::job::{CCheckResult, CCompareResult, CConvertOptions, CProgress};
use crate::list::List;
use crate::open::COpenOptions;
use crate::queue::{CCompletion, CQueueOptions};
use crate::snapshots::CSnapshot;

/// `structure.member` and its offset in bytes, for every member of every structure.
pub fn offsets() -> Vec<(String, usize)> {
    let mut all = Vec::new();
    macro_rules! structure {
        ($name:literal, $type:ty, $($member:ident),+) => {
            $(all.push((
                format!("{}.{}", $name, stringify!($member)),
                offset_of!($type, $member),
            ));)+
        };
    }
    structure!(
        "zebu_open_options",
        COpenOptions,
        struct_size,
        flags,
        reserved,
        format,
        cache,
        engine,
        snapshot,
        limits,
        l2_cache_size
    );
    structure!(
        "zebu_info",
        CInfo,
        size,
        allocated_size,
        cluster_size,
        flags,
        snapshots,
        format,
        filename,
        backing_filename,
        backing_format
    );
    structure!(
        "zebu_extent",
        CExtent,
        offset,
        length,
        host_offset,
        flags,
        depth
    );
    structure!(
        "zebu_snapshot",
        CSnapshot,
        id,
        name,
        disk_size,
        vm_state_size,
        vm_clock_nsec,
        date_sec,
        date_nsec
    );
    structure!("zebu_snapshot_list", List<CSnapshot>, count, items);
    structure!("zebu_bitmap", CBitmap, name, granularity, flags, reserved);
    structure!("zebu_bitmap_list", List<CBitmap>, count, items);
    structure!("zebu_range", CRange, offset, length);
    structure!("zebu_range_list", List<CRange>, count, items);
    structure!(
        "zebu_queue_options",
        CQueueOptions,
        struct_size,
        flags,
        reserved,
        engine
    );
    structure!("zebu_completion", CCompletion, cookie, error, result);
    structure!(
        "zebu_convert_options",
        CConvertOptions,
        struct_size,
        flags,
        level,
        source,
        target_format,
        target_options,
        rate
    );
    structure!("zebu_progress", CProgress, done, total, ended);
    structure!(
        "zebu_check_result",
        CCheckResult,
        corruptions,
        leaks,
        check_errors,
        corruptions_fixed,
        leaks_fixed,
        total_clusters,
        allocated_clusters,
        fragmented_clusters,
        compressed_clusters,
        image_end_offset
    );
    structure!(
        "zebu_compare_result",
        CCompareResult,
        identical,
        reserved,
        offset
    );
    all
}
