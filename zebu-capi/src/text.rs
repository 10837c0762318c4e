//! Strings and structures of the caller.

use std::ffi::{CStr, CString, OsStr, c_char};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;

use crate::error::{Failure, Result};

/// `const char *`: NULL, or a string that is valid during the call.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    /// Its bytes, without the NUL; None for NULL.
    pub fn bytes(&self) -> Option<&[u8]> {
        // SAFETY: the header promises a string that lives during the call, and `self` does not
        // outlive it.
        (!self.0.is_null()).then(|| unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// The name of a file or an object that must be given.
    pub fn name(&self, what: &str) -> Result<&OsStr> {
        let bytes = self.bytes().ok_or_else(|| Failure::null(what))?;
        Ok(OsStr::from_bytes(bytes))
    }

    /// A word; None for NULL.
    pub fn word(&self, what: &str) -> Result<Option<&str>> {
        let word = self.bytes().map(std::str::from_utf8).transpose();
        word.map_err(|_| Failure::misuse(&format!("{what} is not UTF-8")))
    }
}

/// A string for the caller: up to the first NUL byte.
pub fn c_string(bytes: impl AsRef<[u8]>) -> CString {
    let bytes = bytes.as_ref();
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    CString::new(&bytes[..end]).expect("without NUL")
}

/// A structure of options, which begins with its size. All zeroes are the defaults.
///
/// # Safety
/// It is `repr(C)`, begins with a `usize`, and all zeroes and every combination of valid pointers
/// and numbers are values.
pub unsafe trait Options: Copy {
    /// Its name.
    const NAME: &'static str;
}

/// `const zebu_..._options *`: NULL, or a structure of `struct_size` bytes, which an older program
/// may have shorter and a newer one longer.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct OptionsPointer<T>(*const T);

impl<T: Options> OptionsPointer<T> {
    /// A copy; the defaults for NULL.
    pub fn get(self) -> Result<T> {
        let mut options = MaybeUninit::<T>::zeroed();
        if self.0.is_null() {
            // SAFETY: all zeroes are a value.
            return Ok(unsafe { options.assume_init() });
        }
        // SAFETY: it begins with its size, which the header requires the caller to set.
        let size = unsafe { self.0.cast::<usize>().read() };
        let wrong = || Failure::misuse(&format!("{} has no valid struct_size", T::NAME));
        if size < size_of::<usize>() || size > 4096 {
            return Err(wrong());
        }
        // SAFETY: the caller promises so many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), size) };
        let known = size.min(size_of::<T>());
        if bytes[known..].iter().any(|byte| *byte != 0) {
            let name = T::NAME;
            let why = format!("{name} sets what this version of the library does not have");
            return Err(Failure::misuse(&why));
        }
        // SAFETY: `known` bytes are in both. What the caller does not have stays zero.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), options.as_mut_ptr().cast(), known);
            Ok(options.assume_init())
        }
    }
}

/// Refuses bits that are not in `known`.
pub fn check_flags(flags: u32, known: u32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        other => Err(Failure::misuse(&format!("Unknown flags {other:#x}"))),
    }
}

/// Refuses a reserved field that is not 0, so that it can get a meaning later.
pub fn check_reserved(reserved: u32) -> Result<()> {
    match reserved {
        0 => Ok(()),
        _ => Err(Failure::misuse("A reserved field is not 0")),
    }
}
