//! What crates above this one register: formats, protocols, encryption inside images.
//!
//! This crate declares functions that a program has once: the crate `zebu` defines them by [`register!`], and so
//! do the tests of crates that are linked without it. It is as with a global allocator: a program in which they
//! are missing, or are twice, is not linked. So there is nothing that has to be called first, and nothing that
//! a linker could leave out. Each layer declares its own by `linked!`.

/// Defines what is registered, once in a program.
#[doc(hidden)]
#[macro_export]
macro_rules! register {
    (formats: [$($formats:expr),* $(,)?], protocols: $protocols:expr, encryption: $encryption:expr $(,)?) => {
        const _: () = {
            // SAFETY: `linked!` of zebu-core declares them with these types, and nothing else has these
            // names.
            #[unsafe(no_mangle)]
            fn __zebu_core_0_1_formats() -> &'static [&'static [&'static $crate::parts::drivers::Driver]] {
                static LISTS: &[&[&$crate::parts::drivers::Driver]] = &[$($formats),*];
                LISTS
            }
            // SAFETY: as above.
            #[unsafe(no_mangle)]
            fn __zebu_core_0_1_protocols() -> &'static [&'static $crate::parts::protocols::Driver] {
                $protocols
            }
            // SAFETY: as above.
            #[unsafe(no_mangle)]
            fn __zebu_core_0_1_encryption() -> &'static [&'static dyn $crate::parts::drivers::Encryption] {
                $encryption
            }
        };
    };
}

/// Defines the function that returns what is registered by this symbol: nothing in the unit tests of this crate.
macro_rules! linked {
    ($(#[$doc:meta])* fn $name:ident() -> $list:ty = $symbol:ident) => {
        $(#[$doc])*
        #[cfg(not(test))]
        #[allow(unsafe_code)]
        fn $name() -> $list {
            // SAFETY: `register!` defines it with this type.
            unsafe extern "Rust" {
                safe fn $symbol() -> $list;
            }
            $symbol()
        }

        $(#[$doc])*
        #[cfg(test)]
        fn $name() -> $list {
            &[]
        }
    };
}
pub(crate) use linked;
