//! The local time, which the standard library does not know.
#![allow(unsafe_code)]

/// Seconds since the epoch as `2026-11-20 20:09:17` in the local time zone.
pub fn format(seconds: i64) -> String {
    // SAFETY: all-zero is a valid `tm`: numbers and a null pointer.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // `libc::time_t` is deprecated where the C library is musl.
    let time = seconds as _;
    // SAFETY: both point to valid values for the time of the call; nothing in
    // this program changes the environment, from which the zone is read.
    if unsafe { libc::localtime_r(&time, &mut tm) }.is_null() {
        return format!("@{seconds}");
    }
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        i64::from(tm.tm_year) + 1900,
        tm.tm_mon + 1,
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec
    )
}
