//! Places: an offset on the disk that the guest sees, and an offset in the
//! file that holds it. Two types, so that one is never taken for the other.

use std::fmt;

macro_rules! offset_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// The offset in bytes.
            #[must_use]
            pub const fn get(self) -> u64 {
                self.0
            }

            /// This offset plus `bytes`; `None` past 2^64.
            #[must_use]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(v) => Some(Self(v)),
                    None => None,
                }
            }

            /// This offset minus `bytes`; `None` below zero.
            #[must_use]
            pub const fn checked_sub(self, bytes: u64) -> Option<Self> {
                match self.0.checked_sub(bytes) {
                    Some(v) => Some(Self(v)),
                    None => None,
                }
            }

            /// Whether the offset is a multiple of `1 << bits` bytes. With
            /// `bits` of 64 or more only zero is.
            #[must_use]
            pub const fn is_aligned(self, bits: u32) -> bool {
                self.within(bits) == 0
            }

            /// The bytes from the start of the unit of `1 << bits` bytes that
            /// the offset lies in.
            #[must_use]
            pub const fn within(self, bits: u32) -> u64 {
                if bits >= 64 {
                    self.0
                } else {
                    self.0 & ((1 << bits) - 1)
                }
            }

            /// The offset rounded down to a multiple of `1 << bits` bytes.
            #[must_use]
            pub const fn align_down(self, bits: u32) -> Self {
                Self(self.0 - self.within(bits))
            }

        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl fmt::LowerHex for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }

        impl From<$name> for u64 {
            fn from(offset: $name) -> u64 {
                offset.0
            }
        }
    };
}

offset_type! {
    /// A byte offset on the virtual disk, as the guest counts.
    GuestOffset
}

offset_type! {
    /// A byte offset in the image file (or in its external data file).
    HostOffset
}

#[cfg(test)]
mod tests {
    //! Guards against: rounding that wraps around at the ends of the range.
    use super::*;

    #[test]
    fn alignment_and_its_ends() {
        assert_eq!(HostOffset(0x1_2345).align_down(16), HostOffset(0x1_0000));
        assert_eq!(GuestOffset(7).within(64), 7);
        assert!(GuestOffset(0).is_aligned(64));
        assert_eq!(GuestOffset(u64::MAX).checked_add(1), None);
        assert_eq!(HostOffset(0x5_0000).to_string(), "0x50000");
    }
}
