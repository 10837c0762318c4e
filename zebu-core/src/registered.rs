//! What crates above this one register: formats and protocols.
//!
//! This crate declares functions that a program has once: the crate `zebu` defines them by [`register!`], and so
//! do the tests of crates that are linked without it. It is as with a global allocator: a program in which they
//! are missing, or are twice, is not linked. So there is nothing that has to be called first, and nothing that
//! a linker could leave out.
#![cfg_attr(not(test), allow(unsafe_code))]

/// Defines what is registered, once in a program.
#[doc(hidden)]
#[macro_export]
macro_rules! register {
    (formats: $formats:expr, protocols: $protocols:expr $(,)?) => {
        const _: () = {
            // SAFETY: `zebu_core::registered` declares them with these types, and nothing else has these
            // names.
            #[unsafe(no_mangle)]
            fn __zebu_core_0_1_formats() -> &'static [&'static $crate::parts::drivers::Driver] {
                $formats
            }
            // SAFETY: as above.
            #[unsafe(no_mangle)]
            fn __zebu_core_0_1_protocols() -> &'static [&'static $crate::parts::protocols::Driver] {
                $protocols
            }
        };
    };
}

pub use linked::{formats, protocols};

#[cfg(not(test))]
mod linked {
    use crate::drivers;
    use crate::protocols;

    // SAFETY: `register!` defines them with these types.
    unsafe extern "Rust" {
        safe fn __zebu_core_0_1_formats() -> &'static [&'static drivers::Driver];
        safe fn __zebu_core_0_1_protocols() -> &'static [&'static protocols::Driver];
    }

    /// Formats, in the order of probing.
    pub fn formats() -> &'static [&'static drivers::Driver] {
        __zebu_core_0_1_formats()
    }

    /// Protocols.
    pub fn protocols() -> &'static [&'static protocols::Driver] {
        __zebu_core_0_1_protocols()
    }
}

/// Nothing is registered in the unit tests of this crate.
#[cfg(test)]
mod linked {
    use crate::drivers;
    use crate::protocols;

    pub fn formats() -> &'static [&'static drivers::Driver] {
        &[]
    }

    pub fn protocols() -> &'static [&'static protocols::Driver] {
        &[]
    }
}
