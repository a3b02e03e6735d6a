//! The embedded kernels: one fatbin per kernels/*.cu, made by build.rs.
use crate::error::machine;
use anyhow::Result;

include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// An error that says what was missing when this program was built without kernels.
pub fn check() -> Result<()> {
    if FATBINS.is_empty() {
        return Err(machine(BUILT_WITH));
    }
    Ok(())
}

/// What the kernels were built with and for: compute capabilities with machine code, and the portable code for later
/// ones.
pub fn built_with() -> String {
    match FATBINS {
        [] => BUILT_WITH.to_string(),
        _ => format!("{BUILT_WITH}, portable code for {}.{} and later", PTX / 10, PTX % 10),
    }
}
