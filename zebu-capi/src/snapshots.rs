//! Internal snapshots.

use std::ffi::{c_char, c_int};

use zebu::qcow2::SnapshotName;

use crate::device::{Handle, given};
use crate::error::{Out, call_code, call_object};
use crate::list::{List, Strings};
use crate::text::Text;

/// `zebu_snapshot`.
#[derive(Debug)]
#[repr(C)]
pub struct CSnapshot {
    pub id: *const c_char,
    pub name: *const c_char,
    pub disk_size: u64,
    pub vm_state_size: u64,
    pub vm_clock_nsec: u64,
    pub date_sec: u32,
    pub date_nsec: u32,
}

#[unsafe(no_mangle)]
extern "C" fn zebu_snapshots(
    device: Option<&Handle>,
    error: Out<'_>,
) -> Option<Box<List<CSnapshot>>> {
    call_object(error, || {
        let snapshots = given(device)?.wait(|_, device| async move {
            let device = device.enter().await?;
            Ok(device.top().snapshots().unwrap_or_default().to_vec())
        })?;
        let mut strings = Strings::default();
        let items = snapshots.iter().map(|snapshot| CSnapshot {
            id: strings.add(snapshot.id_text()),
            name: strings.add(snapshot.name_text()),
            disk_size: snapshot.disk_size().unwrap_or(u64::MAX),
            vm_state_size: snapshot.vm_state_size(),
            vm_clock_nsec: snapshot.vm_clock_nsec,
            date_sec: snapshot.date_sec,
            date_nsec: snapshot.date_nsec,
        });
        let items = items.collect();
        Ok(List::new(items, strings))
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_snapshot_list_free(list: Option<Box<List<CSnapshot>>>) {
    drop(list);
}

#[unsafe(no_mangle)]
extern "C" fn zebu_snapshot_create(device: Option<&Handle>, name: Text, error: Out<'_>) -> c_int {
    call_code(error, || {
        let name = name.name("name")?.as_encoded_bytes().to_vec();
        given(device)?
            .wait(|queue, device| async move { device.snapshot_create(&queue, name).await })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_snapshot_apply(device: Option<&Handle>, name: Text, error: Out<'_>) -> c_int {
    call_code(error, || {
        let name = SnapshotName::from(name.name("name")?.as_encoded_bytes());
        given(device)?
            .wait(|queue, device| async move { device.snapshot_apply(&queue, &name).await })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_snapshot_delete(device: Option<&Handle>, name: Text, error: Out<'_>) -> c_int {
    call_code(error, || {
        let name = SnapshotName::from(name.name("name")?.as_encoded_bytes());
        given(device)?
            .wait(|queue, device| async move { device.snapshot_delete(&queue, &name).await })
    })
}
