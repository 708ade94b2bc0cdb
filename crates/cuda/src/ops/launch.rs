//! How families say which kernels their ops launch.

use crate::CudaError;
use crate::call::Call;
use lockstep_ir::OpKind;

/// What queues an op's kernels. Whoever calls it vouches that the arena is that of the program which the call is of.
pub type Launch = unsafe fn(Call) -> Result<(), CudaError>;
/// Those of a family.
pub type Launches = Vec<(OpKind, Launch)>;

/// The table of a family, as [`by_kind`](lockstep_exec::by_kind).
macro_rules! launches {
    ($call:ident: $($kind:ident $({ $($attribute:tt)* })? => $run:expr,)*) => {
        lockstep_exec::by_kind! { $call: Call => $crate::ops::launch::Launch; $($kind $({ $($attribute)* })? =>
            // SAFETY: whoever calls vouches for the arena; the verifier has checked that operands lie in it and overlap only in place.
            unsafe { $run },
        )* }
    };
}
pub(super) use launches;
