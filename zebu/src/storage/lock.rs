//! stand-in
use super::File;
#[derive(Clone, Copy, Debug)]
pub struct LockRequest;
impl LockRequest {
    pub const WRITER: Self = Self;
    pub const READER: Self = Self;
    pub const BACKING: Self = Self;
    pub const DATA_WRITER: Self = Self;
    pub const DATA_READER: Self = Self;
}
pub fn lock(_f: &File, _r: LockRequest) -> crate::Result<()> {
    Ok(())
}
