//! Programs of debug builds are not position-independent: the tests start thousands of them, and each
//! would relocate itself first.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("PROFILE").as_deref() == Ok("debug") {
        println!("cargo::rustc-link-arg-bins=-no-pie");
    }
}
