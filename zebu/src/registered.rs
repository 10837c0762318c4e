//! The formats, the protocols, and encryption, for the core.
#![allow(unsafe_code)]

zebu_core::register!(
    formats: [zebu_formats::FORMATS, encrypted::FORMATS],
    protocols: zebu_net::PROTOCOLS,
    encryption: encrypted::ENCRYPTION,
);

#[cfg(feature = "crypt")]
use zebu_crypt as encrypted;

#[cfg(not(feature = "crypt"))]
mod encrypted {
    use zebu_core::parts::drivers::{Driver, Encryption};

    pub static FORMATS: &[&Driver] = &[];
    pub static ENCRYPTION: &[&dyn Encryption] = &[];
}
