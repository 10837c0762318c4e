//! The native part of the Python package `zebu`: devices, whose requests the threads of a
//! [`zebu::Remote`] execute, and jobs. What users see is in `python/zebu`.

mod check;
mod completions;
mod convert;
mod create;
mod device;
mod error;
mod extents;
mod info;
mod open;
mod progress;
mod value;
mod wait;

use pyo3::prelude::*;

#[pymodule(name = "_zebu")]
mod native {
    #[pymodule_export]
    use super::check::check;
    #[pymodule_export]
    use super::completions::Completions;
    #[pymodule_export]
    use super::convert::convert;
    #[pymodule_export]
    use super::create::create;
    #[pymodule_export]
    use super::device::Device;
    #[pymodule_export]
    use super::open::open;

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
