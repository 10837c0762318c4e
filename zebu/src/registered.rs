//! The formats and the protocols, for the core.
#![allow(unsafe_code)]

zebu_core::register!(
    formats: zebu_formats::FORMATS,
    protocols: zebu_net::PROTOCOLS,
);
