//! Errors, and the boundary that no panic crosses.

use std::any::Any;
use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use zebu::{Error, ErrorKind};

use crate::text::c_string;

/// `zebu_error_kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum Kind {
    None,
    NotFound,
    NotPermitted,
    Locked,
    Corrupt,
    Dirty,
    OutOfRange,
    NoSpace,
    Unsupported,
    Refused,
    Limit,
    Io,
    Canceled,
    Misuse,
    Panic,
}

/// `zebu_error`.
#[derive(Clone, Debug)]
pub struct Failure {
    kind: Kind,
    errno: c_int,
    message: CString,
}

/// The result of what is done for a caller.
pub type Result<T> = std::result::Result<T, Failure>;

/// `zebu_error **error`: NULL, or where the error goes. What is there may be uninitialised.
pub type Out<'a> = Option<&'a mut MaybeUninit<Option<Box<Failure>>>>;

impl Failure {
    /// A failure of a kind that [`Error`] does not have.
    fn new(kind: Kind, errno: c_int, message: &str) -> Failure {
        Failure {
            kind,
            errno,
            message: c_string(message),
        }
    }

    /// A call that the header forbids.
    pub fn misuse(message: &str) -> Failure {
        Failure::new(Kind::Misuse, libc::EINVAL, message)
    }

    /// An argument that must not be NULL.
    pub fn null(name: &str) -> Failure {
        Failure::misuse(&format!("{name} is NULL"))
    }

    /// The end of a job that was cancelled.
    pub fn canceled() -> Failure {
        Failure::new(Kind::Canceled, libc::ECANCELED, "The job was cancelled")
    }

    /// What a panic said.
    pub fn panicked(payload: &(dyn Any + Send)) -> Failure {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or(payload.downcast_ref::<&str>().copied());
        let message = format!("A defect of zebu: {}", text.unwrap_or("it panicked"));
        Failure::new(Kind::Panic, libc::EIO, &message)
    }

    /// The failure with a context, unless it says as much already.
    pub fn during(self, context: &str) -> Failure {
        if self.message.to_bytes().starts_with(context.as_bytes()) {
            return self;
        }
        let message = format!("{context}: {}", self.message.to_string_lossy());
        Failure::new(self.kind, self.errno, &message)
    }

    /// What functions that return a number return.
    pub fn code(&self) -> c_int {
        -self.errno
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let kind = match error.kind() {
            ErrorKind::NotFound => Kind::NotFound,
            ErrorKind::NotPermitted => Kind::NotPermitted,
            ErrorKind::Locked => Kind::Locked,
            ErrorKind::Corrupt => Kind::Corrupt,
            ErrorKind::Dirty => Kind::Dirty,
            ErrorKind::OutOfRange => Kind::OutOfRange,
            ErrorKind::NoSpace => Kind::NoSpace,
            ErrorKind::Unsupported => Kind::Unsupported,
            ErrorKind::Refused => Kind::Refused,
            ErrorKind::Limit => Kind::Limit,
            _ if error.errno() == libc::ECANCELED => return Failure::canceled(),
            _ => Kind::Io,
        };
        // A code of 0 would be a success.
        let errno = match error.errno() {
            errno if errno > 0 => errno,
            _ => libc::EIO,
        };
        Failure::new(kind, errno, &error.to_string())
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Error::from(error).into()
    }
}

/// Executes the body of an exported function, and stores its error. A panic is one.
pub fn call<T>(error: Out<'_>, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|payload| Err(Failure::panicked(&*payload)));
    if let Some(error) = error {
        error.write(result.as_ref().err().map(|e| Box::new(e.clone())));
    }
    result
}

/// [`call`] for functions that return 0 or a negative `errno`.
pub fn call_code(error: Out<'_>, body: impl FnOnce() -> Result<()>) -> c_int {
    match call(error, body) {
        Ok(()) => 0,
        Err(failure) => failure.code(),
    }
}

/// [`call`] for functions that return a number or a negative `errno`.
pub fn call_count(error: Out<'_>, body: impl FnOnce() -> Result<usize>) -> isize {
    match call(error, body) {
        Ok(count) => count as isize,
        Err(failure) => failure.code() as isize,
    }
}

/// [`call`] for functions that return an object or NULL.
pub fn call_object<T>(error: Out<'_>, body: impl FnOnce() -> Result<T>) -> Option<Box<T>> {
    call(error, body).ok().map(Box::new)
}

#[unsafe(no_mangle)]
extern "C" fn zebu_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

#[unsafe(no_mangle)]
extern "C" fn zebu_error_get_kind(error: Option<&Failure>) -> Kind {
    error.map_or(Kind::None, |error| error.kind)
}

#[unsafe(no_mangle)]
extern "C" fn zebu_error_get_errno(error: Option<&Failure>) -> c_int {
    error.map_or(0, |error| error.errno)
}

#[unsafe(no_mangle)]
extern "C" fn zebu_error_get_message(error: Option<&Failure>) -> *const c_char {
    error.map_or(c"".as_ptr(), |error| error.message.as_ptr())
}

#[unsafe(no_mangle)]
extern "C" fn zebu_error_free(error: Option<Box<Failure>>) {
    drop(error);
}

#[cfg(test)]
mod tests {
    //! Guards against a panic that unwinds into C.
    use super::*;

    #[test]
    fn a_panic_is_an_error() {
        let mut error = MaybeUninit::uninit();
        let code = call_code(Some(&mut error), || panic!("number {}", 7));
        assert_eq!(code, -libc::EIO);
        // SAFETY: `call_code` has written it.
        let error = unsafe { error.assume_init() };
        assert_eq!(zebu_error_get_kind(error.as_deref()), Kind::Panic);
        let message = &error.as_ref().unwrap().message;
        assert_eq!(message.as_c_str(), c"A defect of zebu: number 7");
    }
}
