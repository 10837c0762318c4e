//! The formats and the protocols, for the core.
#![allow(unsafe_code)]

zebu_core::register!(
    formats: [zebu_formats::FORMATS, ENCRYPTED],
    protocols: zebu_net::PROTOCOLS,
);

#[cfg(feature = "crypt")]
use zebu_crypt::FORMATS as ENCRYPTED;
#[cfg(not(feature = "crypt"))]
static ENCRYPTED: &[&zebu_core::parts::drivers::Driver] = &[];
