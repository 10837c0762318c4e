//! Lists for the caller.

use std::ffi::{CString, c_char};

use crate::text::c_string;

/// `struct { size_t count; const T *items; }`, and what it points to.
#[derive(Debug)]
#[repr(C)]
pub struct List<T> {
    pub count: usize,
    pub items: *const T,
    _owned: (Vec<T>, Strings),
}

impl<T> List<T> {
    /// A list of `items`, whose strings are in `strings`.
    pub fn new(items: Vec<T>, strings: Strings) -> List<T> {
        List {
            count: items.len(),
            // It stays valid when the vector is moved. An empty one points nowhere, which Go does not
            // take for a pointer.
            items: items.first().map_or(std::ptr::null(), |_| items.as_ptr()),
            _owned: (items, strings),
        }
    }
}

/// Strings that structures of the caller point to.
#[derive(Debug, Default)]
pub struct Strings(Vec<CString>);

impl Strings {
    /// Adds a string. The pointer is valid as long as `self`, also if that is moved.
    pub fn add(&mut self, bytes: impl AsRef<[u8]>) -> *const c_char {
        let string = c_string(bytes);
        let pointer = string.as_ptr();
        self.0.push(string);
        pointer
    }
}
