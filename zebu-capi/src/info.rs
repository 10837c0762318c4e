//! What an image is.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStrExt;

use zebu::Device;
use zebu::names::json_string;

use crate::device::{Handle, given};
use crate::error::{Out, Result, call, call_object};
use crate::list::Strings;
use crate::text::c_string;

const WRITABLE: u32 = 1 << 0;
const ENCRYPTED: u32 = 1 << 1;
const DIRTY: u32 = 1 << 2;

/// `zebu_info`, and its strings.
#[derive(Debug)]
#[repr(C)]
pub struct CInfo {
    pub size: u64,
    pub allocated_size: u64,
    pub cluster_size: u64,
    pub flags: u32,
    pub snapshots: u32,
    pub format: *const c_char,
    pub filename: *const c_char,
    pub backing_filename: *const c_char,
    pub backing_format: *const c_char,
    _strings: Strings,
}

/// The same with Rust's types.
struct Info {
    size: u64,
    allocated_size: Option<u64>,
    cluster_size: Option<u64>,
    flags: u32,
    snapshots: u32,
    format: &'static str,
    filename: Vec<u8>,
    backing_filename: Option<Vec<u8>>,
    backing_format: Option<Vec<u8>>,
}

impl Info {
    fn of(device: &Device) -> Info {
        let layer = device.top();
        let backing = layer.backing();
        let flags = [
            (device.is_writable(), WRITABLE),
            (layer.is_encrypted(), ENCRYPTED),
            (layer.is_dirty() == Some(true), DIRTY),
        ];
        let flags = flags.iter().filter(|(is, _)| *is).map(|(_, flag)| flag);
        let allocated = layer
            .storages()
            .into_iter()
            .map(|file| file.allocated().ok());
        Info {
            size: device.size(),
            allocated_size: allocated.sum(),
            cluster_size: layer.cluster_size(),
            flags: flags.sum(),
            snapshots: layer.snapshots().map_or(0, |all| all.len() as u32),
            format: layer.format().name(),
            filename: layer.spec.display_name().as_bytes().to_vec(),
            backing_filename: backing.map(|backing| backing.name.to_vec()),
            backing_format: backing
                .and_then(|backing| backing.format)
                .filter(|format| !format.is_empty())
                .map(<[u8]>::to_vec),
        }
    }

    fn get(device: Option<&Handle>) -> Result<Info> {
        given(device)?.wait(|_, device| async move {
            let device = device.enter().await?;
            Ok(Info::of(&device))
        })
    }

    fn to_json(&self) -> String {
        let text = |bytes: &[u8]| Some(json_string(bytes));
        let flag = |flag| Some((self.flags & flag != 0).to_string());
        let members = [
            ("virtual-size", Some(self.size.to_string())),
            ("filename", text(&self.filename)),
            ("format", text(self.format.as_bytes())),
            ("cluster-size", self.cluster_size.map(|n| n.to_string())),
            ("actual-size", self.allocated_size.map(|n| n.to_string())),
            (
                "backing-filename",
                self.backing_filename.as_deref().and_then(text),
            ),
            (
                "backing-filename-format",
                self.backing_format.as_deref().and_then(text),
            ),
            ("snapshots", Some(self.snapshots.to_string())),
            ("encrypted", flag(ENCRYPTED)),
            ("dirty-flag", flag(DIRTY)),
        ];
        let members = members
            .into_iter()
            .filter_map(|(key, value)| value.map(|value| format!("\"{key}\": {value}")));
        format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
    }
}

#[unsafe(no_mangle)]
extern "C" fn zebu_get_info(device: Option<&Handle>, error: Out<'_>) -> Option<Box<CInfo>> {
    call_object(error, || {
        let info = Info::get(device)?;
        let mut strings = Strings::default();
        let mut add = |bytes: Option<&[u8]>| bytes.map_or(std::ptr::null(), |b| strings.add(b));
        Ok(CInfo {
            size: info.size,
            allocated_size: info.allocated_size.unwrap_or(u64::MAX),
            cluster_size: info.cluster_size.unwrap_or(0),
            flags: info.flags,
            snapshots: info.snapshots,
            format: add(Some(info.format.as_bytes())),
            filename: add(Some(&info.filename)),
            backing_filename: add(info.backing_filename.as_deref()),
            backing_format: add(info.backing_format.as_deref()),
            _strings: strings,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn zebu_info_free(info: Option<Box<CInfo>>) {
    drop(info);
}

#[unsafe(no_mangle)]
extern "C" fn zebu_get_info_json(device: Option<&Handle>, error: Out<'_>) -> *mut c_char {
    let json = call(error, || Ok(c_string(Info::get(device)?.to_json())));
    json.map_or(std::ptr::null_mut(), CString::into_raw)
}

#[unsafe(no_mangle)]
extern "C" fn zebu_string_free(string: *mut c_char) {
    if !string.is_null() {
        // SAFETY: the header requires a string that the library has returned, by `into_raw`.
        drop(unsafe { CString::from_raw(string) });
    }
}
