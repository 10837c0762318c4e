//! Dirty bitmaps.

use std::ffi::{c_char, c_int};

use crate::device::{Handle, given};
use crate::error::{Out, call_code, call_object};
use crate::list::{List, Strings};
use crate::text::{Text, check_flags};

const ENABLED: u32 = 1 << 0;
const INCONSISTENT: u32 = 1 << 1;

/// `zebu_bitmap`.
#[derive(Debug)]
#[repr(C)]
pub struct CBitmap {
    pub name: *const c_char,
    pub granularity: u64,
    pub flags: u32,
    pub reserved: u32,
}

/// `zebu_range`.
#[derive(Debug)]
#[repr(C)]
pub struct CRange {
    pub offset: u64,
    pub length: u64,
}

#[unsafe(no_mangle)]
extern "C" fn zebu_bitmaps(device: Option<&Handle>, error: Out<'_>) -> Option<Box<List<CBitmap>>> {
    call_object(error, || {
        let bitmaps = given(device)?
            .wait(|queue, device| async move { device.enter().await?.bitmaps(&queue).await })?;
        let mut strings = Strings::default();
        let flag = |is: bool, flag| if is { flag } else { 0 };
        let items = bitmaps.iter().map(|bitmap| CBitmap {
            name: strings.add(&bitmap.name),
            granularity: bitmap.granularity,
            flags: flag(bitmap.enabled, ENABLED) | flag(bitmap.inconsistent, INCONSISTENT),
            reserved: 0,
        });
        let items = items.collect();
        Ok(List::new(items, strings))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_bitmap_list_free(list: Option<Box<List<CBitmap>>>) {
    drop(list);
}

#[unsafe(no_mangle)]
extern "C" fn zebu_bitmap_add(
    device: Option<&Handle>,
    name: Text,
    granularity: u64,
    flags: u32,
    error: Out<'_>,
) -> c_int {
    call_code(error, || {
        check_flags(flags, ENABLED)?;
        let name = name.name("name")?.to_owned();
        let granularity = (granularity != 0).then_some(granularity);
        given(device)?.wait(|queue, device| async move {
            let name = name.as_encoded_bytes();
            let enabled = flags & ENABLED != 0;
            device.bitmap_add(&queue, name, granularity, enabled).await
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_bitmap_remove(device: Option<&Handle>, name: Text, error: Out<'_>) -> c_int {
    call_code(error, || {
        let name = name.name("name")?.to_owned();
        given(device)?.wait(|queue, device| async move {
            device.bitmap_remove(&queue, name.as_encoded_bytes()).await
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_bitmap_enable(device: Option<&Handle>, name: Text, error: Out<'_>) -> c_int {
    enable(device, name, true, error)
}

#[unsafe(no_mangle)]
extern "C" fn zebu_bitmap_disable(device: Option<&Handle>, name: Text, error: Out<'_>) -> c_int {
    enable(device, name, false, error)
}

fn enable(device: Option<&Handle>, name: Text, enabled: bool, error: Out<'_>) -> c_int {
    call_code(error, || {
        let name = name.name("name")?.to_owned();
        given(device)?.wait(|queue, device| async move {
            let name = name.as_encoded_bytes();
            device.bitmap_enable(&queue, name, enabled).await
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_bitmap_clear(device: Option<&Handle>, name: Text, error: Out<'_>) -> c_int {
    call_code(error, || {
        let name = name.name("name")?.to_owned();
        given(device)?.wait(|queue, device| async move {
            device.bitmap_clear(&queue, name.as_encoded_bytes()).await
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_bitmap_dirty(
    device: Option<&Handle>,
    name: Text,
    error: Out<'_>,
) -> Option<Box<List<CRange>>> {
    call_object(error, || {
        let name = name.name("name")?.to_owned();
        let bits = given(device)?.wait(|queue, device| async move {
            let device = device.enter().await?;
            device.bitmap(&queue, name.as_encoded_bytes()).await
        })?;
        let ranges = bits.ranges().map(|range| CRange {
            offset: range.start,
            length: range.end - range.start,
        });
        Ok(List::new(ranges.collect(), Strings::default()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_range_list_free(list: Option<Box<List<CRange>>>) {
    drop(list);
}
